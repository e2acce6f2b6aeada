"""Stages of a user's own, from outside: `--config-dir mine/conf plugins=[my_stages]`."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.registry import backend
from pipeline.stage import setting
from stages.model import Model
from stages.model.hf import HfModel, HfModelConfig
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


@dataclass(slots=True, kw_only=True)
class CountedModelConfig(HfModelConfig):
    notes: str = setting("", doc="file that gets a line for every text a tokenizer is given")


@backend("model", "counted")
class CountedModel(HfModel):
    """Writes down what goes into the Rust tokenizer, whoever calls it, in which process and for which folder."""

    def __init__(self, cfg: CountedModelConfig):
        super().__init__(cfg)
        self.notes = Path(cfg.notes)

    def tokenizer(self) -> Any:
        loaded: Any = super().tokenizer()
        if not isinstance(loaded._tokenizer, Noted):
            loaded._tokenizer = Noted(loaded._tokenizer, self.notes, self.path)
        return loaded


class Noted:
    """A Rust tokenizer, all of whose ways in are written down; `special`: with special tokens, as prompts are."""

    def __init__(self, inner: Any, notes: Path, folder: str):
        self.__dict__.update(inner=inner, notes=notes, folder=folder)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.inner, name, value)

    def encode(self, text: Any, *args: Any, add_special_tokens: bool = True, **given: Any) -> Any:
        self._note([text], add_special_tokens)
        return self.inner.encode(text, *args, add_special_tokens=add_special_tokens, **given)

    def encode_batch(self, texts: Any, *args: Any, add_special_tokens: bool = True, **given: Any) -> Any:
        self._note(texts, add_special_tokens)
        return self.inner.encode_batch(texts, *args, add_special_tokens=add_special_tokens, **given)

    def encode_batch_fast(self, texts: Any, *args: Any, add_special_tokens: bool = True, **given: Any) -> Any:
        self._note(texts, add_special_tokens)
        return self.inner.encode_batch_fast(texts, *args, add_special_tokens=add_special_tokens, **given)

    def _note(self, texts: Any, special: bool) -> None:
        call = {"pid": os.getpid(), "folder": self.folder, "special": special, "texts": list(texts)}
        with self.notes.open("a") as f:
            f.write(json.dumps(call) + "\n")


def note(file: Path, step: int, began: float, ended: float, rows: int) -> None:
    """CLOCK_MONOTONIC is the same in all processes of a machine."""
    with file.open("a") as f:
        f.write(f"{step} {began} {ended} {rows}\n")
