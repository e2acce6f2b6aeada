"""The permutation of each epoch and the arithmetic of positions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.context import Context
from stages.loader.order import Order


def shuffled(rows: int, seed: int) -> Order:
    return Order(rows, lambda epoch: (seed * 2**32 + epoch + 1) * 0x9E3779B97F4A7C15 % 2**64)


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 5))
def test_every_row_comes_once_an_epoch_whatever_the_batch(rows: int, batch: int, seed: int) -> None:
    order, calls = shuffled(rows, seed), -(-3 * rows // batch)
    seen = np.concatenate([order.at(np.arange(c * batch, (c + 1) * batch)) for c in range(calls)])
    for epoch in range(3):
        assert sorted(seen[epoch * rows : (epoch + 1) * rows].tolist()) == list(range(rows))


@pytest.mark.parametrize("rows", [63, 64, 65, 255, 256, 257, 1000, 65535, 65536, 65537, 999_983])
def test_every_row_comes_once_at_every_size(rows: int) -> None:
    seen = shuffled(rows, 1).at(np.arange(rows) + 5 * rows)
    assert seen.dtype == np.int64
    assert np.array_equal(np.sort(seen), np.arange(rows))


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 30), st.lists(st.integers(0, 100), min_size=1, max_size=12), st.integers(0, 5))
def test_a_position_means_the_same_row_from_wherever_it_is_asked(rows: int, positions: list[int], seed: int) -> None:
    together = shuffled(rows, seed).at(np.array(positions))
    alone = [int(shuffled(rows, seed).at(np.array([p]))[0]) for p in positions]
    assert together.tolist() == alone


@pytest.mark.parametrize("rows", [2**31 + 11, 2**33 + 5, 2**40 - 1])
def test_more_rows_than_32_bits_count(rows: int) -> None:
    """Nothing is held for a row, so a file may have any number of them."""
    some = shuffled(rows, 2).at(np.arange(20_000) + rows - 10_000)  # over the end of an epoch
    assert some.min() >= 0
    assert some.max() < rows
    assert len(np.unique(some[:10_000])) == len(np.unique(some[10_000:])) == 10_000
    assert some.max() > 0.99 * rows


def test_without_a_key_the_order_is_the_files() -> None:
    assert Order(3, None).at(np.arange(8)).tolist() == [0, 1, 2, 0, 1, 2, 0, 1]


def test_the_order_is_what_it_was() -> None:
    """Written down once: another order would make every saved position mean other rows."""
    assert shuffled(10, 0).at(np.arange(10)).tolist() == [9, 7, 2, 0, 1, 4, 3, 5, 6, 8]


def test_neighbours_part(make_context: Callable[..., Context]) -> None:
    """In a shuffled epoch, rows that stand next to each other are as far apart as chance has it: a third of all."""
    ctx, rows = make_context("loader"), 100_000
    seen = Order(rows, lambda epoch: int(ctx.seed(ctx.node, epoch, 0))).at(np.arange(rows))
    assert np.abs(np.diff(seen)).mean() == pytest.approx(rows / 3, rel=0.02)
    moved = np.corrcoef(seen, np.arange(rows))[0, 1]
    assert abs(moved) < 4 / math.sqrt(rows)


def chi_square(counts: np.ndarray, expected: float) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def far_off(freedom: int) -> float:
    """Where chi-square lies once in 100,000 times at most (Wilson and Hilferty 1931)."""
    return freedom * (1 - 2 / (9 * freedom) + 4.27 * math.sqrt(2 / (9 * freedom))) ** 3


@pytest.mark.parametrize("rows", [2, 3, 4])
def test_all_orders_of_few_rows_are_equally_likely(make_context: Callable[..., Context], rows: int) -> None:
    ctx, epochs = make_context("loader"), 1500
    seen = orders(ctx, rows, epochs)
    counts = dict.fromkeys(itertools.permutations(range(rows)), 0)
    for order in seen.tolist():
        counts[tuple(order)] += 1
    assert chi_square(np.array([*counts.values()]), epochs / len(counts)) < far_off(len(counts) - 1)


@pytest.mark.parametrize("rows", [8, 30, 64])
def test_every_row_stands_everywhere_equally_often(make_context: Callable[..., Context], rows: int) -> None:
    epochs = 1000
    seen = orders(make_context("loader"), rows, epochs)
    counts = np.array([np.bincount(seen[:, place], minlength=rows) for place in range(rows)])
    assert chi_square(counts, epochs / rows) < far_off((rows - 1) ** 2)


def orders(ctx: Context, rows: int, epochs: int) -> np.ndarray:
    """int64 [epochs, rows]"""
    order = Order(rows, lambda epoch: int(ctx.seed(ctx.node, epoch, 0)))
    return np.array([order.at(np.arange(rows) + e * rows) for e in range(epochs)])
