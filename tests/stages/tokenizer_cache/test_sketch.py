"""Distinct prompts are counted exactly while they are few, and within a few per cent in bounded room."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.tokenizer_cache.sketch import KEPT, DistinctPrompts


@given(st.lists(st.integers(0, 300), max_size=400))
def test_few_are_counted_exactly(seen: list[int]) -> None:
    sketch = DistinctPrompts()
    for i in seen:
        sketch.add([(np.random.default_rng(i).bytes(16), i)])
    assert sketch.count() == len(set(seen))
    assert sketch.mean_tokens() == pytest.approx(sum(set(seen)) / max(len(set(seen)), 1))


@pytest.mark.parametrize("distinct", [KEPT, KEPT + 1, 2 * KEPT + 1, 30_000, 100_000])
def test_many_are_counted_within_four_standard_errors(distinct: int) -> None:
    rng, sketch = np.random.default_rng(distinct), DistinctPrompts()
    keys = [k.tobytes() for k in rng.integers(0, 256, (distinct, 16), np.uint8)]
    tokens = rng.integers(10, 1000, distinct).tolist()
    for _ in range(2):  # what comes again does not count again
        for i in range(0, distinct, 1000):
            sketch.add(zip(keys[i : i + 1000], tokens[i : i + 1000], strict=True))
    assert sketch.count() == pytest.approx(distinct, rel=4 / KEPT**0.5)
    assert sketch.mean_tokens() == pytest.approx(np.mean(tokens), rel=4 * 0.57 / KEPT**0.5)
    assert len(sketch._kept) <= 2 * KEPT + 1000
