"""`python run.py`, with nothing after it: PPO on the small task learns, and the run directory is complete.

One run of the literal command, in an empty working directory. What it claims is computed anew from what it left:
rewards from the responses, the final accuracy from the exported model with transformers alone.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.commands import ROOT, Ended, lines, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

RUNS = {"default": lambda folder: run(folder)}

STEPS, ROWS, HELD_OUT, EVERY = 20, 512, 512, 10

TRAINING = frozenset(
    {
        "step",
        "policy_version",
        "time/step_s",
        "time/wait_s",
        "time/loader_s",
        "time/tokenizer_cache_s",
        "time/rollout_s",
        "time/reward_s",
        "time/critic_s",
        "time/advantage_s",
        "time/trainer_s",
        "loader/rows_per_s",
        "tokenizer_cache/hit_ratio",
        "rollout/tokens_per_s",
        "rollout/length_mean",
        "rollout/length_p50",
        "rollout/length_p95",
        "rollout/length_max",
        "rollout/truncated_ratio",
        "rollout/staleness_max",
        "reward/mean",
        "reward/exact/mean",
        "reward/unscored",
        "advantage/zero_variance_groups",
        "policy/loss",
        "policy/kl",
        "policy/entropy",
        "policy/clip_fraction",
        "policy/grad_norm",
        "critic/loss",
        "critic/explained_variance",
        "trainer/tokens_per_s",
        "trainer/padding_ratio",
        "memory/peak_gb",
    }
)
"""docs/design.md, section 6, for every training step on a CPU: all of it but gpu/utilization and eval/accuracy."""

ROW = frozenset(
    {
        "step",
        "purpose",
        "row_id",
        "group_id",
        "prompt",
        "ground_truth",
        "response",
        "tokens",
        "finish",
        "reward",
        "reward_parts",
        "status",
        "reason",
        "version_min",
        "version_max",
    }
)


@pytest.fixture(scope="module")
def ended(runs, record_testsuite_property) -> Ended:
    result: Ended = runs("default")
    record_testsuite_property("default_run_s", round(result.seconds, 1))
    print(f"python run.py: {result.seconds:.1f} s of wall time, start-up included")
    return result


@pytest.fixture(scope="module")
def run_dir(ended: Ended) -> Path:
    """outputs/<date>/<time>-<name>, the only one."""
    (day,) = (ended.folder / "outputs").iterdir()
    (folder,) = day.iterdir()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d-ppo", f"{day.name}/{folder.name}")
    return folder


def test_it_learns(ended: Ended, run_dir: Path):
    accuracy = {s["step"]: s["eval/accuracy"] for s in lines(run_dir / "metrics.jsonl") if "eval/accuracy" in s}

    assert (ended.code, ended.err, ended.left) == (0, "", {})
    assert sorted(accuracy) == [0, EVERY, STEPS]
    assert accuracy[0] <= 0.40
    assert accuracy[STEPS] >= 0.95


def test_the_run_directory_holds_what_is_promised_and_no_more(run_dir: Path):
    texts = {"plan.json", "config.yaml", "metrics.jsonl", "rollouts.jsonl", "run.log", "environment.json", "advice.txt"}

    assert {p.name for p in run_dir.iterdir()} == texts | {"final"}
    assert (run_dir / "final" / "model.safetensors").stat().st_size > 100_000


def test_advice_is_told_and_written(ended: Ended, run_dir: Path):
    advice = (run_dir / "advice.txt").read_text("utf-8").splitlines()

    assert any(line.startswith("tokenizer_cache: ") for line in advice)
    assert [line for line in advice if f"  {line}\n" not in ended.out] == []


def test_metrics_have_the_names_of_the_design(run_dir: Path):
    steps = lines(run_dir / "metrics.jsonl")

    assert [s["step"] for s in steps] == list(range(STEPS + 1))
    assert [s["policy_version"] for s in steps] == list(range(STEPS + 1))
    assert {s["step"]: sorted(TRAINING - s.keys()) for s in steps[1:] if not s.keys() >= TRAINING} == {}
    assert [(s["step"], k) for s in steps for k, v in s.items() if v is None or not math.isfinite(v)] == []


def test_metrics_agree_with_the_rows(run_dir: Path):
    rows = [r for r in lines(run_dir / "rollouts.jsonl") if r["purpose"] == "train"]

    for s in lines(run_dir / "metrics.jsonl")[1:]:
        mine = [r for r in rows if r["step"] == s["step"]]
        assert len(mine) == ROWS
        assert s["reward/mean"] == pytest.approx(np.mean([r["reward"] for r in mine]), abs=1e-12)
        assert s["rollout/length_mean"] == pytest.approx(np.mean([r["tokens"] for r in mine]), abs=1e-12)
        assert s["rollout/length_p95"] == pytest.approx(np.quantile([r["tokens"] for r in mine], 0.95), abs=1e-9)
        assert s["rollout/truncated_ratio"] == np.mean([r["finish"] == "length" for r in mine])
        groups: dict[int, set[float]] = {}
        for r in mine:
            groups.setdefault(r["group_id"], set()).add(r["reward"])
        assert s["advantage/zero_variance_groups"] == pytest.approx(
            np.mean([len(g) == 1 for g in groups.values()]), abs=1e-12
        )
        assert {r["version_min"] for r in mine} == {r["version_max"] for r in mine} == {s["step"] - 1}


def test_every_row_is_written_with_its_right_reward(run_dir: Path):
    rows = lines(run_dir / "rollouts.jsonl")

    assert len(rows) == STEPS * ROWS + 3 * HELD_OUT
    assert [r for r in rows if not r.keys() >= ROW] == []
    for r in rows:
        right = float(r["response"].strip() == "".join(sorted(r["prompt"].rstrip("="))))
        assert (r["reward"], r["reward_parts"], r["status"]) == (right, {"exact": right}, "ok"), r


def test_no_held_out_prompt_is_trained_on(run_dir: Path):
    """Neither in the files nor in what was really used."""
    rows = lines(run_dir / "rollouts.jsonl")
    used = {p: {r["prompt"] for r in rows if r["purpose"] == p} for p in ("train", "eval")}
    files = {n: {r["prompt"] for r in lines(ROOT / "data" / "digits" / f"{n}.jsonl")} for n in ("train", "heldout")}

    assert used["eval"] == files["heldout"]
    assert used["train"] <= files["train"]
    assert len(files["heldout"]) >= 200
    assert files["heldout"].isdisjoint(files["train"])


def test_the_exported_model_is_as_good_as_was_logged(run_dir: Path):
    """Loaded with from_pretrained; greedy by whole forwards without a cache; nothing of this project but the data."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(run_dir / "final", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "final")
    rows = lines(ROOT / "data" / "digits" / "heldout.jsonl")
    ids = torch.tensor(tokenizer([r["prompt"] for r in rows]).input_ids)
    start = ids.shape[1]
    with torch.no_grad():
        for _ in range(8):
            ids = torch.cat([ids, model(ids).logits[:, -1].argmax(-1, keepdim=True)], 1)
    ends = model.generation_config.eos_token_id
    ends = set(ends if isinstance(ends, list) else [ends])
    right = []
    for row, made in zip(rows, ids[:, start:].tolist(), strict=True):
        end = next((i for i, t in enumerate(made) if t in ends), len(made))
        right.append(tokenizer.decode(made[:end]).strip() == row["answer"]["sort"])

    assert np.mean(right) == pytest.approx(lines(run_dir / "metrics.jsonl")[-1]["eval/accuracy"], abs=1e-12)


def test_plan_config_and_environment_say_what_was_run(run_dir: Path):
    from omegaconf import OmegaConf

    plan = json.loads((run_dir / "plan.json").read_text())
    config = OmegaConf.load(run_dir / "config.yaml")
    machine = json.loads((run_dir / "environment.json").read_text())
    backends = {n: s["backend"] for n, s in plan["nodes"].items()}

    assert backends == {
        "loader": "mmap",
        "eval_loader": "mmap",
        "tokenizer_cache": "memory",
        "rollout": "torch",
        "reward": "rule",
        "critic": "value_model",
        "advantage": "verl",
        "trainer": "torch",
    }
    assert plan["nodes"]["rollout"]["components"] == {"model": "hf", "sampler": "torch"}
    assert (config.advantage.estimator, config.seed, config.run.steps) == ("gae", 0, STEPS)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    if head.returncode == 0:
        assert machine["git"]["commit"] == head.stdout.strip()
    assert machine["device"] == "cpu"
    assert {"torch", "transformers", "verl", "hydra-core"} <= machine["packages"].keys()


def test_the_terminal_tells_the_story(ended: Ended, run_dir: Path):
    steps, out = lines(run_dir / "metrics.jsonl"), ended.out
    before, after = (steps[i]["eval/accuracy"] for i in (0, -1))

    assert out.startswith(f"plan of 'ppo': {STEPS} steps on cpu\n\nloader\n└─ tokenizer_cache\n   └─ rollout\n")
    assert f"step {STEPS}/{STEPS}  reward {steps[-1]['reward/mean']:.3f}" in out
    assert f"held-out accuracy: {before:.3f} before, {after:.3f} after {STEPS} steps" in out
    samples = [r for r in lines(run_dir / "rollouts.jsonl") if r["purpose"] == "eval"]
    for r in (*samples[:3], *samples[-HELD_OUT : 3 - HELD_OUT]):
        assert re.search(rf"{re.escape(r['prompt'])}.*{re.escape(r['response'])}", out), r
    for node in ("rollout", "trainer", "critic", "reward"):
        assert re.search(rf"{node} +│ +[\d.]+ +│ +\d+%", out), node
    assert "tokenizer_cache/hit_ratio: " in out
    assert str(run_dir.relative_to(ended.folder)) in out
