"""From rollouts to what is scored, and from outcomes to a RewardBatch and its metrics: the same for every reward."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.context import Context
from pipeline.metrics import Meter
from pipeline.records import Ragged
from pipeline.stage import setting
from stages.records import Purpose, RewardBatch, RolloutBatch, Status
from stages.reward import Reward, RewardConfig
from stages.reward.workers import Outcome, Sample, Scorer, ScorerPool

REASON_LENGTH = 500
"""Characters of a reason that are kept: an exception's message may hold a whole response."""

SURE_PROMPTS = 4
"""So many prompts without the answer that is asked for, and none with it, are an error of the configuration."""

SURE_ROWS = 64
"""So many rows that could not be scored, from the first one on, are an error of the reward."""


@dataclass(slots=True, kw_only=True)
class WorkerRewardConfig(RewardConfig):
    """Settings of rewards that score rows in worker processes."""

    timeout_s: float = setting(10.0, above=0, doc="seconds one row may take before it is unscored")
    workers: int = setting(1, min=1, doc="worker processes that score rows")


class WorkerReward(Reward):
    """A reward whose rows are scored by a scorer in worker processes.

    From step to step it keeps only whether anything was ever right with its settings, to complain early if not.
    """

    def __init__(self, cfg: WorkerRewardConfig):
        self.cfg = cfg
        self._pool: ScorerPool | None = None
        self._answers = Answers(cfg.target)
        self._outcomes = Outcomes()

    @abstractmethod
    def scorer(self) -> tuple[Callable[..., Scorer], tuple[Any, ...]]:
        """What builds the scorer in the worker, and its arguments; both must pickle."""

    def open(self, ctx: Context) -> None:
        super().open(ctx)
        build, args = self.scorer()
        self._pool = ScorerPool(
            build,
            args,
            name=f"{ctx.node} ({self.backend})",
            workers=self.cfg.workers,
            timeout_s=self.cfg.timeout_s,
            log_file=ctx.run_dir / "run.log",
        )
        self._pool.open()

    def close(self) -> None:
        if self._pool:
            self._pool.close()

    def worker_pids(self) -> list[int]:
        return self._pool.pids() if self._pool else []

    def run(self, rollouts: RolloutBatch) -> RewardBatch:
        """ValueError if no row at all has the answer that `target` asks for."""
        if self._pool is None:
            raise RuntimeError("open() comes first")
        outcomes: list[Outcome | None] = [None] * len(rollouts)
        to_score: list[tuple[int, Sample]] = []
        for i in np.flatnonzero(rollouts.status == Status.OK).tolist():
            answer, lack = self._answers.of(rollouts.ground_truth.json(i), int(rollouts.group_id[i]))
            if lack:
                outcomes[i] = Outcome(reason=lack)
            else:
                to_score.append((i, _sample(rollouts, i, answer)))
        self._answers.complain_if_never_found()
        for (i, _), outcome in zip(to_score, self._pool.score([s for _, s in to_score]), strict=True):
            outcomes[i] = outcome
        rewards = assemble(rollouts, outcomes)
        self._outcomes.complain_if_never_scored(outcomes)
        measure(self.ctx.meter, rewards, rollouts.purpose)
        return rewards


class Outcomes:
    """Counts rows with and without a score. A row without one is data. If no row ever had one, the reward is broken,
    and nothing would be learned."""

    def __init__(self) -> None:
        self._scored = self._unscored = 0

    def complain_if_never_scored(self, outcomes: Sequence[Outcome | None]) -> None:
        """`outcomes` are those of one more call."""
        reasons = [o.reason for o in outcomes if o and o.reason]
        self._scored += sum(1 for o in outcomes if o and not o.reason)
        self._unscored += len(reasons)
        if reasons and not self._scored and self._unscored >= SURE_ROWS:
            raise ValueError(f"none of the first {self._unscored} rows could be scored; the last reason: {reasons[-1]}")


class Answers:
    """Picks the answer that is asked for out of a row's ground truth.

    One row without it is a flaw of the data: the row is unscored. If nothing ever has it, the setting is wrong.
    """

    def __init__(self, target: str):
        self._target = target
        self._found = False
        self._lacking: set[int] = set()
        self._last = ""

    def of(self, truth: Any, group_id: int) -> tuple[Any, str]:
        """The answer and '', or None and why there is none."""
        if not self._target:
            return truth, ""
        if isinstance(truth, dict) and self._target in truth:
            self._found = True
            return truth[self._target], ""
        self._lacking.add(group_id)
        has = f"an object with {', '.join(map(str, truth))}" if isinstance(truth, dict) else f"a {_json_type(truth)}"
        self._last = f"no answer '{self._target}': the ground truth is {has}"
        return None, self._last

    def complain_if_never_found(self) -> None:
        if not self._found and len(self._lacking) >= SURE_PROMPTS:
            raise ValueError(
                f"reward.target={self._target}: none of the first {len(self._lacking)} prompts has such an answer. "
                f"{self._last}. Set reward.target to one of the keys, or to '' where there is only one answer."
            )


def _json_type(value: Any) -> str:
    names = {str: "text", bool: "boolean", int: "number", float: "number", list: "list", type(None): "null"}
    return names.get(type(value), type(value).__name__)


def _sample(rollouts: RolloutBatch, i: int, answer: Any) -> Sample:
    return Sample(
        row_id=int(rollouts.row_id[i]),
        response=rollouts.response.text(i),
        tokens=int(rollouts.response_ids.lengths[i]),
        answer=answer,
        data_source=rollouts.data_source.text(i),
        extra=rollouts.extra.json(i) or {},
    )


def assemble(rollouts: RolloutBatch, outcomes: Sequence[Outcome | None]) -> RewardBatch:
    """`outcomes`: one a row, None where the rollout itself is not OK; such a row keeps its status and reason.

    Part names are sorted, so that the parts of a batch, put together, name what the whole would.
    """
    names = tuple(sorted({n for o in outcomes if o for n in o.parts}))
    status, reasons = rollouts.status.copy(), [rollouts.reason.text(i) for i in range(len(rollouts))]
    numbers = np.full((len(rollouts), 2 + len(names)), np.nan, np.float32)
    for i, o in enumerate(outcomes):
        if o is None:
            continue
        if o.reason:
            status[i], reasons[i] = Status.UNSCORED, o.reason[:REASON_LENGTH].encode(errors="replace").decode()
            continue
        numbers[i] = (o.score, o.accuracy, *(o.parts.get(n, np.nan) for n in names))
    return RewardBatch(
        step=rollouts.step,
        group_size=rollouts.group_size,
        row_id=rollouts.row_id,
        group_id=rollouts.group_id,
        score=numbers[:, 0].copy(),
        accuracy=numbers[:, 1].copy(),
        part_names=names,
        parts=numbers[:, 2:].copy(),
        status=status,
        reason=Ragged.texts(reasons),
    )


def measure(meter: Meter, rewards: RewardBatch, purpose: Purpose) -> None:
    """The metrics of the role. In an evaluation a row without a score, whatever the cause, is not right."""
    scored = rewards.status == Status.OK
    if purpose == "eval":
        meter.add("eval/accuracy", np.where(scored, rewards.accuracy, 0.0))
        meter.add("eval/reward", rewards.score[scored])
        meter.add("eval/unscored", np.count_nonzero(~scored), "sum")
        return
    meter.add("reward/mean", rewards.score[scored])
    meter.add("reward/accuracy", rewards.accuracy[scored])
    meter.add("reward/unscored", np.count_nonzero(rewards.status == Status.UNSCORED), "sum")
    for name, column in zip(rewards.part_names, rewards.parts.T, strict=True):
        meter.add(f"reward/{name}/mean", column[~np.isnan(column)])
