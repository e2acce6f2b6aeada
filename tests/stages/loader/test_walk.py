"""Rows are passed over without moving the others."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.loader.order import Order
from stages.loader.walk import Walk


class TooFew(Exception):
    pass


def walk(rows: int, bad: set[int], order: Order | None = None) -> Walk:
    def usable(asked: np.ndarray) -> np.ndarray:
        return np.array([r not in bad for r in asked.tolist()], bool)

    return Walk(order or Order(rows, lambda epoch: epoch * 12345 + 1), usable, TooFew)


@settings(deadline=None, max_examples=40)
@given(st.integers(2, 30), st.sets(st.integers(0, 29), max_size=20), st.integers(1, 8))
def test_what_is_left_out_leaves_a_hole(rows: int, bad: set[int], batch: int) -> None:
    good = rows - len({b for b in bad if b < rows})
    order = Order(rows, lambda epoch: epoch * 12345 + 1)
    if good < batch:
        with pytest.raises(TooFew):
            walk(rows, bad).take(0, batch)
        return
    every = order.at(np.arange(6 * rows)).tolist()
    expected = [(r, p) for p, r in enumerate(every) if r not in bad]
    at, got = 0, list[tuple[int, int]]()
    while len(got) + batch <= min(len(expected), 4 * good):
        found, positions = walk(rows, bad).take(at, batch)
        assert found.dtype == positions.dtype == np.int64
        got += zip(found.tolist(), positions.tolist(), strict=True)
        at = int(positions[-1]) + 1
    assert got == expected[: len(got)]
    assert len(got) >= batch


def test_without_anything_to_leave_out_it_is_arithmetic() -> None:
    rows, positions = Walk(Order(5, None), None, TooFew).take(10**12 + 3, 4)
    assert rows.tolist() == [3, 4, 0, 1]
    assert positions.tolist() == [10**12 + i for i in range(3, 7)]


def test_few_rows_among_many_are_found_in_few_steps() -> None:
    asked: list[int] = []

    def usable(rows: np.ndarray) -> np.ndarray:
        asked.append(len(rows))
        return rows % 10_000 == 0

    rows, _ = Walk(Order(100_000, None), usable, TooFew).take(1, 5)
    assert rows.tolist() == [10_000, 20_000, 30_000, 40_000, 50_000]
    assert len(asked) < 60


@pytest.mark.parametrize("start", [0, 10, 50])
def test_a_batch_that_an_epoch_cannot_fill_is_an_error(start: int) -> None:
    """Not rows of the next epoch: a batch would hold a row twice."""
    with pytest.raises(TooFew, match="6"):
        walk(10, {0, 1, 2, 3, 4}).take(start, 6)
    assert len(walk(10, {0, 1, 2, 3, 4}).take(start, 5)[0]) == 5
