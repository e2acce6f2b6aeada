"""The line index against a reference that splits bytes, and the files that are refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.loader import lines as lines_module
from stages.loader.lines import index, refusal


def reference(data: bytes) -> list[tuple[int, bytes]]:
    """(physical number, content) of lines that are not blank, by splitting at newline bytes."""
    rows = data.split(b"\n")
    if rows and data.startswith(b"\xef\xbb\xbf"):
        rows[0] = rows[0][3:]
    return [(i + 1, r) for i, r in enumerate(rows) if r.strip(b" \t\r")]


pieces = st.sampled_from(
    [
        b"\n",
        b"\r\n",
        b"\r",
        b" ",
        b"\t",
        b"{}",
        b'{"a":"b"}',
        b"\xef\xbb\xbf",
        "\u2028\u2029\x85".encode(),
        b"\x0b\x0c",
        b"\x00",
    ]
)


@given(st.lists(pieces, max_size=20).map(b"".join))
def test_the_index_finds_what_splitting_at_newlines_finds(data: bytes) -> None:
    lines = index(np.frombuffer(data, np.uint8))
    found = [(int(n), data[a:b]) for n, a, b in zip(lines.number, lines.start, lines.stop, strict=True)]
    assert found == reference(data)
    assert lines.whole == data.endswith(b"\n")
    assert all(c.dtype == np.int64 for c in (lines.start, lines.stop, lines.number))


@given(st.binary(max_size=200), st.integers(1, 9))
def test_newlines_are_found_across_the_borders_of_chunks(data: bytes, chunk: int) -> None:
    found = lines_module._positions(np.frombuffer(data, np.uint8), ord("\n"), chunk)
    assert found.tolist() == [i for i, b in enumerate(data) if b == ord("\n")]


class Far:
    """The bytes of a file that is all zeros up to `start`, where `tail` begins; takes no memory."""

    def __init__(self, start: int, tail: bytes):
        self.start, self.tail = start, np.frombuffer(tail, np.uint8)

    def __len__(self) -> int:
        return self.start + len(self.tail)

    def __getitem__(self, at: Any) -> np.ndarray:
        if isinstance(at, np.ndarray):
            return np.where(at < self.start, np.uint8(0), self.tail[np.maximum(at - self.start, 0)])
        begin, end, _ = at.indices(len(self))
        zeros = np.broadcast_to(np.uint8(0), max(0, min(end, self.start) - begin))
        tail = self.tail[max(0, begin - self.start) : max(0, end - self.start)]
        return np.concatenate([zeros, tail]) if len(tail) else zeros


def test_offsets_pass_two_gibibytes() -> None:
    """Rows after byte 2^31, where 32-bit arithmetic wraps (NVIDIA/Megatron-LM issue 1672)."""
    far = 2**31 + 5
    data: Any = Far(far, b'\n{"a":1}\n{"b":2}\n')
    lines = index(data)
    assert lines.start.tolist() == [0, far + 1, far + 9]
    assert data[lines.start[2] : lines.stop[2]].tobytes() == b'{"b":2}'


@pytest.mark.parametrize(
    ("head", "name"),
    [(b"\x1f\x8b\x08", "gzip"), (b"\x28\xb5\x2f\xfd", "zstd"), (b"PAR1", "Parquet"), (b"\xff\xfe{\x00", "UTF-16")],
)
def test_other_formats_are_named(tmp_path: Path, head: bytes, name: str) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(head + bytes(20))
    assert f"holds {name} content" in refusal(path)


def test_a_plain_file_is_not_refused(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(b"{}")
    assert refusal(path) == ""


def test_what_is_no_file_is_refused_without_waiting(tmp_path: Path) -> None:
    fifo, empty = tmp_path / "fifo", tmp_path / "empty.jsonl"
    os.mkfifo(fifo)
    empty.touch()
    assert "is a directory" in refusal(tmp_path)
    assert "is not a regular file" in refusal(fifo)
    assert refusal(empty) == f"{empty} is empty"
    assert refusal(tmp_path / "none.jsonl") == f"there is no file {tmp_path / 'none.jsonl'}"
    assert "cannot be read: Not a directory" in refusal(empty / "below")


def test_a_file_without_permission_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(b"{}")
    path.chmod(0)
    is_root = os.geteuid() == 0
    try:
        if is_root:  # who may read everything: look as somebody else
            os.seteuid(65534)
        assert "cannot be read: Permission denied" in refusal(path)
    finally:
        if is_root:
            os.seteuid(0)
