"""Lines of a text file, and what a file must be to have any."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_BOM = b"\xef\xbb\xbf"
_BLANK = b" \t\r"
_FORMATS = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"PK\x03\x04": "zip",
    b"PAR1": "Parquet",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}


def refusal(path: Path) -> str:
    """Why the file cannot be read as JSONL, in words, or '' if it can. Nothing but its first bytes is read."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            return f"{path} is a directory; a JSONL file is needed"
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
    kind = next((name for magic, name in _FORMATS.items() if head.startswith(magic)), "")
    return f"{path} holds {kind} content; JSONL must be plain UTF-8 text (unpack or convert it first)" if kind else ""


@dataclass(frozen=True, slots=True)
class Lines:
    """The lines of a file that are not blank: bytes `start` to `stop` (without the newline) and the physical
    line `number` from 1; int64 [B] each. Only a newline byte ends a line, so that U+2028 and the like stay
    inside a row. A carriage return before it is left for JSON, to which it is white space. `whole`: the file
    ends with a newline.
    """

    start: np.ndarray
    stop: np.ndarray
    number: np.ndarray
    whole: bool

    def __len__(self) -> int:
        return len(self.start)

    def first(self, count: int) -> Lines:
        """The first `count` lines; 0: all."""
        count = count or len(self)
        return Lines(self.start[:count], self.stop[:count], self.number[:count], self.whole)


def index(data: np.ndarray) -> Lines:
    """Of the bytes of a file, uint8 [size]."""
    newlines = _positions(data, ord("\n"))
    whole = bool(len(data)) and len(newlines) > 0 and newlines[-1] == len(data) - 1
    stop = newlines if whole or not len(data) else np.append(newlines, np.int64(len(data)))
    start = np.zeros_like(stop)
    start[1:] = stop[:-1] + 1
    if len(start) and data[:3].tobytes() == _BOM:
        start[0] = 3
    kept = ~_blank(data, start, stop)
    return Lines(start[kept], stop[kept], np.flatnonzero(kept).astype(np.int64) + 1, whole)


def _positions(data: np.ndarray, byte: int, chunk: int = 1 << 24) -> np.ndarray:
    """int64 positions of a byte; in chunks, so that the comparison needs little memory whatever the file."""
    found = [np.flatnonzero(data[i : i + chunk] == byte).astype(np.int64) + i for i in range(0, len(data), chunk)]
    return np.concatenate(found) if found else np.empty(0, np.int64)


def _blank(data: np.ndarray, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
    """bool [B]: nothing but spaces, tabs and carriage returns. Only lines that begin so are looked at closer."""
    blank = start >= stop
    begin = np.zeros(len(start), np.uint8)
    begin[~blank] = data[start[~blank]]
    for i in np.flatnonzero(np.isin(begin, list(_BLANK))):
        blank[i] = not data[start[i] : stop[i]].tobytes().strip(_BLANK)
    return blank
