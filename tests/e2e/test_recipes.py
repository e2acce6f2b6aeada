"""Every recipe of conf/experiment that a CPU can run, for two steps (gsm8k: tests/e2e/test_gsm8k.py).

`recipes`: one after the other in one process. `fast`: with the CPU build of vLLM, as its comment says.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.commands import ROOT, Ended, lines, run, run_each

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

RECIPES = ("quickstart", "rloo", "verl_reward", "baseline")
SMALLER = ("run.steps=2", "loader.batch_size=8", "trainer.mini_batch=0", "eval_loader.limit=16")
"""As large as these the recipes would take a minute each."""


def recipes(folder: Path) -> Ended:
    return run_each(folder, *((f"experiment={name}", f"hydra.run.dir={folder}/{name}", *SMALLER) for name in RECIPES))


def fast(folder: Path) -> Ended:
    tokens = f"tokenizer_cache.path={folder}/tokens"  # not into the user's own
    return run(folder, "experiment=fast", "sampler=torch", tokens, f"hydra.run.dir={folder}/fast", *SMALLER)


RUNS = {"recipes": recipes, "fast": fast}
EACH = [(name, "recipes") for name in RECIPES] + [pytest.param("fast", "fast", marks=pytest.mark.vllm)]


def steps(runs, name: str, kind: str = "recipes") -> list[dict]:
    return lines(runs(kind).folder / name / "metrics.jsonl")


def rows(runs, name: str, purpose: str) -> list[dict]:
    return [r for r in lines(runs("recipes").folder / name / "rollouts.jsonl") if r["purpose"] == purpose]


def test_every_recipe_is_run_somewhere():
    there = {p.stem for p in (ROOT / "conf" / "experiment").glob("*.yaml")}
    assert there == {*RECIPES, "fast", "gsm8k"}


@pytest.mark.parametrize(("name", "kind"), EACH)
def test_it_takes_two_steps_and_leaves_nothing(runs, name: str, kind: str):
    ended, made = runs(kind), steps(runs, name, kind)

    assert (ended.code, ended.left) == (0, {}), ended.err[-3000:]
    assert [s["step"] for s in made] == [0, 1, 2]
    assert not [(s["step"], k) for s in made for k, v in s.items() if v is None or not math.isfinite(v)]
    assert json.loads((ended.folder / name / "plan.json").read_text())["name"] == name


def test_quickstart_tells_what_is_going_on(runs):
    """Held-out accuracy every second step, and six samples."""
    assert [s["step"] for s in steps(runs, "quickstart") if "eval/accuracy" in s] == [0, 2]
    shown = runs("recipes").out.split("run directory: ")[0]
    assert "step 2/2  reward " in shown
    assert all(f"│ {r['prompt']}" in shown for r in rows(runs, "quickstart", "eval")[:6])


def test_rloo_has_no_critic_and_an_update_of_its_own(runs):
    """Advantages by the formula: a row's reward less the mean of the other seven's."""
    made = steps(runs, "rloo")
    assert not [k for s in made for k in s if k.startswith("critic/")]
    for step in made[1:]:
        mine = [r for r in rows(runs, "rloo", "train") if r["step"] == step["step"]]
        reward = np.array([r["reward"] for r in mine]).reshape(-1, 8)
        per_row = (reward - reward.mean(1, keepdims=True)) * 8 / 7
        tokens = np.array([r["tokens"] for r in mine])
        expected = np.average(per_row.ravel(), weights=tokens)
        assert step["advantage/mean"] == pytest.approx(expected, abs=1e-5)
        assert step["advantage/std"] > 0


def test_verls_reward_file_scores_verls_columns(runs):
    trained = rows(runs, "verl_reward", "train")
    assert trained
    for r in trained:
        digits = r["prompt"][0]["content"].rstrip("=")
        answer = "".join(sorted(digits))
        given = r["response"].strip()
        in_place = sum(a == b for a, b in zip(given, answer, strict=False)) / max(len(given), 4)
        assert r["ground_truth"] == answer
        assert r["reward"] == pytest.approx(1 if given == answer else 0.2 * in_place, abs=1e-6)
        assert r["reward_parts"] == pytest.approx({"in_place": in_place}, abs=1e-6)


def test_baseline_tokenises_every_prompt_each_time(runs):
    assert {s["tokenizer_cache/hit_ratio"] for s in steps(runs, "baseline")[1:]} == {0}


@pytest.mark.vllm
def test_fast_computes_what_baseline_computes(runs):
    """Other parts, same task: the base is as good in both, and the engine's log-probs are the trainer's."""
    assert steps(runs, "fast", "fast")[0]["eval/accuracy"] == steps(runs, "baseline")[0]["eval/accuracy"]
    for step in steps(runs, "fast", "fast")[1:]:
        assert step["policy/engine_drift"] < 1e-4  # of the CPU build in float32
        assert (
            len({r["row_id"] for r in lines(runs("fast").folder / "fast" / "rollouts.jsonl") if r["step"] == 1}) == 64
        )
