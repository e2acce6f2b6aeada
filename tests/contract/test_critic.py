"""What every critic holds to."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline import registry
from pipeline.stage import ports
from stages.records import ValueBatch
from tests.builders import advantage_batch
from tests.stages.learners import metrics, opened, per_token, random_rollouts

registry.discover("stages")


@pytest.fixture(params=registry.entries("critic"), ids=lambda e: e.name)
def critic(request, make_context):
    stage = opened(request.param, make_context)
    yield stage
    stage.close()
    stage.close()


def update(stage, seed=0, step=1):
    rollouts = random_rollouts(4, 2, seed=seed, step=step)
    returns = per_token(rollouts, np.random.default_rng(seed).standard_normal(len(rollouts.response_ids.values)))
    values = stage.run(rollouts=rollouts)
    stage.learn(rollouts=rollouts, values=values, advantages=advantage_batch(rollouts, 0.0, returns))
    return rollouts, values, np.concatenate(returns)


def test_ports(critic):
    assert set(ports(type(critic), "run").inputs) == {"rollouts"}
    assert ports(type(critic), "run").output is ValueBatch
    assert set(ports(type(critic), "learn").inputs) == {"rollouts", "values", "advantages"}


def test_values_come_row_by_row_for_the_response_tokens(critic):
    rollouts = random_rollouts()
    out = critic.run(rollouts=rollouts)
    assert out.row_id.tolist() == rollouts.row_id.tolist()
    assert out.values.offsets.tolist() == rollouts.response_ids.offsets.tolist()
    assert np.isfinite(out.values.values).all()
    assert out.same(critic.run(rollouts=rollouts))


def test_learning_brings_values_closer_to_returns(critic):
    rollouts, values, returns = update(critic)
    for _ in range(5):
        update(critic)
    after = critic.run(rollouts=rollouts).values.values
    assert ((after - returns) ** 2).mean() < ((values.values.values - returns) ** 2).mean() - 0.01


def test_rows_do_not_influence_each_other(critic):
    rollouts = random_rollouts(4, 2)
    for seed in range(3):
        update(critic, seed=seed)
    together = critic.run(rollouts=rollouts).values
    assert np.abs(together.values).max() > 1e-3
    for row in range(len(rollouts)):
        alone = critic.run(rollouts=rollouts.take(np.array([row]))).values
        assert alone[0] == pytest.approx(together[row], abs=1e-5)


def test_masked_tokens_are_not_learned(critic):
    rollouts = random_rollouts()
    nothing = [[False] * n for n in rollouts.response_ids.lengths]
    values = critic.run(rollouts=rollouts)
    critic.learn(rollouts=rollouts, values=values, advantages=advantage_batch(rollouts, 0.0, 1.0, mask=nothing))
    assert values.same(critic.run(rollouts=rollouts))


def test_going_on_from_a_state_is_going_on(critic, make_context):
    for step in (1, 2):
        update(critic, seed=step, step=step)
    state = critic.state_dict()
    other = opened(next(e for e in registry.entries("critic") if e.cls is type(critic)), make_context)
    other.load_state_dict(state)
    for step in (3, 4):
        rollouts, _, _ = update(critic, seed=step, step=step)
    for step in (3, 4):
        update(other, seed=step, step=step)
    assert other.run(rollouts=rollouts).same(critic.run(rollouts=rollouts))
    other.load_state_dict(state)
    assert not other.run(rollouts=rollouts).same(critic.run(rollouts=rollouts)), "the state is a copy of its time"


def test_metrics_have_the_names_of_the_contract(critic):
    update(critic)
    assert {"critic/loss", "critic/explained_variance", "critic/grad_norm"} <= metrics(critic).keys()
