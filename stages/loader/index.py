"""Where the rows of a text begin: found at memory speed, without a step of Python for each line.

Only a newline byte ends a line, so that U+2028, U+0085 and the like stay inside a row. A row spans from its first byte
to where the next row begins: the newline, a carriage return before it and blank lines behind it are white space to
JSON. A byte order mark and blank lines before the first row are left out.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Generator

import numpy as np

from stages.loader.sidecar import Counts

Read = Callable[[mmap.mmap, int], int]
"""`read(buffer, at)` fills the buffer with the bytes from `at` on and returns their number; 0 at the end."""

CHUNK = 1 << 19
"""Bytes looked at in one go: they stay in the processor's cache. A multiple of 8."""

NEWLINE = 10
_BOM = b"\xef\xbb\xbf"
_BLANKS = b" \t\r"
_IS_BLANK = np.isin(np.arange(256), list(_BLANKS))
_STEPS = 16
"""Leading blanks of a line that are looked at for all lines together; lines with more are looked at one by one."""


def row_starts(read: Read, chunk: int = CHUNK) -> Generator[np.ndarray, None, Counts]:
    """The byte at which each row begins, and at last the size of the whole; int64, in parts. Returns the counts."""
    buffer, data, is_newline = _buffers(chunk)
    at = rows = newlines = last = 0
    begun: int | None = 0  # where the line under way begins, as long as only blanks were seen of it
    while count := read(buffer, at):
        np.equal(data, NEWLINE, out=is_newline)
        is_newline[count:] = False
        ends = true_positions(is_newline)
        found: list[np.ndarray] = []
        stop = int(ends[0]) if len(ends) else count
        if begun is not None:
            skip = 3 if at == 0 and buffer[:3] == _BOM else 0
            if _has_content(buffer, skip, stop):
                found.append(np.array([begun + skip]))
                begun = None
        if len(ends):
            starts = ends + 1
            found.append(starts[:-1][~_blank(data, starts[:-1], ends[1:])] + at)
            begun = at + (tail := int(starts[-1]))
            if _has_content(buffer, tail, count):
                found.append(np.array([begun]))
                begun = None
        newlines += len(ends)
        at += count
        last = buffer[count - 1]
        starts = np.concatenate(found) if found else np.empty(0, np.int64)
        rows += len(starts)
        yield starts
    yield np.array([at])
    return Counts(rows, newlines + (at > 0 and last != NEWLINE))


def line_numbers(read: Read, starts: np.ndarray, chunk: int = CHUNK) -> np.ndarray:
    """The physical line, from 1, in which each of these bytes lies; int64, ascending. Reads up to the last of them."""
    buffer, data, is_newline = _buffers(chunk)
    out = np.ones(len(starts), np.int64)
    at = done = lines = 0
    while done < len(starts) and (count := read(buffer, at)):
        np.equal(data, NEWLINE, out=is_newline)
        is_newline[count:] = False
        ends = true_positions(is_newline)
        upto = int(np.searchsorted(starts, at + count))
        out[done:upto] += lines + np.searchsorted(ends, starts[done:upto] - at)
        done, lines, at = upto, lines + len(ends), at + count
    return out


def reader(data: bytes) -> Read:
    """Of bytes in memory."""

    def read(buffer: mmap.mmap, at: int) -> int:
        part = data[at : at + len(buffer)]
        buffer[: len(part)] = part
        return len(part)

    return read


def file_reader(fd: int) -> Read:
    return lambda buffer, at: os.preadv(fd, [buffer], at)


def true_positions(mask: np.ndarray) -> np.ndarray:
    """np.flatnonzero of a bool array with a multiple of 8 entries of which few are true: eight at a time."""
    words = mask.view(np.uint64)
    hit = np.flatnonzero(words != 0)
    inner = np.flatnonzero(words[hit].view(np.bool_))
    return (hit[inner >> 3] << 3) + (inner & 7)


def _buffers(chunk: int) -> tuple[mmap.mmap, np.ndarray, np.ndarray]:
    """A buffer for reading, its bytes, and a mask of the same size. Whole pages of their own: the kernel copies into
    other addresses at a quarter of the speed."""
    buffer = mmap.mmap(-1, chunk)
    return buffer, np.frombuffer(buffer, np.uint8), np.frombuffer(mmap.mmap(-1, chunk), np.bool_)


def _has_content(buffer: mmap.mmap, start: int, stop: int) -> bool:
    return start < stop and (buffer[start] not in _BLANKS or bool(buffer[start:stop].strip(_BLANKS)))


def _blank(data: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """bool [n]: nothing but blanks from start to stop."""
    blank = np.zeros(len(starts), np.bool_)
    open_ = np.flatnonzero(data[starts] <= 32)  # blanks, newlines and other control characters
    places = starts[open_]
    for _ in range(_STEPS):
        ended = places >= stops[open_]
        blank[open_[ended]] = True
        more = ~ended & _IS_BLANK[data[np.minimum(places, len(data) - 1)]]
        open_, places = open_[more], places[more] + 1
        if not len(open_):
            return blank
    for i in open_.tolist():
        blank[i] = not data[starts[i] : stops[i]].tobytes().strip(_BLANKS)
    return blank
