"""Micro-batches: what is cut, and where the predicting positions lie."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.batching import cut, micro_batches
from tests.builders import rollout_batch
from tests.stages.learners import random_rollouts


@given(st.lists(st.integers(1, 40), max_size=30).map(np.array), st.integers(1, 100))
def test_runs_hold_every_row_once_and_keep_to_the_budget(lengths, budget):
    runs = cut(lengths.astype(np.int64), budget)
    assert sorted(np.concatenate([np.zeros(0, np.int64), *runs]).tolist()) == list(range(len(lengths)))
    for run in runs:
        assert len(run) == 1 or len(run) * lengths[run].max() <= budget
    together = [int(lengths[i]) for run in runs for i in run]
    assert together == sorted(together, reverse=True)


@pytest.mark.parametrize("budget", [1, 17, 10_000])
def test_each_response_token_is_predicted_by_the_one_before_it(budget):
    rollouts = random_rollouts(5, 3)
    seen: list[int] = []
    for micro in micro_batches(rollouts, np.arange(len(rollouts)), budget, "cpu"):
        flat, at = micro.ids.flatten().tolist(), 0
        assert micro.tokens == sum(len(rollouts.prompt_ids[r]) + len(rollouts.response_ids[r]) for r in micro.rows)
        assert micro.slots == len(flat)
        for place, row in enumerate(micro.rows):
            prompt, response = rollouts.prompt_ids[row].tolist(), rollouts.response_ids[row].tolist()
            start = place * micro.ids.shape[1]
            assert flat[start : start + len(prompt) + len(response)] == prompt + response
            for k, token in enumerate(response):
                predicts = int(micro.predicts[at])
                assert flat[predicts + 1] == token == int(micro.targets[at])
                assert predicts == start + len(prompt) - 1 + k
                at += 1
        assert at == len(micro.targets)
        seen += micro.rows.tolist()
    assert sorted(seen) == list(range(len(rollouts)))


def test_a_row_without_a_response_is_left_out():
    rollouts = rollout_batch([[3, 4], [5]], [[6], []])
    assert [m.rows.tolist() for m in micro_batches(rollouts, np.arange(2), 100, "cpu")] == [[0]]


def test_a_row_without_a_prompt_is_refused_by_name():
    with pytest.raises(ValueError, match=r"rows \[1\] have no prompt token"):
        list(micro_batches(rollout_batch([[3, 4], []], [[6], [7]]), np.arange(2), 100, "cpu"))
