"""Token counts of a file's rows, kept beside it: filled block by block, by any number of processes, in any order.

Layout, little endian: a header of 64 bytes (magic, rows, rows a block, stamp, settings, checksum), one xxh3_64 a
block, the counts as int32 from the next page on. A block counts only with the right hash over its counts, its number
and the key. So it needs no lock, and no order on the way to the disk: who writes a block writes the same bytes as
anybody else would, and a block that was cut off by a crash is counted again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import mmap
import os
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import numpy as np
import xxhash

BLOCK = 4096
"""Rows that are counted, checked and written together."""

BAD = -1
"""The row cannot be used, so there is no prompt to count."""

REFUSED = -2
"""The chat template refuses the prompt."""

_MAGIC = b"HRLEN\x00\x00\x01"
_HEADER = struct.Struct("<8sqq16s16s")
_HEADER_SIZE = 64


class LengthFile:
    """`stamp` stands for the rows (16 bytes), `settings` for how they are counted (16 bytes). Pickled, it is opened
    again where it arrives. OSError where the file can be neither opened nor made."""

    def __init__(self, fd: int, path: Path, stamp: bytes, settings: bytes, rows: int, *, writable: bool = True):
        self.path, self.rows, self.writable = path, rows, writable
        self.blocks = -(-rows // BLOCK)
        self._fd, self._stamp, self._settings = fd, stamp, settings
        self._start, _ = _layout(rows)
        self._counts = np.zeros(rows, np.int32)
        self.counts = self._counts.view()
        """int32 [rows], read-only; what stands in a block that is not `known` means nothing. Read, not mapped: a
        mapping of a file that somebody cuts short ends the process by a signal."""
        self.counts.flags.writeable = False
        self._good = np.zeros(self.blocks, bool)

    @classmethod
    def beside(cls, name: Path, stamp: bytes, settings: bytes, rows: int) -> Self:
        """The file whose name is this one, a hyphen and eight digits for what it counts; made if missing. Of
        several processes that start at once, all get the one that was there first."""
        digits = xxhash.xxh3_64_hexdigest(_head(stamp, settings, rows))[:8]
        path = name.with_name(f"{name.name}-{digits}")
        for _ in range(100):
            try:
                return cls.at(path, stamp, settings, rows)
            except FileNotFoundError:
                _make(path, stamp, settings, rows)
                _remove_outdated(name, stamp)
            except _Damaged:
                path.unlink(missing_ok=True)
        raise OSError(f"{path} does not stay as it was made")

    @classmethod
    def in_memory(cls, stamp: bytes, settings: bytes, rows: int) -> Self:
        """Other processes reach it by its path while this one lives."""
        fd = os.memfd_create("headrace-lengths", os.MFD_CLOEXEC)
        _fill(fd, stamp, settings, rows)
        return cls(fd, Path(f"/proc/{os.getpid()}/fd/{fd}"), stamp, settings, rows)

    @classmethod
    def at(cls, path: Path, stamp: bytes, settings: bytes, rows: int) -> Self:
        """A file that is there. Read-only, if no more is allowed."""
        writable = True
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as e:
            if e.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            writable, fd = False, os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        head = _head(stamp, settings, rows)
        if os.fstat(fd).st_size != _layout(rows)[1] or os.pread(fd, len(head), 0) != head:
            os.close(fd)
            raise _Damaged(f"{path} is cut short, or not what its name says")
        return cls(fd, path, stamp, settings, rows, writable=writable)

    def __reduce__(self):
        return LengthFile.at, (self.path, self._stamp, self._settings, self.rows)

    def known(self, block: int) -> bool:
        """Whether the block's counts are there, by whoever they were written."""
        if not self._good[block] and self._fd >= 0:
            (hashed,) = struct.unpack("<Q", os.pread(self._fd, 8, _HEADER_SIZE + 8 * block).ljust(8, b"\0"))
            if hashed:
                span = self.span(block)
                counts = os.pread(self._fd, 4 * (span.stop - span.start), self._start + 4 * span.start)
                if len(counts) == 4 * (span.stop - span.start):
                    found = np.frombuffer(counts, "<i4")
                    if self._hash(block, found) == hashed:
                        self._counts[span], self._good[block] = found, True
        return bool(self._good[block])

    def unknown(self, rows: range) -> list[int]:
        """Blocks of these rows whose counts are not there yet."""
        return [b for b in range(rows.start // BLOCK, -(-rows.stop // BLOCK)) if not self.known(b)]

    def span(self, block: int) -> slice:
        return slice(block * BLOCK, min((block + 1) * BLOCK, self.rows))

    def put(self, block: int, counts: np.ndarray) -> None:
        """Write a block: int32, one count a row. OSError where it cannot be written."""
        counts = np.ascontiguousarray(counts, "<i4")
        if counts.shape != self.counts[self.span(block)].shape:
            raise ValueError(f"block {block} has {len(self.counts[self.span(block)])} rows, not {len(counts)}")
        os.pwrite(self._fd, counts.tobytes(), self._start + 4 * block * BLOCK)
        os.pwrite(self._fd, struct.pack("<Q", self._hash(block, counts)), _HEADER_SIZE + 8 * block)
        self._counts[self.span(block)], self._good[block] = counts, True

    def _hash(self, block: int, counts: np.ndarray) -> int:
        """Never 0, which stands where nothing was written."""
        return xxhash.xxh3_64_intdigest(counts.tobytes() + self._stamp + self._settings, block) or 1

    @contextlib.contextmanager
    def claimed(self, block: int) -> Iterator[bool]:
        """Yields whether this process may count the block; False while another one does. For the work's sake only:
        both could. A record lock (fcntl(2)), which the kernel lifts when its process ends, however it ends."""
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, block)
            ours = True
        except (BlockingIOError, PermissionError):
            ours = False
        except OSError:  # a file system without locks
            ours = True
        try:
            yield ours
        finally:
            if ours:
                with contextlib.suppress(OSError):
                    fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, block)

    def close(self) -> None:
        """Safe to call twice. `counts` stays valid for who holds it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class _Damaged(OSError):
    """The file is there and cannot be used."""


def _layout(rows: int) -> tuple[int, int]:
    """Where the counts begin, and the size of the file."""
    start = -(-(_HEADER_SIZE + 8 * -(-rows // BLOCK)) // mmap.PAGESIZE) * mmap.PAGESIZE
    return start, start + 4 * rows


def _head(stamp: bytes, settings: bytes, rows: int) -> bytes:
    head = _HEADER.pack(_MAGIC, rows, BLOCK, stamp, settings)
    return head + xxhash.xxh3_64_digest(head)


def _fill(fd: int, stamp: bytes, settings: bytes, rows: int) -> None:
    os.posix_fallocate(fd, 0, _layout(rows)[1])  # a full disk is an error here, not a signal later
    os.pwrite(fd, _head(stamp, settings, rows), 0)


def _make(path: Path, stamp: bytes, settings: bytes, rows: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        _fill(fd, stamp, settings, rows)
        os.fchmod(fd, 0o644)
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        os.close(fd)
        os.unlink(temporary)


def _remove_outdated(name: Path, stamp: bytes) -> None:
    """Counts of what the file held before. Who still reads them keeps them open."""
    for other in name.parent.glob(f"{glob.escape(name.name)}-*"):
        with contextlib.suppress(OSError, struct.error):
            with other.open("rb") as file:
                magic, _, _, its_stamp, _ = _HEADER.unpack(file.read(_HEADER.size))
            if magic[:5] == _MAGIC[:5] and its_stamp != stamp:
                other.unlink()
