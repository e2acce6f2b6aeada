"""Stages of a user's own, from outside: `--config-dir mine/conf plugins=[my_stages]`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeline.registry import backend
from pipeline.stage import setting
from stages.model import Model
from stages.records import RewardBatch, RolloutBatch, TokenBatch
from stages.reward.rule import RuleReward, RuleRewardConfig
from stages.rollout.vllm_async import VllmAsyncRollout, VllmAsyncRolloutConfig
from stages.sampler import Sampler


@dataclass(slots=True, kw_only=True)
class BreakingRewardConfig(RuleRewardConfig):
    at_step: int = setting(2, min=1, doc="the training step in which it raises")


@backend("reward", "breaking")
class BreakingReward(RuleReward):
    """Scores by rules until a step in which it raises."""

    def __init__(self, cfg: BreakingRewardConfig):
        super().__init__(cfg)
        self.breaking = cfg

    def run(self, rollouts: RolloutBatch) -> RewardBatch:
        if rollouts.purpose == "train" and rollouts.step == self.breaking.at_step:
            raise ArithmeticError("the judge has left the room")
        return super().run(rollouts)


@dataclass(slots=True, kw_only=True)
class TimedRewardConfig(RuleRewardConfig):
    """Nothing more to set."""


@backend("reward", "timed")
class TimedReward(RuleReward):
    """Writes when it began and ended to score how many rows: `scored.txt` in the run directory."""

    def __init__(self, cfg: TimedRewardConfig):
        super().__init__(cfg)

    def run(self, rollouts: RolloutBatch) -> RewardBatch:
        began = time.monotonic()
        rewards = super().run(rollouts)
        if rollouts.purpose == "train":
            note(self.ctx.run_dir / "scored.txt", rollouts.step, began, time.monotonic(), len(rollouts))
        return rewards


@dataclass(slots=True, kw_only=True)
class TimedRolloutConfig(VllmAsyncRolloutConfig):
    """Nothing more to set."""


@backend("rollout", "timed")
class TimedRollout(VllmAsyncRollout):
    """vLLM; writes when how many responses were finished: `finished.txt` in the run directory."""

    def __init__(self, cfg: TimedRolloutConfig, model: Model, sampler: Sampler):
        super().__init__(cfg, model, sampler)

    def stream(self, tokens: TokenBatch) -> Iterator[RolloutBatch]:
        for part in super().stream(tokens):
            if tokens.purpose == "train":
                now = time.monotonic()
                note(self.ctx.run_dir / "finished.txt", tokens.step, now, now, len(part))
            yield part


def note(file: Path, step: int, began: float, ended: float, rows: int) -> None:
    """CLOCK_MONOTONIC is the same in all processes of a machine."""
    with file.open("a") as f:
        f.write(f"{step} {began} {ended} {rows}\n")
