"""Every backend by an override, in sweeps of two-step runs: they run, and where two make the same, it is the same.

`choices`: all combinations of rollout, loader and runner by literal overrides.
`cases`: options of a user's own (mine/conf/case), each a few deltas: estimators, losses, functions as reward.
`placed`: rollout and reward in processes of their own.
`seeds`: the same configuration with two seeds, the first once more in another process.
"""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path

import pytest

from tests.e2e.commands import OWN, SMALL, Ended, Run, differences, lines, numbers, run, steps_done

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CHOICES = list(product(("torch", "hf"), ("mmap", "standard"), ("sync", "overlap")))
CASES = ("plain", "no_cache", "function", "parts", "hangs", "grpo", "rloo", "reinforce", "passk")


def choices(folder: Path) -> Ended:
    groups = ("rollout=torch,hf", "loader=mmap,standard", "runner=sync,overlap")
    return run(folder, "-m", f"hydra.sweep.dir={folder}/sweep", *groups, *SMALL)


def cases(folder: Path) -> Ended:
    return run(folder, "-m", *OWN, f"hydra.sweep.dir={folder}/sweep", f"+case={','.join(CASES)}", *SMALL)


def seeds(folder: Path) -> Ended:
    """Into the default directory: outputs/<date>/<time>-<name>-sweep/<number>."""
    return run(folder, "-m", "seed=0,1", *SMALL)


def placed(folder: Path) -> Ended:
    started = Run(folder, f"hydra.run.dir={folder}/run", *SMALL, "placement.reward=process", "placement.rollout=process")
    started.until(lambda: steps_done(folder / "run") >= 0, "the first evaluation")
    (folder / "children").write_text("\n".join(started.commands()))
    return started.end()


RUNS = {"choices": choices, "cases": cases, "placed": placed, "seeds": seeds}


def choice(runs, *backends: str) -> Path:
    return runs("choices").folder / "sweep" / str(CHOICES.index(backends))


def case(runs, name: str) -> Path:
    return runs("cases").folder / "sweep" / str(CASES.index(name))


def rollouts(run_dir: Path) -> list[dict]:
    return lines(run_dir / "rollouts.jsonl")


@pytest.mark.parametrize("name", RUNS)
def test_it_ends_well_and_leaves_nothing(runs, name: str):
    ended = runs(name)

    assert (ended.code, ended.left) == (0, {}), ended.err[-3000:]
    assert "Traceback" not in ended.err


def test_a_sweep_makes_a_run_directory_for_each_point(runs):
    (day,) = (runs("seeds").folder / "outputs").iterdir()
    (sweep,) = day.iterdir()

    assert sweep.name.endswith("-ppo-sweep")
    points = sorted(p for p in sweep.iterdir() if p.is_dir())
    assert [p.name for p in points] == ["0", "1"]
    for seed, point in enumerate(points):
        assert f"\nseed: {seed}\n" in "\n" + (point / "config.yaml").read_text()
        assert (point / "final" / "model.safetensors").is_file()


def test_the_seed_decides_every_number(runs):
    (sweep,) = (runs("seeds").folder / "outputs").glob("*/*-sweep")
    same, other = sweep / "0", sweep / "1"
    default = choice(runs, "torch", "mmap", "sync")

    assert differences(numbers(same), numbers(default)) == []
    assert rollouts(same) == rollouts(default)
    assert (same / "final" / "model.safetensors").read_bytes() == (default / "final" / "model.safetensors").read_bytes()
    assert numbers(other)[1:] != numbers(default)[1:]
    assert [r["prompt"] for r in rollouts(other)] != [r["prompt"] for r in rollouts(default)]


@pytest.mark.parametrize("backends", CHOICES, ids="-".join)
def test_loader_and_runner_change_no_number(runs, backends: tuple[str, str, str]):
    """For each rollout engine apart: what is made with it is the same to the last bit."""
    default, chosen = choice(runs, backends[0], "mmap", "sync"), choice(runs, *backends)

    assert differences(numbers(default), numbers(chosen)) == []
    assert rollouts(default) == rollouts(chosen)


def test_processes_change_no_number(runs):
    """Two stages and the process that scores rows were children; records and weights crossed by shared memory."""
    here, apart = choice(runs, "torch", "mmap", "sync"), runs("placed").folder / "run"

    assert (runs("placed").folder / "children").read_text().count("pipeline.process") >= 3
    assert differences(numbers(here), numbers(apart)) == []
    assert rollouts(here) == rollouts(apart)
    assert (here / "final" / "model.safetensors").read_bytes() == (apart / "final" / "model.safetensors").read_bytes()


def test_both_engines_sample_the_same_rows(runs):
    """Rows are seeded one by one, so two engines that compute the same logits draw the same tokens."""
    ours, theirs = (rollouts(choice(runs, engine, "mmap", "sync")) for engine in ("torch", "hf"))
    same = ("step", "purpose", "row_id", "prompt", "response", "reward", "finish", "status")

    assert [[r[k] for k in same] for r in ours] == [[r[k] for k in same] for r in theirs]
    for a, b in zip(ours, theirs, strict=True):
        if a["purpose"] == "train":
            assert a["engine_log_prob"] == pytest.approx(b["engine_log_prob"], abs=1e-3)
            assert b["engine_log_prob"] == pytest.approx(b["policy_log_prob"], abs=1e-3)


def test_a_token_cache_changes_no_number_but_its_own(runs):
    plain = numbers(choice(runs, "torch", "mmap", "sync"), without=("tokenizer_cache/",))

    assert differences(plain, numbers(case(runs, "plain"), without=("tokenizer_cache/",))) == []
    assert differences(plain, numbers(case(runs, "no_cache"), without=("tokenizer_cache/",))) == []
    assert all("tokenizer_cache/hit_ratio" not in step for step in numbers(case(runs, "no_cache")))


def test_a_function_of_verls_form_scores_like_the_rule(runs):
    """`compute_score` is what the rule `exact` computes: equal but for the names of the parts."""
    by_rule, by_function = (case(runs, n) for n in ("plain", "function"))
    names = ("reward/exact/mean",)

    assert differences(numbers(by_rule, without=names), numbers(by_function, without=names)) == []


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


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce", "passk"])
def test_estimators_and_losses_without_a_critic(runs, name: str):
    """Each makes an update of its own, with finite numbers, from the same first rollouts."""
    steps = numbers(case(runs, name))
    first = [[r["response"] for r in rollouts(case(runs, n)) if r["step"] == 1 and r["purpose"] == "train"] for n in (name, "grpo")]

    assert [s["step"] for s in steps] == [0, 1, 2]
    assert not [(s["step"], k) for s in steps for k, v in s.items() if v is None or not math.isfinite(v)]
    assert not [k for s in steps for k in s if k.startswith("critic/")]
    assert all(s["policy/grad_norm"] > 0 for s in steps[1:])
    assert first[0] == first[1]
    losses = [tuple(s["policy/grad_norm"] for s in numbers(case(runs, n))[1:]) for n in ("grpo", "rloo", "reinforce", "passk")]
    assert len(set(losses)) == len(losses)


@pytest.mark.parametrize("backends", CHOICES, ids="-".join)
def test_every_number_is_finite(runs, backends: tuple[str, str, str]):
    steps = numbers(choice(runs, *backends))

    assert [s["step"] for s in steps] == [0, 1, 2]
    assert not [(s["step"], k) for s in steps for k, v in s.items() if v is None or not math.isfinite(v)]
