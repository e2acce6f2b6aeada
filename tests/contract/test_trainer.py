"""What every trainer holds to."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline import registry
from pipeline.stage import ports
from stages.records import LogProbBatch
from tests.builders import advantage_batch, log_prob_batch
from tests.stages.learners import metrics, opened, per_token, random_rollouts

registry.discover("stages")


@pytest.fixture(params=registry.entries("trainer"), ids=lambda e: e.name)
def trainer(request, make_context):
    stage = opened(request.param, make_context)
    yield stage
    stage.close()
    stage.close()


def update(stage, seed=0, step=1):
    """One step on random rollouts and advantages; the log-probs before it."""
    rollouts = random_rollouts(4, 2, seed=seed, step=step)
    draw = np.random.default_rng(seed).standard_normal(len(rollouts.response_ids.values))
    old = stage.run(rollouts=rollouts)
    stage.learn(rollouts=rollouts, old=old, advantages=advantage_batch(rollouts, per_token(rollouts, draw)))
    return rollouts, old, draw


def test_ports(trainer):
    assert set(ports(type(trainer), "run").inputs) == {"rollouts"}
    assert ports(type(trainer), "run").output is LogProbBatch
    assert set(ports(type(trainer), "learn").inputs) == {"rollouts", "old", "advantages"}


def test_log_probs_come_row_by_row_for_the_response_tokens(trainer):
    rollouts = random_rollouts()
    out = trainer.run(rollouts=rollouts)
    assert out.row_id.tolist() == rollouts.row_id.tolist()
    assert out.log_probs.offsets.tolist() == out.entropy.offsets.tolist() == rollouts.response_ids.offsets.tolist()
    assert (out.log_probs.values <= 0).all()
    assert (out.entropy.values >= 0).all()
    assert (out.step, out.version) == (rollouts.step, 0)


def test_running_changes_no_weight_and_repeats_to_the_bit(trainer):
    rollouts = random_rollouts()
    before = trainer.publish()
    first = trainer.run(rollouts=rollouts)
    assert first.same(trainer.run(rollouts=rollouts))
    assert before.same(trainer.publish())


def test_an_update_makes_good_tokens_likelier_and_bad_ones_less_likely(trainer):
    rollouts, old, draw = update(trainer)
    change = trainer.run(rollouts=rollouts).log_probs.values - old.log_probs.values
    assert np.corrcoef(change, draw)[0, 1] > 0.2


def test_a_new_version_has_new_weights_and_is_what_the_trainer_uses(trainer):
    first = trainer.publish()
    rollouts, old, _ = update(trainer)
    second = trainer.publish()
    assert (first.version, second.version) == (0, 1)
    assert first.manifest == second.manifest
    assert first.data.tobytes() != second.data.tobytes()
    assert trainer.run(rollouts=rollouts).version == 1
    assert trainer.run(rollouts=rollouts).log_probs.values.tolist() != old.log_probs.values.tolist()


def test_published_weights_are_the_trainers(trainer, tiny_model):
    import torch
    from transformers import AutoModelForCausalLM

    from stages.weights import load_into

    rollouts, _, _ = update(trainer)
    module = AutoModelForCausalLM.from_pretrained(tiny_model).eval()
    load_into(module, trainer.publish())
    ours = trainer.run(rollouts=rollouts).log_probs
    for row in range(len(rollouts)):
        prompt, response = rollouts.prompt_ids[row].tolist(), rollouts.response_ids[row].tolist()
        with torch.no_grad():
            every = module(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        assert ours[row] == pytest.approx(every[range(len(response)), response].numpy(), abs=1e-4)


def test_nothing_to_learn_is_no_new_version(trainer):
    rollouts = random_rollouts()
    nothing = [[False] * n for n in rollouts.response_ids.lengths]
    before = trainer.publish()
    trainer.learn(
        rollouts=rollouts, old=log_prob_batch(rollouts), advantages=advantage_batch(rollouts, 1.0, mask=nothing)
    )
    assert before.same(trainer.publish())


def test_going_on_from_a_state_is_going_on(request, trainer, make_context):
    """Two steps, a state, two more: the same bits as two more from the state in another trainer."""
    for step in (1, 2):
        update(trainer, seed=step, step=step)
    state, weights = trainer.state_dict(), trainer.publish()
    other = opened(next(e for e in registry.entries("trainer") if e.cls is type(trainer)), make_context)
    other.load_state_dict(state)
    assert other.publish().same(weights)
    for step in (3, 4):
        update(trainer, seed=step, step=step)
    for step in (3, 4):
        update(other, seed=step, step=step)
    assert other.publish().same(trainer.publish())
    assert not weights.same(trainer.publish())


def test_metrics_have_the_names_of_the_contract(trainer):
    update(trainer)
    named = {"policy/" + n for n in ("loss", "kl", "entropy", "grad_norm", "engine_drift", "lr")}
    named |= {"trainer/" + n for n in ("tokens_per_s", "padding_ratio", "updates")}
    assert named <= metrics(trainer).keys()


def test_what_is_exported_loads(trainer, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    update(trainer)
    trainer.export(str(tmp_path / "final"))
    module = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    AutoTokenizer.from_pretrained(tmp_path / "final")
    from stages.weights import snapshot_of

    assert snapshot_of(module, 1).same(trainer.publish())
