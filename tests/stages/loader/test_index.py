"""Where rows begin, against a reference that splits bytes; line numbers, against one that counts."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stages.loader.index import line_numbers, reader, row_starts, true_positions
from stages.loader.sidecar import Counts


def reference(data: bytes) -> list[tuple[int, bytes]]:
    """(physical number, content) of lines that are not blank, by splitting at newline bytes."""
    rows = data.split(b"\n")
    if rows and data.startswith(b"\xef\xbb\xbf"):
        rows[0] = rows[0][3:]
    return [(i + 1, r.strip(b" \t\r")) for i, r in enumerate(rows) if r.strip(b" \t\r")]


def found(data: bytes, chunk: int) -> tuple[np.ndarray, Counts]:
    """Everything that the scan yields, and what it returns."""
    scan, parts = row_starts(reader(data), chunk), []
    while True:
        try:
            parts.append(next(scan))
        except StopIteration as end:
            return np.concatenate(parts), end.value


blanks = [b"\n", b"\r\n", b"\r", b" ", b"\t", b" " * 20, b"\n\n\n", b" \n" * 9]
others = [b"{}", b'{"a":"b"}', b"\xef\xbb\xbf", "\u2028\u2029\x85".encode(), b"\x0b\x0c", b"\x00"]
pieces = st.sampled_from(blanks + others)


@given(st.lists(pieces, max_size=20).map(b"".join), st.sampled_from([8, 16, 24, 64, 4096]))
def test_rows_are_those_that_splitting_at_newlines_finds(data: bytes, chunk: int) -> None:
    starts, counts = found(data, chunk)
    expected = reference(data)
    assert starts.dtype == np.int64
    assert starts[-1] == len(data)
    assert [data[a:b].strip(b" \t\r\n") for a, b in pairwise(starts.tolist())] == [r for _, r in expected]
    assert counts == (len(expected), data.count(b"\n") + (not data.endswith(b"\n") and len(data) > 0))
    assert line_numbers(reader(data), starts[:-1], chunk).tolist() == [n for n, _ in expected]


@given(st.binary(max_size=200).map(lambda b: b[: len(b) // 8 * 8]), st.integers(0, 255))
def test_true_positions(data: bytes, byte: int) -> None:
    mask = np.frombuffer(data, np.uint8) == byte
    assert true_positions(mask).tolist() == [i for i, b in enumerate(data) if b == byte]


def test_many_blank_lines_between_rows() -> None:
    data = b"\n" * 5000 + b"{}" + b"\r\n \n" * 5000 + b"[]\n"
    starts, counts = found(data, 1 << 12)
    assert starts.tolist() == [5000, len(data) - 3, len(data)]
    assert counts == (2, 5000 + 10000 + 1)
