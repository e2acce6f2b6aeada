"""verl's estimators by name: numbers by hand, rows that are left out, and what the plan says."""

from __future__ import annotations

import numpy as np
import pytest

from stages import verl_door
from stages.records import Status
from tests.builders import log_prob_batch, reward_batch, rollout_batch, value_batch
from tests.stages.learners import build, entry_of, facts, metrics, opened, random_rollouts

ENTRY = entry_of("advantage", "verl")
FEEDABLE = sorted(
    n
    for n, s in verl_door.estimators().items()
    if "reward_baselines" not in s.required and "sum_pi_squared" not in s.required
)


def rows_of(lengths, *, n=1, **more):
    """Rollouts with responses of these lengths."""
    return rollout_batch([[5, 6]] * (len(lengths) // n), [[7] * k for k in lengths], n=n, **more)


@pytest.fixture
def advantage(make_context):
    def run(rollouts, rewards, values=None, **settings):
        stage = opened(ENTRY, make_context, **settings)
        fed = value_batch(rollouts, values) if values is not None else value_batch(rollouts)
        out = stage.run(rollouts=rollouts, rewards=rewards, old=log_prob_batch(rollouts), values=fed)
        return out, metrics(stage)

    return run


def gae(reward, values, gamma, lam):
    """Schulman et al. 2016, equation 16, on one row whose reward comes at the end."""
    last, out = 0.0, []
    for t in reversed(range(len(values))):
        following = values[t + 1] if t + 1 < len(values) else 0.0
        delta = (reward if t + 1 == len(values) else 0.0) + gamma * following - values[t]
        last = delta + gamma * lam * last
        out.insert(0, last)
    return np.array(out)


def whitened(x):
    return (x - x.mean()) / np.sqrt(x.var(ddof=1) + 1e-8)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.95), (0.5, 0.0)])
def test_gae(advantage, gamma, lam):
    rollouts, values = rows_of([3, 1, 2]), [[0.1, 0.4, -0.2], [0.3], [0.0, 0.7]]
    out, _ = advantage(rollouts, reward_batch([1.0, 0.0, 2.0]), values, estimator="gae", gamma=gamma, lam=lam)
    raw = np.concatenate([gae(r, v, gamma, lam) for r, v in zip([1.0, 0.0, 2.0], values, strict=True)])
    assert out.advantages.values == pytest.approx(whitened(raw), abs=1e-5)
    assert out.returns.values == pytest.approx(raw + np.concatenate(values), abs=1e-6)


def test_gae_steps_over_masked_tokens(advantage):
    """verl issue 'run PPO GAE over trainable tokens only': no decay across a tool's tokens, no lost reward."""
    mask = [[True, False, True, False], [True, True, False, False]]
    rollouts = rows_of([4, 4], loss_mask=mask)
    values = [[0.5, 9.0, 0.25, 9.0], [0.1, 0.2, 9.0, 9.0]]
    out, _ = advantage(rollouts, reward_batch([1.0, 3.0]), values, gamma=0.9, lam=0.8)
    raw = np.concatenate([gae(1.0, [0.5, 0.25], 0.9, 0.8), gae(3.0, [0.1, 0.2], 0.9, 0.8)])
    chosen = np.concatenate(mask)
    assert out.returns.values[chosen] == pytest.approx(raw + np.array([0.5, 0.25, 0.1, 0.2]), abs=1e-6)
    assert out.advantages.values[chosen] == pytest.approx(whitened(raw), abs=1e-5)
    assert not out.advantages.values[~chosen].any()
    assert not out.returns.values[~chosen].any()
    assert out.mask.values.tolist() == chosen.tolist()


def test_the_last_trainable_token_gets_the_score(advantage):
    rollouts = rows_of([3, 3], loss_mask=[[True, True, False]] * 2)
    out, _ = advantage(rollouts, reward_batch([1.0, 0.0]), [[0.5, 0.25, 7.0], [0.0, 0.0, 7.0]], gamma=0.0, lam=0.0)
    unwhitened = out.returns.values - [0.5, 0.25, 0, 0, 0, 0]
    assert unwhitened[1] == pytest.approx(1 - 0.25)
    assert unwhitened[0] == pytest.approx(0 - 0.5)


@pytest.mark.parametrize("lengths", [[3], [5, 2]])
def test_token_rewards_sum_to_the_score(lengths):
    """huggingface/trl issue 3750: a score one place after the end is lost."""
    from stages.advantage.verl import scores_on_last

    masks = [np.array([True] * n) for n in lengths]
    scores = np.arange(1, len(lengths) + 1).astype(np.float32)
    out = np.split(scores_on_last(scores, masks), np.cumsum(lengths)[:-1])
    for row, score, n in zip(out, scores, lengths, strict=True):
        assert np.flatnonzero(row).tolist() == [n - 1]
        assert row.sum() == score


def test_grpo_is_by_group_with_the_sample_deviation(advantage):
    """XU-YIJIE/grpo-flat issue 2."""
    rollouts, rewards = rows_of([1, 2, 1, 1, 1, 1, 1, 1], n=4), reward_batch([1, 0, 0, 1, 5, 5, 5, 5], n=4)
    out, measured = advantage(rollouts, rewards, estimator="grpo")
    by_row = [r.tolist() for r in out.advantages.rows()]
    half = 0.5 / np.std([1, 0, 0, 1], ddof=1)
    assert half == pytest.approx(0.866, abs=1e-3)
    assert np.concatenate(by_row[:4]) == pytest.approx([half, -half, -half, -half, half], abs=1e-5)
    assert np.concatenate(by_row[4:]).tolist() == [0] * 4
    assert measured["advantage/zero_variance_groups"] == 0.5


def test_dr_grpo_does_not_divide(advantage):
    rollouts, rewards = rows_of([1] * 4, n=4), reward_batch([1, 0, 0, 1], n=4)
    for estimator in ("grpo", "grpo_vectorized"):  # verl's own wrapper forgets the setting for the second
        out, _ = advantage(rollouts, rewards, estimator=estimator, norm_adv_by_std_in_grpo=False)
        assert out.advantages.values == pytest.approx([0.5, -0.5, -0.5, 0.5])


def test_rloo_leaves_one_out(advantage):
    scores = np.array([1.0, 3.0, 2.0, 0.5])
    out, _ = advantage(rows_of([1] * 4, n=4), reward_batch(scores, n=4), estimator="rloo")
    assert out.advantages.values == pytest.approx(
        [s - np.delete(scores, i).mean() for i, s in enumerate(scores)], abs=1e-6
    )


def test_reinforce_plus_plus_discounts_and_whitens(advantage):
    out, _ = advantage(rows_of([3, 2]), reward_batch([1.0, 2.0]), estimator="reinforce_plus_plus", gamma=0.5)
    returns = np.array([0.25, 0.5, 1.0, 1.0, 2.0])
    assert out.returns.values == pytest.approx(returns)
    assert out.advantages.values == pytest.approx(whitened(returns), abs=1e-5)


def test_opo_weighs_the_baseline_by_length(advantage):
    out, _ = advantage(rows_of([3, 1], n=2), reward_batch([1.0, 0.0], n=2), estimator="opo")
    assert out.advantages.values == pytest.approx([0.25] * 3 + [-0.75], abs=1e-6)


def test_gdpo_normalises_each_part_by_itself(advantage):
    parts = [[1.0, 0.0], [0.0, 10.0], [1.0, 0.0], [0.0, 0.0]]
    rewards = reward_batch([1, 10, 1, 0], n=4, part_names=("exact", "length"), parts=parts)
    out, _ = advantage(rows_of([1] * 4, n=4), rewards, estimator="gdpo", reward_weights=[1.0, 0.5])
    columns = np.array(parts).T
    total = sum(w * (c - c.mean()) / (c.std(ddof=1) + 1e-6) for w, c in zip([1.0, 0.5], columns, strict=True))
    assert out.advantages.values == pytest.approx(whitened(total), abs=1e-4)
    with pytest.raises(ValueError, match="has 1 numbers, but the reward has 2 parts: exact, length"):
        advantage(rows_of([1] * 4, n=4), rewards, estimator="gdpo", reward_weights=[1.0])


@pytest.mark.parametrize("who", ["rollout", "reward"])
def test_a_failed_row_is_in_no_statistic(advantage, who):
    """NVIDIA-NeMo/Gym PR 3351: scores [1, 3, 2, -] have the baseline 2, not 1.5."""
    failed = [Status.OK] * 3 + [Status.FAILED if who == "rollout" else Status.UNSCORED]
    rollouts = rows_of([1, 1, 1, 2], n=4, status=failed if who == "rollout" else None)
    rewards = reward_batch([1, 3, 2, 0.0], n=4, status=failed)
    out, measured = advantage(rollouts, rewards, estimator="grpo", norm_adv_by_std_in_grpo=False)
    assert out.advantages.values == pytest.approx([-1, 1, 0, 0, 0])
    assert out.mask.values.tolist() == [True, True, True, False, False]
    assert measured["advantage/mean"] == pytest.approx(0)
    assert measured["advantage/std"] == pytest.approx(np.std([-1, 1, 0]))


def test_an_abstaining_reward_leaves_the_others_their_mean(advantage):
    """modelscope/ms-swift issue 8123: one NaN must not make the batch NaN."""
    rewards = reward_batch([1, np.nan, 0, 1], n=4)
    out, _ = advantage(rows_of([1] * 4, n=4), rewards, estimator="grpo", norm_adv_by_std_in_grpo=False)
    assert out.advantages.values == pytest.approx([1 / 3, 0, -2 / 3, 1 / 3])
    assert out.mask.values.tolist() == [True, False, True, True]


@pytest.mark.parametrize("score", [np.inf, np.nan])
def test_a_score_that_is_not_finite_is_an_error_that_names_the_row(advantage, score):
    rewards = reward_batch([1, score], n=2, status=[Status.OK, Status.OK])
    with pytest.raises(ValueError, match=r"rows \[1\] have status OK, but their score is not a finite number"):
        advantage(rows_of([1, 1], n=2), rewards, estimator="grpo")


@pytest.mark.parametrize("estimator", FEEDABLE)
def test_batches_with_no_or_one_learnable_token(advantage, estimator):
    """alibaba/ROLL issue 475: whitening has no deviation; the value is kept."""
    rewards = reward_batch([2.0, np.nan], n=1)
    nothing, measured = advantage(rows_of([2, 1], loss_mask=[[False, False], [True]]), rewards, estimator=estimator)
    assert not nothing.mask.values.any()
    assert not nothing.advantages.values.any()
    assert "advantage/mean" not in measured
    one, _ = advantage(
        rows_of([2, 1], loss_mask=[[False, True], [True]]), rewards, [[0.0, 0.5], [0.0]], estimator=estimator
    )
    if estimator == "grpo_passk":  # it compares two samples, and there is one
        assert not one.mask.values.any()
        return
    assert one.mask.values.tolist() == [False, True, False]
    expected = {"gae": 1.5, "rloo_vectorized": 0.0}.get(estimator, 2.0)
    assert one.advantages.values == pytest.approx([0, expected, 0])


@pytest.mark.parametrize("estimator", FEEDABLE)
def test_neither_padding_nor_row_order_nor_group_ids_matter(advantage, estimator):
    rollouts = random_rollouts(3, 4, first_row=5_000_000_000)
    scores = np.random.default_rng(1).integers(0, 3, 12).astype(float)
    rewards = reward_batch(scores, n=4, first_row=5_000_000_000)
    out, _ = advantage(rollouts, rewards, estimator=estimator)
    order = np.random.default_rng(2).permutation(12)
    shuffled, _ = advantage(rollouts.take(order), rewards.take(order), estimator=estimator)
    back = shuffled.take(np.argsort(order))
    assert back.advantages.values == pytest.approx(out.advantages.values, abs=1e-5)
    assert out.advantages.values.any()


def test_passk_leaves_out_groups_that_shrank_to_one(advantage):
    rewards = reward_batch([1.0, np.nan, 1.0, 0.0], n=2)
    out, _ = advantage(rows_of([1] * 4, n=2), rewards, estimator="grpo_passk", norm_adv_by_std_in_grpo=False)
    assert out.mask.values.tolist() == [False, False, True, True]
    assert out.advantages.values == pytest.approx([0, 0, 1.0, 0])


COMPARING = sorted(n for n in FEEDABLE if verl_door.estimators()[n].takes("index"))


@pytest.mark.parametrize("estimator", COMPARING)
def test_a_row_whose_group_is_gone_is_not_pushed_up(advantage, estimator):
    """verl gives it its raw reward as advantage: here 1, whatever the others would have scored."""
    scores = [1.0, np.nan, np.nan, 3.0, 0.0, 1.0]
    out, measured = advantage(rows_of([2] * 6, n=3), reward_batch(scores, n=3), estimator=estimator)
    assert out.mask.values.tolist() == [False] * 6 + [True] * 6
    assert not out.advantages.values[:6].any()
    assert not out.returns.values[:6].any()
    assert out.advantages.values[6:].any()
    assert measured["advantage/lone_rows"] == 1
    whole, measured = advantage(rows_of([2] * 3, n=3), reward_batch(scores[3:], n=3), estimator=estimator)
    assert out.advantages.values[6:] == pytest.approx(whole.advantages.values, abs=1e-6)
    assert measured["advantage/lone_rows"] == 0, "it is logged where there is none, too"


@pytest.mark.parametrize("estimator", ["gae", "reinforce_plus_plus"])
def test_a_row_without_its_group_stays_where_nothing_is_compared(advantage, estimator):
    out, measured = advantage(rows_of([2] * 2, n=2), reward_batch([1.0, np.nan], n=2), estimator=estimator)
    assert out.mask.values.tolist() == [True, True, False, False]
    assert measured["advantage/lone_rows"] == 0


def test_one_sample_a_prompt_as_configured_is_kept(advantage):
    out, measured = advantage(rows_of([1, 1]), reward_batch([1.0, 0.5]), estimator="grpo")
    assert out.mask.values.all()
    assert measured["advantage/lone_rows"] == 0


def test_dead_groups_are_counted_among_groups_that_can_differ(advantage):
    """huggingface/trl PR 5640. Groups: equal, different, one scored row, none."""
    rewards = reward_batch([1, 1, 1, 0, 1, np.nan, np.nan, np.nan], n=2)
    _, measured = advantage(rows_of([1] * 8, n=2), rewards, estimator="grpo")
    assert measured["advantage/zero_variance_groups"] == 0.5


def test_an_estimator_that_gives_nan_is_an_error(advantage, monkeypatch):
    def broken(token_level_rewards, response_mask, **kwargs):
        assert kwargs["index"].tolist() == [0, 0, 1, 1]
        assert kwargs["config"].gamma == 1.0
        return token_level_rewards / 0, token_level_rewards

    monkeypatch.setitem(verl_door.core_algos().ADV_ESTIMATOR_REGISTRY, "broken", broken)
    with pytest.raises(ValueError, match="estimator 'broken' gave advantages that are not finite for rows"):
        advantage(rows_of([1] * 4, n=2), reward_batch([0, 1, 0, 1], n=2), estimator="broken")


# -- the plan --------------------------------------------------------------------------------------------------


def problems(fed=("rollouts", "rewards"), n=8, **settings):
    return list(build(ENTRY, **settings).check(facts("advantage", values={"samples_per_prompt": n}, fed=fed)))


def test_an_unknown_estimator_has_a_near_match():
    (problem,) = problems(estimator="gea")
    assert problem.where == "advantage.estimator"
    assert "no advantage estimator 'gea'" in problem.what
    assert "did you mean 'gae'" in problem.hint


@pytest.mark.parametrize(
    ("estimator", "missing", "feeds"),
    [
        ("gae", "values", "a critic: graph.forward.advantage.values"),
        ("remax", "reward_baselines", "greedy response"),
        ("optimal_token_baseline", "old_log_probs, sum_pi_squared", "graph.forward.advantage.old"),
    ],
)
def test_an_input_that_nothing_feeds_is_named(estimator, missing, feeds):
    (problem,) = problems(estimator=estimator)
    assert problem.level == "error"
    assert problem.what == f"{estimator} needs {missing}, which nothing feeds"
    assert feeds in problem.hint
    assert "grpo" in problem.hint, "it says what could be used instead"


def test_what_is_fed_is_enough():
    assert not problems(("rollouts", "rewards", "old", "values"), estimator="gae", gamma=0.9)
    assert not problems(estimator="grpo")
    assert not problems(estimator="reinforce_plus_plus", gamma=0.9)


def test_a_critic_that_works_for_nothing_is_a_warning():
    (problem,) = problems(("rollouts", "rewards", "old", "values"), estimator="grpo")
    assert problem.level == "warning"
    assert "the critic's work is for nothing" in problem.what
    assert "gae" in problem.hint


def test_a_setting_without_effect_is_a_warning():
    found = problems(estimator="grpo", gamma=0.9, reward_weights=[1.0])
    assert {(p.where, p.level) for p in found} == {
        ("advantage.gamma", "warning"),
        ("advantage.reward_weights", "warning"),
    }


def test_one_sample_a_prompt_is_no_group():
    (warning,) = problems(n=1, estimator="rloo")
    assert warning.level == "warning"
    (error,) = problems(n=1, estimator="grpo_passk")
    assert error.level == "error"
    assert not problems(("rollouts", "rewards", "values"), n=1, estimator="gae")
