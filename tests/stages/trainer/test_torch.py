"""The trainer: log-probs, losses by independent formulas, micro-batches that change nothing, guards, state."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from stages import verl_door
from stages.verl_door import AGGREGATIONS
from tests.builders import advantage_batch, log_prob_batch, rollout_batch
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

ENTRY = entry_of("trainer", "torch")
LOSSES = sorted(verl_door.policy_losses())
EXTRAS = {
    "dro": {"dro_beta": 0.1},
    "clip_cov": {"clip_cov_ratio": 0.2, "clip_cov_lb": 0.01, "clip_cov_ub": 50.0},
    "kl_cov": {"kl_cov_ratio": 0.2, "ppo_kl_coef": 1.0},
    "bypass_mode": {
        "rollout_correction": {"loss_type": "reinforce", "rollout_is": "token", "rollout_is_batch_normalize": True}
    },
}


def trainer_of(make_context, **settings):
    if isinstance(correction := settings.get("rollout_correction"), dict):
        kind = type(ENTRY.config().rollout_correction)
        settings["rollout_correction"] = kind(**correction)
    return opened(ENTRY, make_context, **settings)


def reference(rollouts, temperature):
    """Log-probs and entropies of each row, alone and unpadded, in float64."""
    model = AutoModelForCausalLM.from_pretrained(BASE).double().eval()
    log_probs, entropy = [], []
    for prompt, response in zip(rollouts.prompt_ids.rows(), rollouts.response_ids.rows(), strict=True):
        ids = torch.tensor([[*prompt.tolist(), *response.tolist()]])
        with torch.no_grad():
            every = (model(ids).logits[0, len(prompt) - 1 : -1] / temperature).log_softmax(-1).numpy()
        log_probs.append(every[np.arange(len(response)), response])
        entropy.append(-(np.exp(every) * every).sum(-1))
    return log_probs, entropy


@pytest.mark.parametrize(("temperature", "at"), [(1.0, 1.0), (0.6, 0.6), (0.0, 1.0)])
@pytest.mark.parametrize("micro_tokens", [1, 40, 100_000])
def test_log_probs_are_those_of_rows_alone_at_the_sampling_temperature(make_context, temperature, at, micro_tokens):
    """huggingface/transformers issue 29029 (padding), huggingface/trl PR 3029 (temperature)."""
    rollouts = random_rollouts(5, 2, temperature=temperature)
    out = trainer_of(make_context, micro_tokens=micro_tokens).run(rollouts=rollouts)
    log_probs, entropy = reference(rollouts, at)
    assert out.log_probs.values == pytest.approx(np.concatenate(log_probs), abs=1e-5, rel=1e-6)
    assert out.entropy.values == pytest.approx(np.concatenate(entropy), abs=1e-5)
    assert out.log_probs.offsets.tolist() == rollouts.response_ids.offsets.tolist()
    assert out.log_probs.values.dtype == np.float32


@pytest.mark.parametrize("temperature", [1e-12, 1e-5, 5e-3])
def test_log_probs_are_finite_at_every_temperature(make_context, temperature):
    out = trainer_of(make_context).run(rollouts=random_rollouts(2, 2, temperature=temperature))
    assert np.isfinite(out.log_probs.values).all()
    assert np.isfinite(out.entropy.values).all()


def test_engine_drift_is_over_tokens_the_engine_told(make_context):
    stage = trainer_of(make_context)
    rollouts = rollout_batch([[5, 6]], [[7, 8, 9]], log_probs=[[-1.0, math.nan, -2.0]], loss_mask=[[True, True, False]])
    ours = stage.run(rollouts=rollouts).log_probs.values
    assert metrics(stage)["policy/engine_drift"] == pytest.approx(abs(ours[0] + 1.0), abs=1e-6)
    stage.run(rollouts=rollout_batch([[5, 6]], [[7]], temperature=0.0))
    assert "policy/engine_drift" not in metrics(stage)


# -- losses ----------------------------------------------------------------------------------------------------


def learning_inputs(stage, *, seed=0, spread=0.3, n=2, prompts=4):
    """Rollouts with holes and a masked row, old log-probs a little off, and large advantages."""
    plain = random_rollouts(prompts, n, seed=seed)
    rollouts = random_rollouts(prompts, n, seed=seed, loss_mask=holes(plain))
    draw = np.random.default_rng(seed + 1)
    now = stage.run(rollouts=rollouts).log_probs.values
    before = now + spread * draw.standard_normal(len(now))
    rollouts = random_rollouts(prompts, n, seed=seed, loss_mask=holes(plain), log_probs=per_token(rollouts, before))
    old = log_prob_batch(rollouts)
    advantages = advantage_batch(rollouts, per_token(rollouts, 5 * draw.standard_normal(len(now))))
    stage.ctx.meter.drain()
    return {"rollouts": rollouts, "old": old, "advantages": advantages}


def gradient(make_context, monkeypatch, inputs=None, **settings):
    """Loss, gradient of all parameters in float64, and metrics, of the one update of a step."""
    stage = trainer_of(make_context, clip_grad=0.0, **settings)
    stage._module.double()
    taken: list[torch.Tensor] = []
    inner = stage._optimizer.step

    def step():
        taken.append(torch.cat([p.grad.flatten() for p in stage._optimizer.parameters]))
        return inner()

    monkeypatch.setattr(stage._optimizer, "step", step)
    stage.learn(**(inputs or learning_inputs(stage)))
    measured = metrics(stage)
    (grad,) = taken
    return measured["policy/loss"], grad.numpy(), measured


def assert_same(one, other):
    assert one[0] == pytest.approx(other[0], abs=1e-6, rel=1e-6)
    assert np.abs(one[1] - other[1]).max() <= 1e-6 * max(1.0, np.abs(one[1]).max())
    assert np.abs(one[1]).max() > 1e-3, "a gradient of zero would prove nothing"


@pytest.mark.parametrize("loss", LOSSES)
def test_micro_batches_change_neither_loss_nor_gradient(make_context, monkeypatch, loss):
    settings = {"policy_loss": loss, "entropy_coef": 0.01, **EXTRAS.get(loss, {})}
    inputs = learning_inputs(trainer_of(make_context))
    whole = gradient(make_context, monkeypatch, inputs, micro_tokens=100_000, **settings)
    for micro_tokens in (1, 25):
        cut = gradient(make_context, monkeypatch, inputs, micro_tokens=micro_tokens, **settings)
        assert_same(whole, cut)
        for name in ("policy/clip_fraction", "policy/kl_in_loss"):
            assert cut[2].get(name) == pytest.approx(whole[2].get(name), abs=1e-6)
    if loss in ("clip_cov", "vanilla", "cispo"):
        assert whole[2]["policy/clip_fraction"] > 0, "nothing was selected: the test would prove nothing"


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("loss", ["vanilla", "gspo", "kl_cov"])
def test_micro_batches_change_nothing_in_any_aggregation(make_context, monkeypatch, loss, mode):
    settings = {"policy_loss": loss, "loss_agg_mode": mode, "loss_scale_factor": 8.0, **EXTRAS.get(loss, {})}
    inputs = learning_inputs(trainer_of(make_context))
    whole = gradient(make_context, monkeypatch, inputs, micro_tokens=100_000, **settings)
    assert_same(whole, gradient(make_context, monkeypatch, inputs, micro_tokens=20, **settings))


def test_a_plug_in_that_reads_the_batch_is_given_the_whole_mini_batch(make_context, monkeypatch):
    def against_mean(
        old_log_prob,
        log_prob,
        advantages,
        response_mask,
        loss_agg_mode="token-mean",
        config=None,
        rollout_is_weights=None,
    ):
        mean = (log_prob * response_mask).sum() / response_mask.sum()
        return (((log_prob - mean) ** 2) * response_mask * advantages).sum(), {}

    core = verl_door.core_algos()
    for name in ("against_mean", "vanilla"):  # also where it takes the name of a loss that adds up
        monkeypatch.setitem(core.POLICY_LOSS_REGISTRY, name, against_mean)
        inputs = learning_inputs(trainer_of(make_context))
        whole = gradient(make_context, monkeypatch, inputs, policy_loss=name, micro_tokens=100_000)
        assert_same(whole, gradient(make_context, monkeypatch, inputs, policy_loss=name, micro_tokens=20))


@pytest.mark.parametrize(
    ("targets", "mode", "scale", "expected"),
    [
        ([[6], [1, 1, 1]], "token-mean", None, 2.25),
        ([[6], [1, 1, 1]], "seq-mean-token-mean", None, 3.5),
        ([[6], [1, 1, 1]], "seq-mean-token-sum", None, 4.5),
        ([[6], [1, 1, 1]], "token-sum", None, 9.0),
        ([[1, 3], [2]], "seq-mean-token-sum-norm", 8.0, 0.375),
    ],
)
@pytest.mark.parametrize("micro_tokens", [1, 1000])
def test_aggregation_by_the_numbers(make_context, targets, mode, scale, expected, micro_tokens):
    """verl issues 593 and 3741, google/tunix PR 1662: token losses and what each mode makes of them."""
    stage = trainer_of(
        make_context, policy_loss="gpg", loss_agg_mode=mode, loss_scale_factor=scale, micro_tokens=micro_tokens
    )
    rollouts = rollout_batch([[5, 6], [9]], [[7 + k for k in range(len(t))] for t in targets])
    now = stage.run(rollouts=rollouts)
    # gpg's token loss is -advantage * log-prob (verl, compute_policy_loss_gpg): choose the advantage.
    chosen = per_token(rollouts, -np.concatenate(targets) / now.log_probs.values)
    stage.learn(rollouts=rollouts, old=now, advantages=advantage_batch(rollouts, chosen))
    assert metrics(stage)["policy/loss"] == pytest.approx(expected, abs=1e-4)
    assert aggregate([np.array(t) for t in targets], mode, scale or 1.0) == pytest.approx(expected)


@pytest.mark.parametrize(("low", "high"), [(None, None), (0.05, 0.3)])
def test_ppos_clipped_loss_with_both_bounds(make_context, low, high):
    """Schulman et al. 2017, equation 7. clip_ratio alone must set both bounds, which verl's config does not do."""
    stage = trainer_of(make_context, clip_ratio=0.1, clip_ratio_low=low, clip_ratio_high=high)
    inputs = learning_inputs(stage)
    mask, adv = inputs["advantages"].mask.values, inputs["advantages"].advantages.values.astype(np.float64)
    now = np.concatenate(reference(inputs["rollouts"], 1.0)[0])
    ratio = np.exp(now - inputs["old"].log_probs.values.astype(np.float64))
    clipped = np.clip(ratio, 1 - (low or 0.1), 1 + (high or 0.1))
    loss = np.maximum(-adv * ratio, -adv * clipped)
    assert (ratio < 3).all(), "else the dual clip would matter"
    stage.learn(**inputs)
    measured = metrics(stage)
    assert measured["policy/loss"] == pytest.approx(loss[mask].mean(), abs=1e-5)
    assert measured["policy/clip_fraction"] == pytest.approx((-adv * clipped > -adv * ratio)[mask].mean(), abs=1e-6)
    assert measured["policy/kl_in_loss"] == pytest.approx(-np.log(ratio)[mask].mean(), abs=1e-5)


def test_the_first_ratio_is_one(make_context, monkeypatch):
    """At ratio 1 the gradient is that of -mean(advantage * log-prob); the temperature is the sampling's."""
    stage = trainer_of(make_context)
    rollouts = random_rollouts(4, 2, temperature=0.6)
    draw = np.random.default_rng(0).standard_normal(len(rollouts.response_ids.values)).astype(np.float32)
    stage.learn(
        rollouts=rollouts,
        old=stage.run(rollouts=rollouts),
        advantages=advantage_batch(rollouts, per_token(rollouts, draw)),
    )
    measured = metrics(stage)
    assert measured["policy/clip_fraction"] == 0
    assert measured["policy/kl_in_loss"] == pytest.approx(0, abs=1e-7)
    assert measured["policy/loss"] == pytest.approx(-draw.mean(dtype=np.float64), abs=1e-6)
    assert measured["policy/kl"] > 0


def test_equal_scores_give_no_gradient_and_entropy_gives_its_own(make_context):
    """huggingface/trl PR 5640: advantage 0 is gradient 0; only what is asked for pulls."""
    rollouts = random_rollouts(4, 2)
    stage = trainer_of(make_context)
    stage.learn(rollouts=rollouts, old=stage.run(rollouts=rollouts), advantages=advantage_batch(rollouts, 0.0))
    measured = metrics(stage)
    assert measured["policy/grad_norm"] == 0
    assert measured["policy/loss"] == 0
    stage = trainer_of(make_context, entropy_coef=0.5, loss_agg_mode="seq-mean-token-mean")
    entropy = reference(rollouts, 1.0)[1]
    stage.learn(rollouts=rollouts, old=stage.run(rollouts=rollouts), advantages=advantage_batch(rollouts, 0.0))
    measured = metrics(stage)
    assert measured["policy/loss"] == pytest.approx(-0.5 * aggregate(entropy, "seq-mean-token-mean"), abs=1e-5)
    assert measured["policy/entropy"] == pytest.approx(np.concatenate(entropy).mean(), abs=1e-5)
    assert measured["policy/grad_norm"] > 0


def test_rows_that_are_masked_do_not_matter(make_context, monkeypatch):
    """A failed row changes neither loss nor gradient, whatever it holds."""
    stage = trainer_of(make_context)
    inputs = learning_inputs(stage)
    dead = ~np.array([m.any() for m in inputs["advantages"].mask.rows()])
    assert dead.any()
    rows = np.flatnonzero(~dead)
    fewer = {k: v.take(rows) for k, v in inputs.items()}
    for mode in ("token-mean", "seq-mean-token-mean"):
        everything = gradient(make_context, monkeypatch, inputs, loss_agg_mode=mode)
        assert_same(everything, gradient(make_context, monkeypatch, fewer, loss_agg_mode=mode))


def test_the_engines_log_probs_are_needed_by_the_loss_that_corrects_for_them(make_context):
    stage = trainer_of(make_context, policy_loss="bypass_mode")
    rollouts = rollout_batch([[5]], [[7, 8]], log_probs=[[-1.0, math.nan]])
    with pytest.raises(
        ValueError, match=r"policy_loss=bypass_mode needs the engine's log-probs, which rows \[0\] lack"
    ):
        stage.learn(rollouts=rollouts, old=stage.run(rollouts=rollouts), advantages=advantage_batch(rollouts, 1.0))


def test_kl_is_between_the_policies_before_and_after_the_step(make_context):
    stage = trainer_of(make_context, lr=3e-3)
    inputs = learning_inputs(stage, spread=0.0)
    stage.learn(**inputs)
    measured = metrics(stage)["policy/kl"]
    mask = inputs["advantages"].mask.values
    log_ratio = (stage.run(rollouts=inputs["rollouts"]).log_probs.values - inputs["old"].log_probs.values)[mask].astype(
        np.float64
    )
    assert measured == pytest.approx((np.exp(log_ratio) - 1 - log_ratio).mean(), rel=1e-3)
    assert measured > 1e-4


# -- guards, weights, state ------------------------------------------------------------------------------------


def weights_of(stage):
    return {n: t.clone() for n, t in stage._module.state_dict().items()}


def equal(one, other):
    return all(torch.equal(t, other[n]) for n, t in one.items())


def test_a_nan_gradient_skips_the_update_and_three_end_the_run(make_context):
    """facebookresearch/habitat-lab issue 2226: clipping does not stop NaN."""
    stage = trainer_of(make_context, mini_batch=4)
    inputs = learning_inputs(stage)
    stage.learn(**inputs)
    assert metrics(stage)["trainer/updates"] == 2
    weights, adam = weights_of(stage), stage.state_dict()["optimizer"]["adam"]
    parameter = stage._optimizer.parameters[3]
    hook = parameter.register_hook(lambda g: g.clone().fill_(math.nan))
    stage.learn(**inputs)
    measured = metrics(stage)
    assert measured["trainer/skipped_updates"] == 2
    assert measured["trainer/updates"] == 0
    assert stage.publish().version == 1, "nothing was learned: no new version"
    after = stage.state_dict()["optimizer"]["adam"]
    assert equal(weights, weights_of(stage))
    assert all(torch.equal(adam[i][k], after[i][k]) for i in adam for k in adam[i])
    with pytest.raises(ArithmeticError, match="3 updates in a row"):
        stage.learn(**inputs)
    hook.remove()


def test_an_update_that_changes_no_bit_is_an_error(make_context):
    """A learning rate below the resolution of the weights must not pass for training."""
    stage = trainer_of(make_context, lr=1e-30)
    stage.publish()
    stage.learn(**learning_inputs(stage))
    with pytest.raises(ValueError, match=r"version 1: .* changed no bit of the weights; trainer\.lr=1e-30"):
        stage.publish()


def test_updates_and_version(make_context):
    stage = trainer_of(make_context, mini_batch=4, epochs=3)
    assert stage.publish().version == 0
    inputs = learning_inputs(stage)
    stage.learn(**inputs)
    measured = metrics(stage)
    assert measured["trainer/updates"] == 6
    assert measured["policy/lr"] == stage.cfg.lr
    assert 0 <= measured["trainer/padding_ratio"] < 1
    assert measured["trainer/tokens_per_s"] > 0
    assert stage.publish().version == 1
    assert stage.run(rollouts=inputs["rollouts"]).version == 1


def test_padding_ratio_counts_padding(make_context):
    stage = trainer_of(make_context)
    rollouts = rollout_batch([[5, 6], [5]], [[7, 8, 9], [7]])
    stage.learn(rollouts=rollouts, old=log_prob_batch(rollouts), advantages=advantage_batch(rollouts, 1.0))
    assert metrics(stage)["trainer/padding_ratio"] == pytest.approx(3 / 10)


def test_a_bfloat16_model_keeps_float32_weights(make_context):
    stage = build(ENTRY)
    stage.model.cfg.dtype = "bfloat16"
    stage.open(make_context("trainer"))
    inputs = learning_inputs(stage)
    assert {t.dtype for t in stage._module.state_dict().values()} == {torch.float32}
    exact = np.concatenate(reference(inputs["rollouts"], 1.0)[0])
    ours = stage.run(rollouts=inputs["rollouts"]).log_probs.values
    assert np.abs(ours - exact).max() < 0.5
    assert np.abs(ours - exact).max() > 1e-4, "it was to compute in bfloat16"
    before = weights_of(stage)
    stage.learn(**inputs)
    assert not equal(before, weights_of(stage))


# -- the plan --------------------------------------------------------------------------------------------------


def problems(**settings):
    known = {"prompts_per_step": 4, "samples_per_prompt": 8}
    return {p.where: p for p in build(ENTRY, **settings).check(facts("trainer", values=known))}


def test_the_defaults_are_fine():
    assert not problems()
    assert build(ENTRY).facts() == {"policy_loss": "vanilla", "loss_agg_mode": "token-mean"}
    assert build(ENTRY, policy_loss="gspo").facts()["loss_agg_mode"] == "seq-mean-token-mean"


@pytest.mark.parametrize(
    ("settings", "where", "says"),
    [
        ({"policy_loss": "vanila"}, "trainer.policy_loss", "did you mean 'vanilla'"),
        ({"policy_loss": "dro"}, "trainer.dro_beta", "must be given for policy_loss=dro"),
        ({"loss_agg_mode": "token_mean"}, "trainer.loss_agg_mode", "did you mean 'token-mean'"),
        ({"loss_agg_mode": "seq-mean-token-sum-norm"}, "trainer.loss_scale_factor", "rollout.max_new_tokens"),
        ({"policy_loss": "sapo", "loss_agg_mode": "token-sum"}, "trainer.loss_agg_mode", "sapo ignores it"),
        ({"mini_batch": 5}, "trainer.mini_batch", "nearest that do: 4 or 8"),
    ],
)
def test_what_the_plan_refuses(settings, where, says):
    found = problems(**settings)
    assert list(found) == [where]
    assert says in str(found[where])
    assert found[where].level == "error"


CORRECTION = type(ENTRY.config().rollout_correction)


@pytest.mark.parametrize(
    ("loss", "setting", "value"),
    [
        ("gspo", "clip_ratio_c", 5.0),
        ("gpg", "clip_ratio", 0.3),
        ("kl_cov", "clip_ratio_high", 0.3),
        ("vanilla", "tau_pos", 2.0),
        ("vanilla", "tau_neg", 2.0),
        ("kl_cov", "clip_cov_ratio", 0.1),
        ("vanilla", "clip_cov_lb", 0.5),
        ("vanilla", "clip_cov_ub", 9.0),
        ("clip_cov", "kl_cov_ratio", 0.1),
        ("clip_cov", "ppo_kl_coef", 0.2),
        ("vanilla", "dro_beta", 0.1),
        ("vanilla", "rollout_correction", CORRECTION(rollout_is="token")),
        ("bypass_mode", "tau_pos", 2.0),
        ("vanilla", "loss_scale_factor", 64.0),
        ("geo_mean", "loss_scale_factor", 64.0),
    ],
)
def test_a_setting_that_the_loss_does_not_read_is_a_warning(loss, setting, value):
    found = problems(policy_loss=loss, **{setting: value})
    assert list(found) == [f"trainer.{setting}"]
    assert found[f"trainer.{setting}"].level == "warning"
    assert "has no effect" in found[f"trainer.{setting}"].what


@pytest.mark.parametrize(
    ("loss", "settings"),
    [
        ("vanilla", {"clip_ratio": 0.3, "clip_ratio_low": 0.1, "clip_ratio_high": 0.4, "clip_ratio_c": 5.0}),
        ("sapo", {"tau_pos": 2.0, "tau_neg": 2.0}),
        ("clip_cov", {"clip_cov_ratio": 0.1, "clip_cov_lb": 0.5, "clip_cov_ub": 9.0, "clip_ratio": 0.3}),
        ("kl_cov", {"kl_cov_ratio": 0.1, "ppo_kl_coef": 0.2}),
        ("dro", {"dro_beta": 0.1}),
        ("bypass_mode", {"rollout_correction": CORRECTION(rollout_is="token"), "clip_ratio_c": 5.0}),
        ("vanilla", {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 64.0}),
    ],
)
def test_a_setting_that_the_loss_reads_is_none(loss, settings):
    assert not problems(policy_loss=loss, **settings)


def test_clipping_has_no_effect_where_the_correction_takes_reinforce():
    found = problems(policy_loss="bypass_mode", clip_ratio=0.3, rollout_correction=CORRECTION(loss_type="reinforce"))
    assert [(p.where, p.level) for p in found.values()] == [("trainer.clip_ratio", "warning")]


def test_rollout_correction_is_checked():
    wrong = CORRECTION(loss_type="ppo", rollout_is="tokens", rollout_rs="token_k1")
    found = problems(policy_loss="bypass_mode", rollout_correction=wrong)
    assert set(found) == {
        f"trainer.rollout_correction.{k}" for k in ("loss_type", "rollout_is", "rollout_rs_threshold")
    }
