"""Token counts beside a file: whole blocks or none, whoever writes, whenever it is killed."""

from __future__ import annotations

import os
import pickle
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from stages.loader.length_file import BLOCK, LengthFile

STAMP, SETTINGS = b"s" * 16, b"t" * 16
ROWS = 2 * BLOCK + 10


@pytest.fixture
def name(tmp_path: Path) -> Path:
    return tmp_path / "a.jsonl.hrlen"


def counts_of(block: int, rows: int = ROWS) -> np.ndarray:
    size = min(BLOCK, rows - block * BLOCK)
    return np.arange(size, dtype=np.int32) + block


def test_a_block_is_known_once_it_is_put(name: Path) -> None:
    file = LengthFile.beside(name, STAMP, SETTINGS, ROWS)
    assert file.unknown(range(ROWS)) == [0, 1, 2]
    for block in (2, 0):
        file.put(block, counts_of(block))
    assert [file.known(b) for b in range(3)] == [True, False, True]
    assert file.unknown(range(BLOCK)) == file.unknown(range(2 * BLOCK, ROWS)) == file.unknown(range(5, 5)) == []
    assert file.unknown(range(BLOCK - 1, BLOCK + 1)) == [1]
    assert file.counts[2 * BLOCK :].tolist() == counts_of(2).tolist()
    with pytest.raises(ValueError, match="block 2 has 10 rows, not 4096"):
        file.put(2, counts_of(0))
    with pytest.raises(ValueError, match="read-only"):
        file.counts[0] = 1


@pytest.mark.parametrize("rows", [1, BLOCK, BLOCK + 1, 600 * BLOCK])
def test_sizes(name: Path, rows: int) -> None:
    file = LengthFile.beside(name, STAMP, SETTINGS, rows)
    last = (rows - 1) // BLOCK
    file.put(last, counts_of(last, rows))
    assert LengthFile.beside(name, STAMP, SETTINGS, rows).unknown(range(rows)) == list(range(last))
    assert file.counts[-1] == counts_of(last, rows)[-1]


def test_what_one_has_put_another_knows(name: Path) -> None:
    first, second = (LengthFile.beside(name, STAMP, SETTINGS, ROWS) for _ in range(2))
    copy = pickle.loads(pickle.dumps(second))
    assert not second.known(1)
    first.put(1, counts_of(1))
    assert second.known(1)
    assert copy.known(1)
    again = LengthFile.beside(name, STAMP, SETTINGS, ROWS)
    assert again.known(1)
    assert again.counts[BLOCK : 2 * BLOCK].tolist() == counts_of(1).tolist()


def test_in_memory_too(name: Path) -> None:
    file = LengthFile.in_memory(STAMP, SETTINGS, ROWS)
    script = (
        "import pickle, sys, numpy; from stages.loader.length_file import LengthFile;"
        "pickle.load(sys.stdin.buffer).put(2, numpy.arange(10))"
    )
    subprocess.run([sys.executable, "-c", script], input=pickle.dumps(file), check=True)
    assert file.known(2)
    assert file.counts[2 * BLOCK :].tolist() == list(range(10))
    assert list(name.parent.iterdir()) == []


@pytest.mark.parametrize("where", ["count", "hash"])
def test_a_block_that_is_not_whole_counts_as_none(name: Path, where: str) -> None:
    """A flipped bit, or a process that was killed between counts and hash: it is counted anew."""
    file = LengthFile.beside(name, STAMP, SETTINGS, ROWS)
    file.put(0, counts_of(0))
    file.put(1, counts_of(1))
    data = bytearray(file.path.read_bytes())
    data[-4 * ROWS + 4 * 17 if where == "count" else 64] ^= 1
    file.path.write_bytes(data)
    again = LengthFile.beside(name, STAMP, SETTINGS, ROWS)
    assert again.unknown(range(ROWS)) == [0, 2]
    again.put(0, counts_of(0))
    assert again.known(0)


def test_blocks_cannot_be_taken_for_each_other(name: Path) -> None:
    """The hash covers which block it is, and of what."""
    file = LengthFile.beside(name, STAMP, SETTINGS, 2 * BLOCK)
    file.put(0, np.zeros(BLOCK, np.int32))
    data = bytearray(file.path.read_bytes())
    data[72:80] = data[64:72]
    file.path.write_bytes(data)
    assert LengthFile.beside(name, STAMP, SETTINGS, 2 * BLOCK).unknown(range(2 * BLOCK)) == [1]


def test_each_kind_of_count_has_its_file_and_old_content_has_none(name: Path) -> None:
    kinds = [(STAMP, SETTINGS, ROWS), (STAMP, b"u" * 16, ROWS), (STAMP, SETTINGS, ROWS - 1)]
    files = [LengthFile.beside(name, *kind) for kind in kinds]
    for file in files:
        file.put(0, counts_of(0))
    assert len({f.path for f in files}) == 3
    assert all(LengthFile.beside(name, *kind).known(0) for kind in kinds)
    assert all(f.path.name.startswith("a.jsonl.hrlen-") for f in files)
    other = LengthFile.beside(name.with_name("b.jsonl.hrlen"), STAMP, SETTINGS, ROWS)
    new = LengthFile.beside(name, b"n" * 16, SETTINGS, ROWS)  # the data has changed
    assert not new.known(0)
    assert set(name.parent.iterdir()) == {new.path, other.path}
    assert files[0].known(0)  # who reads the old one goes on


@pytest.mark.parametrize("spoil", ["cut", "longer", "magic", "rows", "checksum", "empty"])
def test_a_damaged_file_is_made_anew(name: Path, spoil: str) -> None:
    file = LengthFile.beside(name, STAMP, SETTINGS, ROWS)
    file.put(0, counts_of(0))
    data = bytearray(file.path.read_bytes())
    at = {"magic": 0, "rows": 8, "checksum": 60}.get(spoil)
    if at is not None:
        data[at] ^= 1
    file.path.write_bytes({"cut": data[:-1], "longer": data + b"x", "empty": b""}.get(spoil, data))
    again = LengthFile.beside(name, STAMP, SETTINGS, ROWS)
    assert again.unknown(range(ROWS)) == [0, 1, 2]
    again.put(0, counts_of(0))
    assert LengthFile.beside(name, STAMP, SETTINGS, ROWS).known(0)


def test_processes_that_start_at_once_get_one_file(name: Path) -> None:
    script = (
        "import sys, os; from pathlib import Path; from stages.loader.length_file import LengthFile;"
        f"f = LengthFile.beside(Path(sys.argv[1]), {STAMP}, {SETTINGS}, {ROWS});"
        "print(os.fstat(f._fd).st_ino)"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", script, str(name)], stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    inodes = {p.communicate()[0] for p in started}
    assert len(inodes) == 1
    [file] = name.parent.iterdir()
    assert inodes == {f"{file.stat().st_ino}\n"}


def test_a_block_is_claimed_by_one_process(name: Path) -> None:
    file = LengthFile.beside(name, STAMP, SETTINGS, ROWS)
    script = (
        "import pickle, sys; f = pickle.load(sys.stdin.buffer)\n"
        "for b in range(3):\n"
        "    with f.claimed(b) as ours: print(ours)"
    )

    def claims() -> list[str]:
        run = subprocess.run([sys.executable, "-c", script], input=pickle.dumps(file), stdout=subprocess.PIPE)
        return run.stdout.decode().split()

    with file.claimed(1) as ours:
        assert ours
        assert claims() == ["True", "False", "True"]
    assert claims() == ["True"] * 3


def test_read_only(name: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts that somebody else has made can be read where writing is not allowed."""
    LengthFile.beside(name, STAMP, SETTINGS, ROWS).put(0, counts_of(0))
    really_open = os.open

    def no_writing(path: Path, flags: int, *more: int) -> int:
        if flags & os.O_RDWR:
            raise PermissionError(13, "Permission denied", str(path))
        return really_open(path, flags, *more)

    monkeypatch.setattr(os, "open", no_writing)
    file = LengthFile.beside(name, STAMP, SETTINGS, ROWS)
    assert (file.writable, file.known(0)) == (False, True)
    with pytest.raises(OSError, match="Bad file descriptor"):
        file.put(1, counts_of(1))


def test_a_full_disk_is_an_error_not_a_signal(name: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space"):
        LengthFile.beside(name, STAMP, SETTINGS, ROWS)
    assert list(name.parent.iterdir()) == []


def test_the_header_is_as_documented(name: Path) -> None:
    file = LengthFile.beside(name, STAMP, SETTINGS, ROWS)
    file.put(2, counts_of(2))
    data = file.path.read_bytes()
    assert struct.unpack_from("<8sqq16s16s", data) == (b"HRLEN\0\0\1", ROWS, BLOCK, STAMP, SETTINGS)
    assert np.frombuffer(data, "<i4")[-10:].tolist() == counts_of(2).tolist()
    assert len(data) == 4096 + 4 * ROWS


def test_a_file_that_is_cut_short_while_it_is_open_is_counted_again(name: Path) -> None:
    """Not a signal: nothing of it is mapped."""
    file = LengthFile.beside(name, STAMP, SETTINGS, ROWS)
    other = LengthFile.beside(name, STAMP, SETTINGS, ROWS)
    file.put(0, counts_of(0))
    file.put(1, counts_of(1))
    assert other.known(0)
    os.truncate(file.path, 0)
    assert np.array_equal(other.counts[other.span(0)], counts_of(0))
    assert not other.known(1)
    other.put(1, counts_of(1))
    assert other.known(1)
    assert np.array_equal(other.counts[other.span(1)], counts_of(1))
