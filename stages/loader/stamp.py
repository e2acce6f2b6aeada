"""Which content a file has: what must be the same for anything kept about the file to be true of it.

`Stamp.of(fd, path)` of an open file; `stamp.digest` names the content; `stamp.check(path)` raises DataError if the
file at the path is another one by now.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from stages.loader.rows import DataError

BLOCKS, BLOCK = 60, 4096
"""Blocks of a file that are hashed, spread evenly, and their bytes: all of a file up to 240 KiB."""

TICK_S = 0.02
"""Longer than the clock tick by which file systems note the time of a change."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """Size in bytes, time of the last change in ns, inode, and a hash of sampled blocks (xxh3, 16 bytes)."""

    size: int
    mtime_ns: int
    inode: int
    sample: bytes

    @classmethod
    def of(cls, fd: int, path: Path) -> Stamp:
        """Of an open file; DataError if it is changed meanwhile.

        A file that was written just now is given a moment: a change within the same tick of the clock could not be
        told by its time.
        """
        if (age := time.time() - os.fstat(fd).st_mtime) < TICK_S:
            time.sleep(TICK_S if age < 0 else TICK_S - age)
        before = os.fstat(fd)
        sample = _sample(fd, before.st_size)
        stamp = cls(before.st_size, before.st_mtime_ns, before.st_ino, sample)
        if not stamp._fits(os.fstat(fd)):
            raise DataError(f"{path} is being written to; it must be complete before a run starts")
        return stamp

    @property
    def digest(self) -> bytes:
        """16 bytes that name the content, wherever a copy of the file lies."""
        return xxhash.xxh3_128_digest(self.size.to_bytes(8, "little") + self.sample)

    def check(self, path: Path) -> None:
        """DataError if the file was changed or replaced. One that was only removed is still there to be read."""
        try:
            now = os.stat(path)
        except FileNotFoundError:
            return
        if not self._fits(now):
            raise DataError(f"{path} was changed while the run reads it")

    def _fits(self, now: os.stat_result) -> bool:
        return (now.st_size, now.st_mtime_ns, now.st_ino) == (self.size, self.mtime_ns, self.inode)


def _sample(fd: int, size: int) -> bytes:
    hashed = xxhash.xxh3_128()
    if size <= BLOCKS * BLOCK:
        starts = range(0, size, BLOCK)
    else:
        starts = np.linspace(0, size - BLOCK, BLOCKS).astype(np.int64).tolist()
    for start in starts:
        hashed.update(os.pread(fd, BLOCK, start))
    return hashed.digest()
