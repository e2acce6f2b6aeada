"""Role `rollout`: responses to prompts by the policy, as sampled."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from pipeline.records import Snapshot
from pipeline.stage import Stage, setting
from stages.records import RolloutBatch, TokenBatch


@dataclass(slots=True, kw_only=True)
class RolloutConfig:
    """Sampling parameters of every rollout; a batch may bring others (its `sampling`)."""

    n: int = setting(8, min=1, doc="samples a prompt")
    temperature: float = setting(1.0, min=0, doc="0 is greedy")
    top_k: int = setting(0, min=0, doc="keep the k likeliest tokens; 0: no filter")
    top_p: float = setting(1.0, above=0, max=1, doc="keep the smallest set of tokens with this mass; 1: no filter")
    min_p: float = setting(0.0, min=0, max=1, doc="drop tokens below this share of the likeliest; 0: no filter")
    max_new_tokens: int = setting(64, min=1, doc="tokens a response may have")


class Rollout(Stage):
    """Row j of prompt g has `row_id == g * n + j`. With a `seeded_rows` sampler its tokens depend on the weights,
    the prompt and `ctx.seed(f"{node}/{purpose}", step, row_id)` alone, not on the batch it is in.

    `receive` returns when every later row is made with the new weights; the version goes into the rows.
    Metrics, for `purpose == "train"` only: `rollout/length` (spread), `rollout/truncated_ratio`,
    `rollout/tokens_per_s`, `rollout/failed`.
    """

    role: ClassVar[str] = "rollout"
    grain = "row"

    @abstractmethod
    def run(self, tokens: TokenBatch) -> RolloutBatch: ...

    @abstractmethod
    def receive(self, snapshot: Snapshot) -> None: ...
