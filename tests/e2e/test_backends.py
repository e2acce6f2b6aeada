"""Every backend by an override, in runs of two steps: they run, and where two make the same, it is the same.

`choices`: all combinations of seed, rollout and runner, one after the other in one process.
`cases`: options of a user's own (mine/conf/case), each a few deltas: loader and cache, estimators, losses, functions as
    reward.
`placed`: rollout and reward in processes of their own.
"""

from __future__ import annotations

import json
import math
from itertools import product
from pathlib import Path

import pytest

from tests.e2e.commands import OWN, SMALL, Ended, Run, differences, lines, numbers, run_each, steps_done

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CHOICES: list[tuple[str, str, str]] = list(product(("0", "1"), ("torch", "hf"), ("sync", "overlap")))
DEFAULT = ("0", "torch", "sync")
WITHOUT_CRITIC = ("grpo", "rloo", "reinforce", "passk")
CASES = ("anew", "function", "parts", "hangs", *WITHOUT_CRITIC)


def choices(folder: Path) -> Ended:
    lines = (
        (f"hydra.run.dir={folder}/sweep/{i}", f"seed={seed}", f"rollout={rollout}", f"runner={runner}", *SMALL)
        for i, (seed, rollout, runner) in enumerate(CHOICES)
    )
    return run_each(folder, *lines)


def cases(folder: Path) -> Ended:
    lines = ((*OWN, f"hydra.run.dir={folder}/sweep/{i}", f"+case={case}", *SMALL) for i, case in enumerate(CASES))
    return run_each(folder, *lines)


def placed(folder: Path) -> Ended:
    started = Run(
        folder, f"hydra.run.dir={folder}/run", *SMALL, "placement.reward=process", "placement.rollout=process"
    )
    started.until(lambda: steps_done(folder / "run") >= 0, "the first evaluation")
    (folder / "children").write_text("\n".join(started.commands()))
    return started.end()


RUNS = {"choices": choices, "cases": cases, "placed": placed}


def sweep(runs) -> Path:
    return runs("choices").folder / "sweep"


def choice(runs, seed: str, rollout: str, runner: str) -> Path:
    return sweep(runs) / str(CHOICES.index((seed, rollout, runner)))


def case(runs, name: str) -> Path:
    return runs("cases").folder / "sweep" / str(CASES.index(name))


def rollouts(run_dir: Path) -> list[dict]:
    return lines(run_dir / "rollouts.jsonl")


@pytest.mark.parametrize("name", RUNS)
def test_it_ends_well_and_leaves_nothing(runs, name: str):
    ended = runs(name)

    assert (ended.code, ended.left) == (0, {}), ended.err[-3000:]
    assert "Traceback" not in ended.err


def test_what_was_chosen_is_what_ran(runs):
    for seed, rollout, runner in CHOICES:
        point = choice(runs, seed, rollout, runner)
        plan = json.loads((point / "plan.json").read_text())
        assert f"\nseed: {seed}\n" in "\n" + (point / "config.yaml").read_text()
        assert (plan["nodes"]["rollout"]["backend"], plan["runner"]) == (rollout, runner)
        assert (point / "final" / "model.safetensors").is_file()


@pytest.mark.parametrize("point", CHOICES, ids="-".join)
def test_every_number_is_finite(runs, point: tuple[str, str, str]):
    steps = numbers(choice(runs, *point))

    assert [s["step"] for s in steps] == [0, 1, 2]
    assert not [(s["step"], k) for s in steps for k, v in s.items() if v is None or not math.isfinite(v)]


@pytest.mark.parametrize(("seed", "rollout"), list(product(("0", "1"), ("torch", "hf"))))
def test_the_runner_changes_no_number(runs, seed: str, rollout: str):
    in_order, streamed = (choice(runs, seed, rollout, runner) for runner in ("sync", "overlap"))

    assert differences(numbers(in_order), numbers(streamed)) == []
    assert rollouts(in_order) == rollouts(streamed)


def test_another_seed_gives_other_numbers(runs):
    """That the same seed gives the same in another process is what the tests of cases and processes rest on."""
    one, other = (choice(runs, seed, "torch", "sync") for seed in ("0", "1"))

    assert numbers(one)[0]["eval/accuracy"] == numbers(other)[0]["eval/accuracy"]  # the base, greedy
    for a, b in zip(numbers(one)[1:], numbers(other)[1:], strict=True):
        assert a["critic/loss"] != b["critic/loss"]
    assert [r["prompt"] for r in rollouts(one)] != [r["prompt"] for r in rollouts(other)]


def test_processes_change_no_number(runs):
    """Two stages and the process that scores rows were children; records and weights crossed by shared memory."""
    here, apart = choice(runs, *DEFAULT), runs("placed").folder / "run"

    assert (runs("placed").folder / "children").read_text().count("pipeline.process") >= 3
    assert differences(numbers(here), numbers(apart)) == []
    assert rollouts(here) == rollouts(apart)
    assert (here / "final" / "model.safetensors").read_bytes() == (apart / "final" / "model.safetensors").read_bytes()


def test_both_engines_sample_the_same_rows(runs):
    """Rows are seeded one by one, so two engines that compute the same logits draw the same tokens."""
    ours, theirs = (rollouts(choice(runs, "0", engine, "sync")) for engine in ("torch", "hf"))
    same = ("step", "purpose", "row_id", "prompt", "response", "reward", "finish", "status")

    assert [[r[k] for k in same] for r in ours] == [[r[k] for k in same] for r in theirs]
    for a, b in zip(ours, theirs, strict=True):
        if a["purpose"] == "train":
            assert a["engine_log_prob"] == pytest.approx(b["engine_log_prob"], abs=1e-3)
            assert b["engine_log_prob"] == pytest.approx(b["policy_log_prob"], abs=1e-3)


def test_reading_and_tokenising_anew_changes_no_number(runs):
    """loader=standard and tokenizer_cache=none, in another process than the default's."""
    default, anew = (numbers(p, without=("tokenizer_cache/",)) for p in (choice(runs, *DEFAULT), case(runs, "anew")))

    assert differences(default, anew) == []
    assert rollouts(choice(runs, *DEFAULT)) == rollouts(case(runs, "anew"))
    assert {step["tokenizer_cache/hit_ratio"] for step in numbers(case(runs, "anew"))[1:]} == {0}


def test_a_function_of_verls_form_scores_like_the_rule(runs):
    """`compute_score` is what the rule `exact` computes: equal but for the names of the parts."""
    by_rule, by_function = choice(runs, *DEFAULT), case(runs, "function")
    part = ("reward/exact/mean",)

    assert differences(numbers(by_rule, without=part), numbers(by_function)) == []


def test_a_function_may_return_parts_and_take_settings(runs):
    trained = [r for r in rollouts(case(runs, "parts")) if r["purpose"] == "train"]

    for r in trained:
        assert r["reward"] == float(r["response"].strip() == r["ground_truth"]["sort"]) + 0.5
        assert r["reward_parts"] == {"letters": len(r["response"])}
    for step in numbers(case(runs, "parts"))[1:]:
        mine = [r for r in trained if r["step"] == step["step"]]
        assert step["reward/mean"] == pytest.approx(sum(r["reward"] for r in mine) / len(mine), abs=1e-12)
        assert step["reward/accuracy"] == pytest.approx(step["reward/mean"] - 0.5, abs=1e-12)


def test_a_row_that_hangs_is_unscored_and_the_run_goes_on(runs):
    rows = rollouts(case(runs, "hangs"))
    lost = [r for r in rows if r["status"] != "ok"]
    steps = numbers(case(runs, "hangs"))

    assert [(r["step"], r["status"], r["reward"]) for r in lost] == [(1, "unscored", None)]
    assert lost[0]["reason"] == "timed out after 1 s"
    assert [s["reward/unscored"] for s in steps[1:]] == [1, 0]
    scored = [r["reward"] for r in rows if r["step"] == 1 and r["purpose"] == "train" and r["status"] == "ok"]
    assert len(scored) == 15
    assert steps[1]["reward/mean"] == pytest.approx(sum(scored) / 15, abs=1e-12)
    assert steps[1]["trainer/updates"] == steps[2]["trainer/updates"] == 1
    assert "1 rows were not scored" in runs("cases").out


@pytest.mark.parametrize("name", WITHOUT_CRITIC)
def test_estimators_and_losses_without_a_critic(runs, name: str):
    """Each makes an update of its own, with finite numbers, from the same first rollouts."""
    steps = numbers(case(runs, name))

    assert [s["step"] for s in steps] == [0, 1, 2]
    assert not [(s["step"], k) for s in steps for k, v in s.items() if v is None or not math.isfinite(v)]
    assert not [k for s in steps for k in s if k.startswith("critic/")]
    norms = gradients(case(runs, name))
    assert max(norms) > 0  # in a step, groups may agree; of pass@k, those with two right answers do
    assert first_responses(case(runs, name)) == first_responses(choice(runs, *DEFAULT))
    assert norms not in [gradients(case(runs, n)) for n in WITHOUT_CRITIC if n != name]


def gradients(run_dir: Path) -> list[float]:
    return [step["policy/grad_norm"] for step in numbers(run_dir)[1:]]


def first_responses(run_dir: Path) -> list[str]:
    return [r["response"] for r in rollouts(run_dir) if (r["step"], r["purpose"]) == (1, "train")]
