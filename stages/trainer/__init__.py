"""Role `trainer`: the policy that learns; first it gives log-probs, later in the step it updates."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from pipeline.records import Snapshot
from pipeline.stage import Stage
from stages.records import AdvantageBatch, LogProbBatch, RolloutBatch


class Trainer(Stage):
    """Metrics: `policy/loss`, `policy/kl` (to the policy before the update), `policy/entropy`,
    `policy/clip_fraction`, `policy/grad_norm`, `policy/engine_drift` (mean absolute difference between the
    engine's and the trainer's log-probs), `trainer/tokens_per_s`, `trainer/padding_ratio`, `trainer/updates`,
    `rollout/staleness_max` (versions behind)."""

    role: ClassVar[str] = "trainer"

    @abstractmethod
    def run(self, rollouts: RolloutBatch) -> LogProbBatch: ...

    @abstractmethod
    def learn(self, rollouts: RolloutBatch, old: LogProbBatch, advantages: AdvantageBatch) -> None: ...

    @abstractmethod
    def publish(self) -> Snapshot: ...
