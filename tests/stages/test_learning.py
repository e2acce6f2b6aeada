"""Mini-batches, and the optimizer step with its guard."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from pipeline.metrics import summarise
from stages import learning
from stages.learning import MOST_SKIPPED, LearningConfig, Optimizer
from tests.builders import advantage_batch
from tests.stages.learners import facts, random_rollouts


def order(make_context, rollouts, mask=None, seed=0, **settings):
    ctx = make_context("trainer", seed=seed)
    parts = list(learning.mini_batches(ctx, LearningConfig(**settings), advantage_batch(rollouts, 1.0, mask=mask)))
    return [p.tolist() for p in parts], summarise(ctx.meter.drain())


def test_every_row_comes_once_an_epoch_in_a_seeded_order(make_context):
    rollouts = random_rollouts(6, 4)
    parts, _ = order(make_context, rollouts, mini_batch=8, epochs=2)
    first, second = ([row for part in half for row in part] for half in (parts[:3], parts[3:]))
    assert [len(p) for p in parts] == [8] * 6
    assert sorted(first) == sorted(second) == list(range(24))
    assert first != second != list(range(24)) != first
    assert order(make_context, rollouts, mini_batch=8, epochs=2)[0] == parts
    assert order(make_context, rollouts, mini_batch=8, epochs=2, seed=1)[0] != parts
    assert order(make_context, random_rollouts(6, 4, step=2), mini_batch=8, epochs=2)[0] != parts


def test_zero_takes_all_rows(make_context):
    parts, _ = order(make_context, random_rollouts(3, 2))
    assert [sorted(p) for p in parts] == [list(range(6))]


def test_rows_with_nothing_to_learn_are_left_out_and_empty_updates_counted(make_context):
    rollouts = random_rollouts(4, 1)
    mask = [[False] * n for n in rollouts.response_ids.lengths]
    mask[2][0] = True
    parts, metrics = order(make_context, rollouts, mask=mask, mini_batch=1)
    assert parts == [[2]]
    assert metrics == {"trainer/empty_mini_batches": 3}


def test_a_mini_batch_must_divide_the_step():
    known = facts("trainer", values={"prompts_per_step": 32, "samples_per_prompt": 8})
    assert not list(learning.check_mini_batch(known, 64))
    assert not list(learning.check_mini_batch(known, 0))
    assert not list(learning.check_mini_batch(facts("trainer"), 7)), "nothing is known of the step"
    (problem,) = learning.check_mini_batch(known, 100)
    assert problem.where == "trainer.mini_batch"
    assert "100" in problem.what
    assert "256 rows of a step (32 prompts x 8 samples)" in problem.what
    assert "64 or 128" in problem.hint
    assert not list(learning.check_mini_batch(known, 1000)), "more than a step has: all rows"


def test_a_mini_batch_must_divide_the_rows_that_came(make_context):
    """The plan does not know them where a loader takes its whole file a step."""
    with pytest.raises(ValueError, match=r"trainer\.mini_batch: 5 rows do not divide the 12 rows .* 4 or 6; 0 takes"):
        order(make_context, random_rollouts(6, 2), mini_batch=5)
    assert [len(p) for p in order(make_context, random_rollouts(6, 2), mini_batch=50)[0]] == [12]


def test_one_update_is_adamw_with_clipping(make_context):
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    cfg = LearningConfig(lr=0.1, weight_decay=0.01, beta1=0.8, beta2=0.9, clip_grad=1.0)
    optimizer = Optimizer([weight], cfg, make_context("trainer"))
    weight.grad = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert optimizer.step() == pytest.approx(5.0)
    # Loshchilov and Hutter 2019, algorithm 2, first step: the corrected moments are g and g^2.
    g = np.array([3.0, 4.0]) / 5
    expected = np.array([1.0, -2.0]) * (1 - 0.1 * 0.01) - 0.1 * g / (np.sqrt(g**2) + 1e-8)
    assert weight.detach().numpy() == pytest.approx(expected, abs=1e-6)
    assert weight.grad is None


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(make_context, poison):
    weights = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))]
    optimizer = Optimizer(weights, LearningConfig(), make_context("trainer"))

    def step(value):
        for w in weights:
            w.grad = torch.full_like(w, 0.5)
        weights[1].grad[1] = value
        return optimizer.step()

    assert step(0.5) is not None
    before = ([w.detach().clone() for w in weights], learning.cloned(optimizer.adam.state_dict()["state"]))
    optimizer.ctx.meter.drain()
    for _ in range(MOST_SKIPPED - 1):
        assert step(poison) is None
    assert all(torch.equal(a, b) for a, b in zip(before[0], weights, strict=True))
    after = optimizer.adam.state_dict()["state"]
    assert all(torch.equal(before[1][i][k], after[i][k]) for i in before[1] for k in before[1][i])
    assert summarise(optimizer.ctx.meter.drain()) == {"trainer/updates": 0, "trainer/skipped_updates": MOST_SKIPPED - 1}
    assert step(0.5) is not None, "one good update, and the count starts anew"
    for _ in range(MOST_SKIPPED - 1):
        step(poison)
    with pytest.raises(ArithmeticError, match=r"3 updates in a row .* lower trainer\.lr"):
        step(poison)


def test_a_restored_optimizer_has_its_moments_and_this_runs_learning_rate(make_context):
    weight = torch.nn.Parameter(torch.ones(2))
    first = Optimizer([weight], LearningConfig(lr=0.1), make_context("trainer"))
    weight.grad = torch.tensor([1.0, 2.0])
    first.step()
    state = first.state_dict()
    second = Optimizer([weight], LearningConfig(lr=0.02), make_context("trainer"))
    second.load_state_dict(state)
    assert second.adam.param_groups[0]["lr"] == 0.02
    moments = second.adam.state_dict()["state"][0]
    assert torch.equal(moments["exp_avg"], state["adam"][0]["exp_avg"])
    weight.grad = torch.tensor([1.0, 2.0])
    kept = state["adam"][0]["exp_avg"].clone()
    second.step()
    assert torch.equal(state["adam"][0]["exp_avg"], kept), "the state is a copy"
