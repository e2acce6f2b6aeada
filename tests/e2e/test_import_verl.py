"""A verl user's script becomes a recipe, and the recipe trains: on the tiny model, and Parquet in verl's columns."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.commands import Ended, lines, run, run_each
from tests.importers.verl_files import MODEL, write_data

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SCRIPT = r"""
export DATA={data}
touch "$DATA/was-run"
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files=$DATA/train.parquet data.val_files=$DATA/test.parquet \
    data.train_batch_size=8 data.max_prompt_length=32 data.max_response_length=$((2 * 4)) \
    data.filter_overlong_prompts=True \
    actor_rollout_ref.model.path={model} \
    actor_rollout_ref.actor.ppo_mini_batch_size=4 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 \
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.optim.lr=5e-4 \
    actor_rollout_ref.actor.fsdp_config.dtype=float32 actor_rollout_ref.rollout.dtype=float32 \
    actor_rollout_ref.rollout.name=hf actor_rollout_ref.rollout.n=4 \
    reward.custom_reward_function.path=$DATA/reward.py reward.custom_reward_function.name=judge \
    trainer.logger=['console','wandb'] trainer.experiment_name=sums trainer.total_epochs=1 \
    trainer.total_training_steps=2
"""


def imported(folder: Path) -> Ended:
    data = write_data(folder / "data")
    (folder / "start.sh").write_text(SCRIPT.format(data=data, model=MODEL))
    use = ["--config-dir", "imported", "experiment=start", f"hydra.run.dir={folder}/run"]
    return run_each(folder, ["import.verl=start.sh"], use)


def refused(folder: Path) -> Ended:
    (folder / "start.sh").write_text("python3 -m verl.trainer.main_ppo\n")
    return run(folder, "import.vrl=start.sh", "-m")


RUNS = {"imported": imported, "refused": refused}


def test_a_script_becomes_a_recipe_and_is_not_run(runs) -> None:
    ended = runs("imported")

    assert (ended.code, ended.left) == (0, {}), ended.err[-3000:]
    assert "no equal here (2):" in ended.out
    assert "no reference policy yet, so the loss has no KL term" in ended.out
    assert "imported/experiment/start.yaml is written. It plans without a problem." in ended.out
    assert "python run.py --config-dir imported experiment=start" in ended.out
    assert not (ended.folder / "data" / "was-run").exists()


def test_the_recipe_trains_by_what_the_script_says(runs) -> None:
    ended = runs("imported")
    steps = lines(ended.folder / "run" / "metrics.jsonl")
    rows = lines(ended.folder / "run" / "rollouts.jsonl")
    plan = json.loads((ended.folder / "run" / "plan.json").read_text())

    assert [s["step"] for s in steps] == [0, 1, 2]
    assert plan["nodes"]["rollout"]["backend"] == "hf"
    assert len(rows) == 6 + 2 * 8 * 4 + 6
    assert {r["status"] for r in rows} == {"ok"}
    for r in rows:
        assert r["reward"] == float(r["response"].strip() == r["ground_truth"])
    assert all(np.isfinite(s["policy/loss"]) and s["policy/grad_norm"] > 0 for s in steps[1:])


def test_what_cannot_be_imported_is_told_and_nothing_written(runs) -> None:
    ended = runs("refused")

    assert ended.code == 2
    assert "Nothing can be imported: 2 problems." in ended.err
    assert "did you mean 'verl'?" in ended.err
    assert "Traceback" not in ended.err
    assert not (ended.folder / "imported").exists()
