"""What is kept beside a data file: written whole, read back, refused when it is not true of the file any more."""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stages.loader import sidecar
from stages.loader.sidecar import Counts, Scan, Sidecar, Verdict, build, load, only_one
from stages.loader.stamp import Stamp

STAMP = Stamp(300, 5, 7, b"s" * 16)
OFFSETS = np.array([3, 100, 200, 300])


def scan(offsets: np.ndarray = OFFSETS, lines: int = 5) -> Scan:
    def parts() -> Generator[np.ndarray, None, Counts]:
        yield offsets[:1]
        yield offsets[1:]
        return Counts(max(len(offsets) - 1, 0), lines)

    return parts


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data file in a folder of its own; the user's cache folder is another."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    path = tmp_path / "data" / "train.jsonl"
    path.write_bytes(b"x" * 300)
    return path


def again(path: Path, stamp: Stamp = STAMP, index_dir: str = "") -> Sidecar:
    found = load(path, stamp, index_dir)
    assert found is not None
    return found


def test_what_is_built_is_found_again(path: Path) -> None:
    for built in (build(path, STAMP, "", scan()), again(path)):
        assert built.offsets.tolist() == [3, 100, 200, 300]
        assert built.offsets.dtype == np.int64
        assert (built.counts, built.file) == (Counts(3, 5), path.with_name("train.jsonl.hridx"))
        assert built.verdict(b"k" * 16, 1) is None
    assert sorted(p.name for p in path.parent.iterdir()) == ["train.jsonl", "train.jsonl.hridx"]


def test_offsets_beyond_32_bits(path: Path) -> None:
    far = np.array([0, 2**31, 2**33, 2**40])
    stamp = replace(STAMP, size=2**40)
    assert build(path, stamp, "", scan(far)).offsets.tolist() == far.tolist() == again(path, stamp).offsets.tolist()


def test_a_format_with_positions_of_its_own_keeps_none(path: Path) -> None:
    def nothing() -> Generator[np.ndarray, None, Counts]:
        yield from ()
        return Counts(9, 9)

    build(path, STAMP, "", nothing).with_verdict(b"k" * 16, Verdict(9, np.array([2])))
    assert len(again(path).offsets) == 0
    assert again(path).counts == (9, 9)
    verdict = again(path).verdict(b"k" * 16, 9)
    assert verdict is not None
    assert verdict.bad.tolist() == [2]


def test_several_verdicts_are_kept(path: Path) -> None:
    first = build(path, STAMP, "", scan())
    first.with_verdict(b"a" * 16, Verdict(3, np.array([], np.int64)))
    first.with_verdict(b"b" * 16, Verdict(2, np.array([0, 1])))  # by one that does not know of the other
    found = again(path)
    assert found.offsets.tolist() == OFFSETS.tolist()
    a, b = found.verdict(b"a" * 16, 3), found.verdict(b"b" * 16, 2)
    assert a is not None
    assert b is not None
    assert (a.checked, a.bad.tolist(), b.checked, b.bad.tolist()) == (3, [], 2, [0, 1])
    assert found.verdict(b"b" * 16, 3) is None  # the third row was not looked at
    found.with_verdict(b"b" * 16, Verdict(3, np.array([2])))
    assert again(path).verdict(b"b" * 16, 3) is not None


@pytest.mark.parametrize("part", ["size", "mtime_ns", "inode", "sample"])
def test_of_other_content_nothing_is_true(path: Path, part: str) -> None:
    build(path, STAMP, "", scan())
    other = {"size": 301, "mtime_ns": 6, "inode": 8, "sample": b"t" * 16}
    assert load(path, replace(STAMP, **{part: other[part]}), "") is None


def test_every_damage_is_noticed(path: Path) -> None:
    """Cut at each length, and each byte of the header and of the verdicts flipped. (Offsets are checked when read.)"""
    build(path, STAMP, "", scan()).with_verdict(b"k" * 16, Verdict(3, np.array([1])))
    file = path.with_name("train.jsonl.hridx")
    whole = file.read_bytes()
    offsets = range(4096, 4096 + 8 * len(OFFSETS))
    for length in [*range(0, len(whole), 97), len(whole) - 1]:
        file.write_bytes(whole[:length])
        assert load(path, STAMP, "") is None, length
    for at in [*range(104), *range(offsets.stop, len(whole))]:
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert load(path, STAMP, "") is None, at
    file.write_bytes(whole + b"x")
    assert load(path, STAMP, "") is None
    file.write_bytes(whole)
    assert load(path, STAMP, "") is not None


def test_a_damaged_one_is_made_anew(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    file = path.with_name("train.jsonl.hridx")
    file.write_bytes(b"something else")
    assert load(path, STAMP, "") is None
    assert f"{file} is not used, and made anew: it is no index" in caplog.text
    build(path, STAMP, "", scan())
    assert load(path, STAMP, "") is not None


def test_where_the_data_cannot_be_written_to_the_cache_folder_serves(path: Path, tmp_path: Path) -> None:
    path.with_name("train.jsonl.hridx").mkdir()  # nothing can be renamed to there
    file = build(path, STAMP, "", scan()).file
    assert file is not None
    assert file.parent == tmp_path / "cache" / "headrace"
    assert again(path).file == file
    other = tmp_path / "other" / "train.jsonl"
    assert sidecar.places(other, "")[1] != file  # of the same name, elsewhere
    assert [p.name for p in path.parent.iterdir() if p.name.endswith(".tmp")] == []


def test_a_given_folder_is_used_always(path: Path, tmp_path: Path) -> None:
    folder = str(tmp_path / "index" / "deep")
    file = build(path, STAMP, folder, scan()).file
    assert file is not None
    assert str(file.parent) == folder
    assert load(path, STAMP, "") is None
    assert again(path, index_dir=folder).file == file


def test_where_nothing_can_be_written_it_is_held_in_memory(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path.with_name("train.jsonl.hridx").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    held = build(path, STAMP, "", scan())
    assert (held.file, held.offsets.tolist(), held.counts) == (None, OFFSETS.tolist(), (3, 5))
    judged = held.with_verdict(b"k" * 16, Verdict(3, np.array([1])))
    assert judged.verdict(b"k" * 16, 3) is not None
    assert judged.offsets.tolist() == OFFSETS.tolist()
    [warning] = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert f"the index of {path} is not kept" in warning


def test_what_a_killed_process_left_behind_is_removed_in_time(path: Path) -> None:
    new, old = (path.with_name(f".train.jsonl.hridx.{n}.tmp") for n in ("1-1", "2-2"))
    for left in (new, old):
        left.touch()
    long_ago = time.time() - 2 * 86400
    os.utime(old, (long_ago, long_ago))
    build(path, STAMP, "", scan())
    assert (new.exists(), old.exists()) == (True, False)


def test_it_may_be_read_by_whom_the_data_may(path: Path) -> None:
    umask = os.umask(0o022)
    try:
        file = build(path, STAMP, "", scan()).file
        assert file is not None
        assert file.stat().st_mode & 0o777 == 0o644
    finally:
        os.umask(umask)


def test_only_one_at_a_time(path: Path) -> None:
    first, second = (os.open(path, os.O_RDONLY) for _ in range(2))
    inside: list[str] = []

    def work() -> None:
        with only_one(second):
            inside.append("second")

    try:
        thread = threading.Thread(target=work)
        with only_one(first):
            thread.start()
            time.sleep(0.1)
            inside.append("first")
        thread.join()
        assert inside == ["first", "second"]
    finally:
        os.close(first)
        os.close(second)


def test_a_lock_that_is_held_for_ever_does_not_stop_a_run(path: Path) -> None:
    first, second = (os.open(path, os.O_RDONLY) for _ in range(2))
    try:
        fcntl.flock(first, fcntl.LOCK_EX)
        started = time.monotonic()
        with only_one(second, wait_s=0.1):
            assert 0.1 <= time.monotonic() - started < 5
        with pytest.raises(BlockingIOError):  # the lock of the other is as it was
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(first)
        os.close(second)
