"""Which files a loader's `path` names, and what a file must be to be read.

find(path)            the files, in order, and what a glob left out
refusal(path, reads)  why a file cannot be read, in words, or ''
"""

from __future__ import annotations

import contextlib
import glob
import os
import resource
import shlex
import stat
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stages.loader.sidecar import SUFFIX
from stages.paths import ROOT, resolve

TEXT, GZIP, ZSTD, PARQUET = "text", "gzip", "zstd", "Parquet"
"""Kinds of content that a loader may say it reads."""

LENGTHS, SCHEMA = ".hrlen", ".hrfeatures"
"""What the names of other files say that are kept beside a data file: of prompt lengths, and of a schema."""

_OTHERS = 512
"""Files that a process may have open beside data."""

_MAGIC = {
    b"\x1f\x8b": GZIP,
    b"\x28\xb5\x2f\xfd": ZSTD,
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"\x04\x22\x4d\x18": "lz4",
    b"PK\x03\x04": "zip",
    b"PAR1": PARQUET,
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
_UNPACK = {
    GZIP: "gzip -dc",
    ZSTD: "zstd -dc",
    "bzip2": "bzip2 -dc",
    "xz": "xz -dc",
    "lz4": "lz4 -dc",
    "zip": "unzip -p",
}
_SUFFIXES = {".gz", ".zst", ".zstd", ".bz2", ".xz", ".lz4", ".zip"}


@dataclass(slots=True)
class Found:
    """`files` in the order in which their rows follow; `hidden`: what a glob would match if it could be data;
    `problems`: what is wrong with the setting, in words."""

    files: list[Path] = field(default_factory=list)
    hidden: list[Path] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def find(path: Any) -> Found:
    """Of the setting `path`: a file, a glob, or a list of them. Whether the files can be read is not looked at."""
    found = Found()
    entries = path if isinstance(path, list | tuple) else [path]
    if not entries:
        found.problems.append("is an empty list; name at least one file")
    for entry in entries:
        if not isinstance(entry, str) or not entry:
            found.problems.append(f"'{entry}' is not the name of a file")
        elif glob.has_magic(entry) and not resolve(entry).exists():
            _expand(entry, found)
        else:
            found.files.append(resolve(entry))
    known = [identity(f) for f in found.files]
    if twice := sorted({str(f) for f, i in zip(found.files, known, strict=True) if known.count(i) > 1}):
        found.problems.append(f"names {', '.join(twice)} twice: its rows would come twice an epoch")
    return found


def identity(path: Path) -> object:
    """The same for all names of one file."""
    try:
        found = path.stat()
    except OSError:
        return path
    return found.st_dev, found.st_ino


def _expand(pattern: str, found: Found) -> None:
    given = Path(pattern).expanduser()
    bases = [given] if given.is_absolute() else [Path.cwd() / given, ROOT / given]
    whole = next((b for b in bases if any(glob.iglob(str(b), recursive=True, include_hidden=True))), bases[0])
    matches = sorted(glob.glob(str(whole), recursive=True, include_hidden=True))
    files = [Path(m) for m in matches if not os.path.isdir(m)]
    fixed = next(i for i, part in enumerate(whole.parts) if glob.has_magic(part))
    hidden = [f for f in files if _is_hidden(f, fixed)]
    found.hidden += hidden
    found.files += (kept := [f for f in files if f not in set(hidden)])
    if not kept:
        why = f" but {', '.join(f.name for f in hidden)}, which patterns leave out" if hidden else ""
        found.problems.append(f"no file matches '{pattern}'{why}")


def _is_hidden(file: Path, fixed: int) -> bool:
    """A name with a dot in front (editors and archives leave such files), or a file that loaders keep beside data.

    The first `fixed` parts of the path stand in the pattern as they are: those folders were named on purpose.
    """
    ours = file.name.endswith((SUFFIX, SCHEMA)) or f"{LENGTHS}-" in file.name
    return ours or any(p.startswith(".") for p in file.parts[fixed:])


def refusal(path: Path, reads: Collection[str] = (TEXT,)) -> str:
    """Why the file cannot be read by a loader of these kinds of content. Nothing but its first bytes is read."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            return f"{path} is a directory; a file is needed, or a glob such as {path}/*.jsonl"
        if not stat.S_ISREG(mode):  # a FIFO would block, and has no positions to come back to
            return f"{path} is not a regular file; a loader must be able to read it again"
        with path.open("rb") as file:
            head = file.read(8)
    except FileNotFoundError:
        return f"there is no file {path}"
    except OSError as e:
        return f"{path} cannot be read: {os.strerror(e.errno or 0)}"
    if not head:
        return f"{path} is empty"
    kind = kind_of(head)
    return "" if kind in reads else f"{path} holds {kind} content; {_advice(path, kind, reads)}"


def allow_open(files: int) -> None:
    """Raise this process's limit of open files, as far as it may, so that so many can be open beside others."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OTHERS + 2 * files  # a file and its index
    if resource.RLIM_INFINITY != soft < wanted:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with contextlib.suppress(OSError, ValueError):  # then opening one too many is the error
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, allowed), hard))


def kind_of_file(path: Path) -> str:
    """What it holds; '' if it cannot be read."""
    try:
        if not path.is_file():
            return ""
        with path.open("rb") as file:
            return kind_of(file.read(8))
    except OSError:
        return ""


def is_empty(path: Path) -> bool:
    """A regular file without a byte."""
    try:
        found = path.stat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and not found.st_size


def kind_of(head: bytes) -> str:
    """What a file holds, by its first bytes; its name may say something else."""
    if head[1:4] == b"\x2a\x4d\x18" and 0x50 <= head[0] <= 0x5F:  # a frame to be skipped, as some writers put first
        return ZSTD
    return next((name for magic, name in _MAGIC.items() if head.startswith(magic)), TEXT)


def _advice(path: Path, kind: str, reads: Collection[str]) -> str:
    if TEXT not in reads:
        return f"{' or '.join(sorted(reads))} is needed"
    if kind not in _UNPACK:
        return "JSONL must be plain UTF-8 text (convert it first)"
    plain = path.with_suffix("") if path.suffix in _SUFFIXES else path.with_name(f"{path.stem}-plain{path.suffix}")
    return f"unpack it first: {_UNPACK[kind]} {shlex.quote(str(path))} > {shlex.quote(str(plain))}"
