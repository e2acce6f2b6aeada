"""Role `reward`: a score for each rollout."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from pipeline.stage import Stage, setting
from stages.records import RewardBatch, RolloutBatch


@dataclass(slots=True, kw_only=True)
class RewardConfig:
    """Settings of every reward."""

    target: str = setting("", doc="if an answer is an object of several answers: which of them is asked for")


class Reward(Stage):
    """A row that cannot be scored gets status UNSCORED, a reason and NaN, never 0.

    A row whose rollout is not OK is not scored, and keeps its status and reason.

    Metrics: for training `reward/mean`, `reward/accuracy`, `reward/<part>/mean` over scored rows and
    `reward/unscored` (a count); for evaluation `eval/accuracy` over all rows, where one without a score is not
    right, `eval/reward` over scored rows, and `eval/unscored`, which counts the others.
    """

    role: ClassVar[str] = "reward"
    grain = "row"

    @abstractmethod
    def run(self, rollouts: RolloutBatch) -> RewardBatch: ...
