"""Role `advantage`: how much better each token was than expected."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from pipeline.stage import Stage
from stages.records import AdvantageBatch, LogProbBatch, RewardBatch, RolloutBatch, ValueBatch


class Advantage(Stage):
    """The score of a row lies on its last learnable token. Rows that are not OK are left out of every statistic.
    Metrics: `advantage/mean`, `advantage/std`, `advantage/zero_variance_groups` (share of groups), and
    `advantage/lone_rows`: rows left out because no other row of their group has a score to compare with."""

    role: ClassVar[str] = "advantage"

    @abstractmethod
    def run(
        self,
        rollouts: RolloutBatch,
        rewards: RewardBatch,
        old: LogProbBatch | None = None,
        values: ValueBatch | None = None,
    ) -> AdvantageBatch: ...
