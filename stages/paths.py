"""Where a path of the configuration lies."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
"""The checkout, which holds `data/`."""


def resolve(path: str) -> Path:
    """Absolute. A relative path is looked for in the working directory, then in the checkout."""
    given = Path(path).expanduser()
    return given.absolute() if given.is_absolute() or given.exists() else ROOT / given
