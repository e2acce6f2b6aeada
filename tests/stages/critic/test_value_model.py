"""The critic: values at the right places, verl's clipped loss by formula, micro-batches that change nothing."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from transformers import AutoModel

from stages.critic.value_model import explained_variance
from stages.verl_door import AGGREGATIONS
from tests.builders import advantage_batch, value_batch
from tests.stages.learners import (
    BASE,
    aggregate,
    build,
    entry_of,
    facts,
    holes,
    metrics,
    opened,
    per_token,
    random_rollouts,
)

ENTRY = entry_of("critic", "value_model")


def learning_inputs(rollouts, stage, seed=0):
    draw = np.random.default_rng(seed)
    size = len(rollouts.response_ids.values)
    values = value_batch(rollouts, per_token(rollouts, draw.standard_normal(size)))
    returns = per_token(rollouts, 2 * draw.standard_normal(size))
    return {"rollouts": rollouts, "values": values, "advantages": advantage_batch(rollouts, 0.0, returns)}


def masked_rollouts():
    return random_rollouts(4, 2, loss_mask=holes(random_rollouts(4, 2)))


def randomise_head(stage, seed=0):
    """A head that is not zero, in float64: else the backbone has no gradient."""
    stage._module.double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in stage._module["head"].parameters():
            p.copy_(0.1 * torch.randn(p.shape, generator=generator, dtype=torch.float64))


def test_every_value_starts_at_zero(make_context):
    out = opened(ENTRY, make_context).run(rollouts=random_rollouts())
    assert not out.values.values.any()
    assert out.values.values.dtype == np.float32


@pytest.mark.parametrize("micro_tokens", [1, 30, 100_000])
def test_a_value_is_read_off_the_state_that_predicts_its_token(make_context, micro_tokens):
    rollouts = random_rollouts()
    stage = opened(ENTRY, make_context, micro_tokens=micro_tokens)
    randomise_head(stage)
    head = stage._module["head"]
    backbone = AutoModel.from_pretrained(BASE).double().eval()
    expected = []
    for prompt, response in zip(rollouts.prompt_ids.rows(), rollouts.response_ids.rows(), strict=True):
        ids = torch.tensor([[*prompt.tolist(), *response.tolist()]])
        with torch.no_grad():
            states = backbone(ids).last_hidden_state[0, len(prompt) - 1 : -1]
            expected += (states @ head.weight[0] + head.bias).tolist()
    assert np.abs(expected).max() > 0.1
    assert stage.run(rollouts=rollouts).values.values == pytest.approx(np.array(expected), abs=1e-5)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_the_clipped_loss_and_its_micro_batches(make_context, monkeypatch, mode):
    rollouts = masked_rollouts()
    results = []
    for micro_tokens in (100_000, 25, 1):
        stage = opened(
            ENTRY,
            make_context,
            loss_agg_mode=mode,
            loss_scale_factor=7.0,
            micro_tokens=micro_tokens,
            cliprange_value=0.3,
            clip_grad=0.0,
        )
        randomise_head(stage)
        inputs = learning_inputs(rollouts, stage)
        now = stage.run(rollouts=rollouts).values.values.astype(np.float64)
        taken: list[torch.Tensor] = []
        inner = stage._optimizer.step
        monkeypatch.setattr(
            stage._optimizer,
            "step",
            lambda s=stage, t=taken, i=inner: (
                t.append(torch.cat([p.grad.flatten() for p in s._optimizer.parameters if p.grad is not None])),
                i(),
            )[1],
        )
        stage.learn(**inputs)
        results.append((metrics(stage), taken[0].numpy()))
    old, returns = (x.values.astype(np.float64) for x in (inputs["values"].values, inputs["advantages"].returns))
    clipped = np.clip(now, old - 0.3, old + 0.3)
    losses = 0.5 * np.maximum((now - returns) ** 2, (clipped - returns) ** 2)
    mask = inputs["advantages"].mask
    expected = aggregate([r[m] for r, m in zip(mask.with_values(losses).rows(), mask.rows(), strict=True)], mode, 7.0)
    for measured, grad in results:
        assert measured["critic/loss"] == pytest.approx(expected, rel=1e-5)
        assert measured["critic/clip_fraction"] == pytest.approx(
            ((clipped - returns) ** 2 > (now - returns) ** 2)[mask.values].mean(), abs=1e-6
        )
        assert np.abs(grad - results[0][1]).max() <= 1e-6 * np.abs(grad).max()
        assert np.abs(grad).max() > 1e-3


def test_it_learns_the_returns(make_context):
    rollouts = random_rollouts(8, 1, longest=3)
    stage = opened(ENTRY, make_context, lr=3e-3, epochs=30, cliprange_value=1e9)
    targets = per_token(rollouts, np.random.default_rng(0).standard_normal(len(rollouts.response_ids.values)))
    advantages = advantage_batch(rollouts, 0.0, targets)
    for _ in range(2):
        values = stage.run(rollouts=rollouts)
        stage.learn(rollouts=rollouts, values=values, advantages=advantages)
    learned = stage.run(rollouts=rollouts).values.values
    assert explained_variance(learned, np.concatenate(targets)) > 0.8
    assert metrics(stage)["critic/updates"] == 60


def test_explained_variance():
    returns = np.array([1.0, 2.0, 4.0])
    assert explained_variance(returns, returns) == 1
    assert explained_variance(np.zeros(3), returns) == pytest.approx(0)
    values = np.array([1.0, 1.0, 2.0])
    assert explained_variance(values, returns) == pytest.approx(1 - np.var([0, 1, 2]) / np.var([1, 2, 4]))
    assert math.isnan(explained_variance(values, np.ones(3)))
    assert math.isnan(explained_variance(np.zeros(0), np.zeros(0)))


def test_a_nan_gradient_skips_the_update(make_context):
    stage = opened(ENTRY, make_context)
    inputs = learning_inputs(masked_rollouts(), stage)
    before = stage.state_dict()
    stage._optimizer.parameters[-1].register_hook(lambda g: g * math.nan)
    stage.learn(**inputs)
    measured, after = metrics(stage), stage.state_dict()
    assert measured["critic/skipped_updates"] == 1
    assert "critic/grad_norm" not in measured
    assert all(torch.equal(t, after["module"][n]) for n, t in before["module"].items())


@pytest.mark.parametrize(
    ("settings", "where", "says"),
    [
        ({"loss_agg_mode": "mean"}, "critic.loss_agg_mode", "there is no 'mean'"),
        ({"loss_agg_mode": "seq-mean-token-sum-norm"}, "critic.loss_scale_factor", "rollout.max_new_tokens"),
        ({"mini_batch": 5}, "critic.mini_batch", "nearest that do: 4 or 8"),
    ],
)
def test_what_the_plan_refuses(settings, where, says):
    known = {"prompts_per_step": 4, "samples_per_prompt": 8}
    (problem,) = build(ENTRY, **settings).check(facts("critic", values=known))
    assert problem.where == where
    assert says in str(problem)
