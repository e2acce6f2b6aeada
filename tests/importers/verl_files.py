"""Files of verl users, made up for the tests: scripts that start a run, and the data and model that they name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.tiny_models import TOKENIZER

MODEL = TOKENIZER.parent / "base"

GRPO = r"""#!/usr/bin/env bash
# GRPO on grade-school sums: no critic, a KL term in the loss.
set -x
export HYDRA_FULL_ERROR=1
DATA=${DATA_DIR:-$HOME/data}
MODEL=${MODEL_PATH:-Qwen/Qwen2.5-0.5B-Instruct}
prompt=32   # tokens
response=$((prompt / 4))

PYTHONUNBUFFERED=1 python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="$DATA/train.parquet" data.val_files="$DATA/test.parquet" \
    data.train_batch_size=16 \
    data.max_prompt_length=$prompt \
    data.max_response_length=$response \
    data.filter_overlong_prompts=True \
    data.truncation='error' \
    actor_rollout_ref.model.path=$MODEL \
    actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.actor.optim.lr=3e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=8 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    actor_rollout_ref.actor.entropy_coeff=0 \
    actor_rollout_ref.actor.fsdp_config.param_offload=False \
    actor_rollout_ref.rollout.name=hf \
    actor_rollout_ref.rollout.n=5 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    actor_rollout_ref.ref.fsdp_config.param_offload=True \
    algorithm.use_kl_in_reward=False \
    trainer.critic_warmup=0 \
    trainer.logger='["console","wandb"]' \
    trainer.project_name='sums' trainer.experiment_name='qwen 0.5b: grpo' \
    trainer.n_gpus_per_node=8 trainer.nnodes=1 \
    trainer.save_freq=20 trainer.test_freq=5 trainer.total_epochs=3 "$@" 2>&1 | tee run.log
"""

PPO = r"""
files="['$DATA_DIR/train.parquet','$DATA_DIR/more.parquet']"
python -m verl.trainer.main_ppo algorithm.adv_estimator=gae algorithm.gamma=0.99 algorithm.lam=0.95 \
  data.train_files="$files" data.val_files="$DATA_DIR/test.parquet" data.train_batch_size=8 data.seed=7 \
  data.max_prompt_length=32 data.max_response_length=16 data.shuffle=False \
  actor_rollout_ref.model.path="$MODEL_PATH" critic.model.path="$MODEL_PATH" \
  actor_rollout_ref.actor.ppo_mini_batch_size=8 actor_rollout_ref.actor.ppo_epochs=2 \
  actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=2048 \
  actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1 actor_rollout_ref.actor.grad_clip=0.5 \
  actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.temperature=0.8 actor_rollout_ref.rollout.top_k=40 \
  actor_rollout_ref.rollout.dtype=float32 actor_rollout_ref.actor.fsdp_config.dtype=float32 \
  critic.optim.lr=2e-5 critic.ppo_micro_batch_size_per_gpu=2 critic.cliprange_value=0.3 \
  algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.01 \
  custom_reward_function.path="$DATA_DIR/reward.py" custom_reward_function.name=judge \
  +custom_reward_function.reward_kwargs.bonus=2 \
  trainer.total_training_steps=4 trainer.logger=console trainer.val_before_train=False
"""

DAPO = r"""
low=0.2
high=0.28
COMMON=(
    data.train_files=$DATA_DIR/train.parquet
    data.val_files=$DATA_DIR/test.parquet
    data.train_batch_size=8 data.gen_batch_size=24   # oversampled
    data.max_prompt_length=32 data.max_response_length=16
)
CLIP=(actor_rollout_ref.actor.clip_ratio_low=${low} actor_rollout_ref.actor.clip_ratio_high=${high})
CLIP+=(actor_rollout_ref.actor.clip_ratio_c=10.0)
python3 -m verl.trainer.main_ppo "${COMMON[@]}" "${CLIP[@]}" \
    algorithm.adv_estimator=grpo algorithm.norm_adv_by_std_in_grpo=False \
    algorithm.filter_groups.enable=True algorithm.filter_groups.metric=acc \
    actor_rollout_ref.model.path=$MODEL_PATH actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm \
    actor_rollout_ref.rollout.name=sglang actor_rollout_ref.rollout.n=4 \
    actor_rollout_ref.rollout.val_kwargs.temperature=1.0 actor_rollout_ref.rollout.val_kwargs.top_p=0.7 \
    actor_rollout_ref.rollout.val_kwargs.n=2 actor_rollout_ref.rollout.val_kwargs.do_sample=True \
    reward_model.reward_manager=dapo +reward_model.reward_kwargs.overlong_buffer_cfg.enable=True \
    trainer.total_epochs=1 trainer.total_training_steps=2
"""

REMOTE = r"""
python3 -m verl.trainer.main_ppo --config-name=ppo_trainer \
    algorithm.adv_estimator=rloo data.train_files=$DATA_DIR/train.parquet data.val_files=$DATA_DIR/test.parquet \
    data.max_prompt_length=32 data.max_response_length=8 data.train_batch_size=8 \
    actor_rollout_ref.model.path=$MODEL_PATH actor_rollout_ref.rollout.name=hf actor_rollout_ref.rollout.n=2 \
    actor_rollout_ref.actor.policy_loss.loss_mode=gspo actor_rollout_ref.actor.ppo_mini_batch_size=8 \
    reward.custom_reward_function.path=$DATA_DIR/reward.py reward.custom_reward_function.name=judge \
    +reward.custom_reward_function.reward_kwargs.url=http://127.0.0.1:9/score \
    reward.num_workers=3 reward.reward_manager.name=limited trainer.total_training_steps=2
"""

SCRIPTS = {"grpo": GRPO, "ppo": PPO, "dapo": DAPO, "remote": REMOTE}

REWARD = """
def judge(data_source, solution_str, ground_truth, extra_info, **more):
    return float(solution_str.strip() == ground_truth)
"""


def row(i: int) -> dict[str, Any]:
    """In verl's columns; the prompt is one that the checkout's tiny model reads, the data source one of verl's own."""
    digits = f"{7919 * (i + 1) % 10000:04d}"
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{digits}="}],
        "ability": "sort",
        "reward_model": {"style": "rule", "ground_truth": "".join(sorted(digits))},
        "extra_info": {"index": i, "split": "train"},
    }


def write_data(folder: Path) -> Path:
    """train.parquet (40 rows), more.parquet (10), test.parquet (6) and reward.py."""
    import pyarrow as pa
    from pyarrow import parquet

    folder.mkdir(parents=True, exist_ok=True)
    for name, first, count in (("train", 0, 40), ("more", 40, 10), ("test", 50, 6)):
        parquet.write_table(pa.Table.from_pylist([row(first + i) for i in range(count)]), folder / f"{name}.parquet")
    (folder / "reward.py").write_text(REWARD)
    return folder
