"""Where a path of the configuration lies."""

from __future__ import annotations

import os
from pathlib import Path

from pipeline.errors import closest

ROOT = Path(__file__).resolve().parent.parent
"""The checkout, which holds `data/`."""


def resolve(path: str) -> Path:
    """Absolute. A relative path is looked for in the working directory, then in the checkout."""
    given = Path(path).expanduser()
    return given.absolute() if given.is_absolute() or given.exists() else ROOT / given


def cache_folder() -> Path:
    """Where what can be made again is kept from run to run: the user's, by the XDG base directory specification."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace"


def instead_of(path: Path, most: int = 8) -> str:
    """For a path that is not there: what is, in the last of its folders that exists, and which of it may be meant.

    A path that was given relative is looked for here too, as `resolve` does.
    """
    folder = next(p for p in path.parents if p.is_dir())
    missing = path.relative_to(folder).parts[0]
    folders = [*dict.fromkeys([folder, Path.cwd()])] if folder == ROOT else [folder]
    names = sorted({f.name + "/" * f.is_dir() for d in folders for f in d.iterdir() if not f.name.startswith(".")})
    match = closest(missing, (n.rstrip("/") for n in names))
    shown = ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
    there = f"{' and '.join(map(str, folders))} {'hold' if len(folders) > 1 else 'holds'}: {shown or 'nothing'}"
    return (f"did you mean '{match}'? " if match else "") + there
