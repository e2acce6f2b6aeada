"""What a stamp notices, and what it does not mind."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from stages.loader.rows import DataError
from stages.loader.stamp import BLOCK, BLOCKS, Stamp


def of(path: Path) -> Stamp:
    fd = os.open(path, os.O_RDONLY)
    try:
        return Stamp.of(fd, path)
    finally:
        os.close(fd)


def rewrite(path: Path, at: int, byte: bytes) -> None:
    """One byte, with the old time put back."""
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    with path.open("r+b") as file:
        file.seek(at)
        file.write(byte)
    os.utime(path, ns=times)


@pytest.mark.parametrize("size", [0, 1, 5000, BLOCK * BLOCKS, BLOCK * BLOCKS + 1, 3_000_000])
def test_the_same_file_has_the_same_stamp(tmp_path: Path, size: int) -> None:
    path = tmp_path / "a"
    path.write_bytes(os.urandom(size))
    assert of(path) == of(path)
    of(path).check(path)


def test_a_small_file_is_hashed_whole(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"x" * BLOCK * BLOCKS)
    before = of(path)
    for at in (0, 100_001, BLOCK * BLOCKS - 1):
        rewrite(path, at, b"y")
        assert of(path).sample != before.sample
        rewrite(path, at, b"x")
        assert of(path) == before


def test_both_ends_of_a_large_file_are_hashed(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"x" * 3_000_000)
    before = of(path)
    for at in (0, 2_999_999):
        rewrite(path, at, b"y")
        assert of(path).sample != before.sample
        rewrite(path, at, b"x")


def test_time_size_and_inode_tell(tmp_path: Path) -> None:
    path, copy = tmp_path / "a", tmp_path / "b"
    path.write_bytes(b"x" * 3_000_000)
    before = of(path)
    shutil.copy2(path, copy)  # with its time
    assert of(copy) != before
    assert of(copy).digest == before.digest  # the same content, wherever it lies
    os.replace(copy, path)
    with pytest.raises(DataError, match="was changed while the run reads it"):
        before.check(path)
    now = of(path)
    rewrite(path, 1_000_000, b"y")  # between two samples, and with the old time: nothing cheap can tell
    assert of(path) == now
    os.utime(path, ns=(0, now.mtime_ns + 1))
    assert of(path) != now


def test_a_file_that_was_written_just_now_is_given_a_moment(tmp_path: Path) -> None:
    """A second change within one tick of the file system's clock would leave size and time as they are."""
    path = tmp_path / "a"
    path.write_bytes(b"x" * 3_000_000)
    before = of(path)
    with path.open("r+b") as file:
        file.seek(1_000_000)  # between two samples
        file.write(b"y")
    assert of(path) != before


def test_a_removed_file_is_not_a_changed_one(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"x")
    stamp = of(path)
    path.unlink()
    stamp.check(path)


def test_a_time_in_the_future_does_not_make_it_wait(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"x")
    later = time.time() + 3600
    os.utime(path, (later, later))
    started = time.monotonic()
    of(path)
    assert time.monotonic() - started < 1
