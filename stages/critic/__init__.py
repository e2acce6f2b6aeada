"""Role `critic`: the expected return before each token; first it runs, later in the step it learns."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from pipeline.stage import Stage
from stages.records import AdvantageBatch, RolloutBatch, ValueBatch


class Critic(Stage):
    """Metrics: `critic/loss`, `critic/explained_variance`, `critic/grad_norm`."""

    role: ClassVar[str] = "critic"

    @abstractmethod
    def run(self, rollouts: RolloutBatch) -> ValueBatch: ...

    @abstractmethod
    def learn(self, rollouts: RolloutBatch, values: ValueBatch, advantages: AdvantageBatch) -> None: ...
