"""What every advantage estimator holds to, with each estimator that its inputs allow."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline import registry
from pipeline.stage import ports
from stages.records import AdvantageBatch, Status
from tests.builders import log_prob_batch, reward_batch, value_batch
from tests.stages.learners import build, facts, holes, metrics, opened, random_rollouts

registry.discover("stages")

FED = ("rollouts", "rewards", "old", "values")


def _choices():
    """Every backend with every estimator whose inputs are there, by what its own plan check says."""
    from stages import verl_door

    for entry in registry.entries("advantage"):
        names = sorted(verl_door.estimators()) if hasattr(entry.config(), "estimator") else [None]
        for name in names:
            settings = {"estimator": name} if name else {}
            found = build(entry, **settings).check(facts("advantage", values={"samples_per_prompt": 4}, fed=FED))
            if not any(p.level == "error" for p in found):
                yield pytest.param((entry, settings), id=f"{entry.name}-{name}")


@pytest.fixture(params=_choices())
def advantage(request, make_context):
    entry, settings = request.param
    stage = opened(entry, make_context, **settings)
    yield stage
    stage.close()
    stage.close()


def batch(status=None, seed=0):
    rollouts = random_rollouts(3, 4, seed=seed, loss_mask=holes(random_rollouts(3, 4, seed=seed)), status=status)
    draw = np.random.default_rng(seed)
    scores = draw.integers(0, 3, 12).astype(float)
    scores[5] = np.nan
    values = value_batch(rollouts, [draw.standard_normal(n).tolist() for n in rollouts.response_ids.lengths])
    return {
        "rollouts": rollouts,
        "rewards": reward_batch(scores, n=4),
        "old": log_prob_batch(rollouts),
        "values": values,
    }


def test_ports(advantage):
    inputs = ports(type(advantage), "run").inputs
    assert set(inputs) == set(FED)
    assert {n for n, p in inputs.items() if p.optional} == {"old", "values"}
    assert ports(type(advantage), "run").output is AdvantageBatch


def test_the_mask_is_what_the_policy_chose_in_rows_that_are_ok(advantage):
    status = [Status.OK] * 12
    status[2], status[7] = Status.FAILED, Status.FAILED
    fed = batch(status)
    out = advantage.run(**fed)
    fine = np.isin(np.arange(12), [2, 5, 7], invert=True)
    expected = fed["rollouts"].loss_mask.values & fine[fed["rollouts"].loss_mask.row_of_value()]
    assert out.mask.values.tolist() == expected.tolist()
    assert not out.advantages.values[~expected].any()
    assert not out.returns.values[~expected].any()
    assert np.isfinite(out.advantages.values).all()
    assert out.advantages.values[expected].any()
    for column in (out.advantages, out.returns, out.mask):
        assert column.offsets.tolist() == fed["rollouts"].response_ids.offsets.tolist()
    assert out.row_id.tolist() == fed["rollouts"].row_id.tolist()


def test_rows_that_are_not_ok_are_as_if_they_were_not_there(advantage):
    status = [Status.OK] * 12
    status[1], status[10] = Status.FAILED, Status.FAILED
    fed = batch(status)
    out = advantage.run(**fed)
    rows = np.array([i for i in range(12) if i not in (1, 5, 10)])
    alone = advantage.run(**{k: v.take(rows) for k, v in fed.items()})
    assert out.take(rows).advantages.values == pytest.approx(alone.advantages.values, abs=1e-6)
    assert out.take(rows).returns.values == pytest.approx(alone.returns.values, abs=1e-6)


def test_a_batch_in_which_nothing_is_ok(advantage):
    out = advantage.run(**batch([Status.FAILED] * 12))
    assert not out.mask.values.any()
    assert not out.advantages.values.any()


def test_better_scores_get_better_advantages(advantage):
    rollouts = random_rollouts(1, 2, longest=1)
    fed = {
        "rollouts": rollouts,
        "rewards": reward_batch([1.0, 0.0], n=2),
        "old": log_prob_batch(rollouts),
        "values": value_batch(rollouts),
    }
    good, bad = advantage.run(**fed).advantages.rows()
    assert good[0] > bad[0]


def test_it_changes_nothing_it_is_given_and_keeps_no_state(advantage):
    fed, again = batch(), batch()
    first = advantage.run(**fed)
    assert all(fed[k].same(again[k]) for k in fed)
    assert first.same(advantage.run(**fed))
    assert advantage.state_dict() == {}


def test_metrics_have_the_names_of_the_contract(advantage):
    out = advantage.run(**batch())
    measured = metrics(advantage)
    chosen = out.advantages.values[out.mask.values].astype(np.float64)
    assert measured["advantage/mean"] == pytest.approx(chosen.mean(), abs=1e-6)
    assert measured["advantage/std"] == pytest.approx(chosen.std(), abs=1e-6)
    assert 0 <= measured["advantage/zero_variance_groups"] <= 1
