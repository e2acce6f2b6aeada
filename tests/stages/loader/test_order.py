"""The permutation of each epoch and the arithmetic of positions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipeline.context import Context
from stages.loader.order import Order


def shuffled(rows: int, seed: int) -> Order:
    def keys(epoch: int) -> np.ndarray:
        return np.random.default_rng([seed, epoch]).integers(0, 2**63, rows, np.uint64)

    return Order(rows, keys)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 5))
def test_every_row_comes_once_an_epoch_whatever_the_batch(rows: int, batch: int, seed: int) -> None:
    order, calls = shuffled(rows, seed), 3 * rows
    seen = np.concatenate([order.at(np.arange(c * batch, (c + 1) * batch)) for c in range(calls)])
    for epoch in range(3):
        assert sorted(seen[epoch * rows : (epoch + 1) * rows].tolist()) == list(range(rows))


@given(st.integers(1, 30), st.lists(st.integers(0, 500), min_size=1, max_size=40), st.integers(0, 5))
def test_a_position_means_the_same_row_from_wherever_it_is_asked(rows: int, positions: list[int], seed: int) -> None:
    together = shuffled(rows, seed).at(np.array(positions))
    alone = [int(shuffled(rows, seed).at(np.array([p]))[0]) for p in positions]
    assert together.tolist() == alone


def test_without_keys_the_order_is_the_files() -> None:
    assert Order(3, None).at(np.arange(8)).tolist() == [0, 1, 2, 0, 1, 2, 0, 1]


def test_seeds_of_the_context_shuffle_well(make_context: Callable[..., Context]) -> None:
    """Each row stands at each place about equally often: chi-square with 7*7 degrees of freedom, 99.9 % is 85.4."""
    ctx, rows, epochs = make_context("loader"), 8, 2000
    order = Order(rows, lambda epoch: ctx.seed(ctx.node, epoch, np.arange(rows)))
    seen = order.at(np.arange(rows * epochs)).reshape(epochs, rows)
    counts = np.array([np.bincount(seen[:, place], minlength=rows) for place in range(rows)], np.float64)
    expected = epochs / rows
    assert ((counts - expected) ** 2 / expected).sum() < 85.4
