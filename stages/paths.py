"""Where a path of the configuration lies."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
"""The checkout, which holds `data/`."""


def resolve(path: str) -> Path:
    """Absolute. A relative path is looked for in the working directory, then in the checkout."""
    given = Path(path).expanduser()
    return given.absolute() if given.is_absolute() or given.exists() else ROOT / given


def cache_folder() -> Path:
    """Where what can be made again is kept from run to run: the user's, by the XDG base directory specification."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace"
