"""A small pipeline of real stages for the tests of the framework: numbers are made, doubled, scored and learned from.

Used as a user would: `--config-dir tests/pipeline/conf pipeline=toy plugins=[tests.pipeline.stages_for_tests]`.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from pipeline.context import Context
from pipeline.errors import Problem
from pipeline.records import Packed, Ragged, Rows, Snapshot, Unresolved
from pipeline.registry import backend
from pipeline.stage import Component, Stage, setting
from pipeline.tracker import Tracker

if TYPE_CHECKING:
    from pipeline.plan import Facts, Plan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Numbers(Rows):
    """`value` float64 [B]; `note`: text; `purpose`: train or eval.

    Where the run directory has a folder `notes`, another process is sent the name of a file there instead of `note`.
    """

    purpose: str
    value: np.ndarray
    note: Ragged

    def pack(self, ctx: Context) -> Packed:
        folder = ctx.run_dir / "notes"
        if not folder.is_dir():
            return self
        file = folder / f"{ctx.node}-{self.purpose}-{self.step}.npz"
        if not (folder / "full").exists():
            np.savez(file, values=self.note.values, offsets=self.note.offsets)
        return NumbersWithoutNotes(replace(self, note=Ragged.texts([""] * len(self))), file)


@dataclass(frozen=True, slots=True)
class NumbersWithoutNotes:
    """Numbers whose notes lie in a file."""

    rest: Numbers
    file: Path

    @property
    def named(self) -> int:
        return len(self.rest)

    def unpack(self, ctx: Context) -> Numbers:
        if not self.file.exists():
            raise Unresolved(str(self.file))
        kept = np.load(self.file)
        return replace(self.rest, note=Ragged(kept["values"], kept["offsets"]))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scores(Rows):
    """`score` float64 [B]."""

    score: np.ndarray


class Log:
    """What stages of this process did, in order, for tests of order and time."""

    events: ClassVar[list[tuple[str, ...]]] = []

    @classmethod
    def add(cls, *event: str) -> None:
        cls.events.append(event)


@dataclass(slots=True, kw_only=True)
class CountingSourceConfig:
    groups: int = setting(3, min=0, doc="groups a step")
    group_size: int = setting(2, min=1, doc="rows a group")
    path: str = setting("", doc="not used")
    note: str = setting("", doc="not used")
    purpose: str = setting("train", doc="train or eval")


@backend("source", "counting")
class CountingSource(Stage):
    """Rows are numbered on from call to call; `value` is drawn from the row's seed. State: the number of calls."""

    def __init__(self, cfg: CountingSourceConfig):
        self.cfg, self.calls = cfg, 0

    def facts(self) -> Mapping[str, Any]:
        return {"rows_per_step": self.cfg.groups * self.cfg.group_size}

    def run(self) -> Numbers:
        size, width = self.cfg.groups * self.cfg.group_size, self.cfg.group_size
        ids = np.arange(size) + self.calls * size
        self.calls += 1
        seeds = self.ctx.seed(self.ctx.node, self.calls, ids)
        return Numbers(
            step=self.calls,
            group_size=width,
            purpose=self.cfg.purpose,
            row_id=ids,
            group_id=ids // width,
            value=(seeds % np.uint64(1000)).astype(np.float64) / 7,
            note=Ragged.texts("n" * int(s % np.uint64(4)) for s in seeds),
        )

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]


class Scale(Component):
    """A component: what numbers are multiplied by."""

    role = "scale"
    factor: float


@dataclass(slots=True, kw_only=True)
class ExactScaleConfig:
    factor: float = setting(2.0, above=0, max=100, doc="times")


@backend("scale", "exact")
class ExactScale(Scale):
    provides = frozenset({"exactness"})

    def __init__(self, cfg: ExactScaleConfig):
        self.factor = cfg.factor


@dataclass(slots=True, kw_only=True)
class RoughScaleConfig:
    factor: float = setting(doc="times")


@backend("scale", "rough")
class RoughScale(Scale):
    needs = frozenset({"patience"})

    def __init__(self, cfg: RoughScaleConfig):
        self.factor = cfg.factor


@dataclass(slots=True, kw_only=True)
class WholeDoubleConfig:
    limit: int = setting(1000, min=1, doc="most rows a step")


@backend("double", "whole")
class WholeDouble(Stage):
    """Multiplies by the component's factor and by the weight it was last given."""

    grain = "row"
    needs = frozenset({"exactness"})

    def __init__(self, cfg: WholeDoubleConfig, scale: Scale):
        self.cfg, self.scale, self.weight = cfg, scale, 1.0

    def check(self, facts: Facts) -> Iterable[Problem]:
        if (rows := facts.values.get("rows_per_step", 0)) > self.cfg.limit:
            yield Problem(where=f"{facts.key}.limit", what=f"{self.cfg.limit} is less than the {rows} rows of a step")

    def run(self, numbers: Numbers) -> Numbers:
        self.ctx.meter.add("double/value", numbers.value)
        self.ctx.meter.add("double/note", numbers.note.lengths, "spread")
        self.ctx.meter.add("double/share", (float(np.sum(numbers.value > 50)), len(numbers)), "ratio")
        return replace(numbers, value=numbers.value * self.scale.factor * self.weight)

    def receive(self, snapshot: Snapshot) -> None:
        Log.add("receive", self.ctx.node, str(snapshot.version))
        self.weight = float(snapshot.data.view("<f8")[0])


@dataclass(slots=True, kw_only=True)
class StreamingDoubleConfig:
    limit: int = setting(1000, min=1, doc="most rows a step")
    most: int = setting(3, min=1, doc="rows of the largest part")
    delay_s: float = setting(0.0, min=0, doc="before each part but the first")
    parts_seed: int = setting(0, min=0, doc="of the order and sizes of parts")
    fail_after: int = setting(-1, doc="parts before it breaks; -1: never")
    twice: bool = setting(False, doc="give the first row twice, which is wrong")


@backend("double", "streaming")
class StreamingDouble(WholeDouble):
    """Rows finish one by one, in an order of their own."""

    provides = frozenset({"streaming"})

    def __init__(self, cfg: StreamingDoubleConfig, scale: Scale):
        super().__init__(WholeDoubleConfig(limit=cfg.limit), scale)
        self.parts = cfg

    def stream(self, numbers: Numbers) -> Iterator[Numbers]:
        rng = np.random.default_rng((self.parts.parts_seed, numbers.step))
        order = rng.permutation(len(numbers))
        made = 0
        while len(order) or not made:
            if made == self.parts.fail_after:
                raise RuntimeError("the stream broke")
            size = int(rng.integers(0, self.parts.most + 1)) if made else 1
            time.sleep(self.parts.delay_s if made else 0)
            head, order = order[:size], order[size:]
            Log.add("part", self.ctx.node, str(made))
            yield self.run(numbers.take(head))
            made += 1
        if self.parts.twice:
            yield self.run(numbers.take([0]))
        Log.add("streamed", self.ctx.node)


@dataclass(slots=True, kw_only=True)
class NegateScorerConfig:
    fail_at: int = setting(-1, doc="the row at which it breaks")
    die_at: int = setting(-1, doc="the row at which its process dies")
    delay_s: float = setting(0.0, min=0, doc="a call")


@backend("scorer", "negate")
class NegateScorer(Stage):
    """`score` is minus `value`."""

    grain = "row"

    def __init__(self, cfg: NegateScorerConfig):
        self.cfg = cfg

    def run(self, numbers: Numbers) -> Scores:
        Log.add("score", self.ctx.node, str(len(numbers)))
        time.sleep(self.cfg.delay_s)
        if self.cfg.fail_at in numbers.row_id:
            raise ValueError(f"cannot score row {self.cfg.fail_at}")
        if self.cfg.die_at in numbers.row_id:
            os.kill(os.getpid(), signal.SIGKILL)
        name = "scorer/score" if numbers.purpose == "train" else "eval/score"
        self.ctx.meter.add(name, -numbers.value)
        return Scores(step=numbers.step, row_id=numbers.row_id, group_id=numbers.group_id, score=-numbers.value)


class LosingScorer(NegateScorer):
    """Raises what a packed record raises, and leaves a byte in the run directory for each call."""

    def run(self, numbers: Numbers) -> Scores:
        with (self.ctx.run_dir / "calls").open("a") as f:
            f.write(".")
        raise Unresolved("the stage's own")


@dataclass(slots=True, kw_only=True)
class GroupJudgeConfig:
    pass


@backend("judge", "group")
class GroupJudge(Stage):
    """`score` less the mean of its group, plus the number of the value's digits: two inputs, whole groups."""

    grain = "group"

    def __init__(self, cfg: GroupJudgeConfig):
        self.cfg = cfg

    def run(self, numbers: Numbers, scores: Scores, extra: Scores | None = None) -> Scores:
        Log.add("judge", self.ctx.node, str(len(numbers)))
        if not np.array_equal(numbers.row_id, scores.row_id):
            raise ValueError("rows are not joined")
        ids, group = np.unique(scores.group_id, return_inverse=True)
        sums = np.zeros(len(ids))
        np.add.at(sums, group, scores.score)
        mean = sums / np.bincount(group, minlength=len(ids))
        return replace(scores, score=scores.score - mean[group] + len(ids) * 0 + numbers.value * 0.5)


@dataclass(slots=True, kw_only=True)
class MeanLearnerConfig:
    lr: float = setting(0.01, above=0, doc="step size")
    break_at: str = setting("", doc="open, learn, export, advice or close: where it raises")


@backend("learner", "mean")
class MeanLearner(Stage):
    """Keeps one weight, and moves it by the mean score. State: weight and version."""

    def __init__(self, cfg: MeanLearnerConfig):
        self.cfg, self.weight, self.version, self.closed = cfg, 1.0, 0, 0

    def _perhaps_break(self, where: str) -> None:
        if self.cfg.break_at == where:
            raise RuntimeError(f"broken in {where}")

    def open(self, ctx: Context) -> None:
        super().open(ctx)
        Log.add("open", ctx.node)
        self._perhaps_break("open")

    def close(self) -> None:
        Log.add("close", "learner")
        self._perhaps_break("close")

    def run(self, numbers: Numbers) -> Scores:
        score = numbers.value * self.weight
        return Scores(step=numbers.step, row_id=numbers.row_id, group_id=numbers.group_id, score=score)

    def learn(self, numbers: Numbers, judged: Scores) -> None:
        Log.add("learn", self.ctx.node)
        self._perhaps_break("learn")
        self.weight += self.cfg.lr * float(np.tanh(judged.score).sum()) / max(len(judged), 1)
        self.version += 1
        self.ctx.meter.add("learner/weight", self.weight)

    def publish(self) -> Snapshot:
        Log.add("publish", self.ctx.node)
        data = np.array([self.weight], "<f8").view(np.uint8)
        return Snapshot(version=self.version, manifest=(("weight", "<f8", (1,), 0, 8),), data=data)

    def export(self, folder: str) -> None:
        self._perhaps_break("export")
        Path(folder).mkdir()
        Path(folder, "weight.txt").write_text(repr(self.weight))

    def advice(self) -> list[str]:
        self._perhaps_break("advice")
        if self.version < 3:
            return []
        return [f"lr {self.cfg.lr:g} was used {self.version} times", "naïve is fine"]

    def state_dict(self) -> dict[str, Any]:
        return {"weight": self.weight, "version": self.version}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weight, self.version = state["weight"], state["version"]


@dataclass(slots=True, kw_only=True)
class RecordingTrackerConfig:
    break_at_start: bool = setting(False, doc="raise in start")


@backend("tracker", "recording")
class RecordingTracker(Tracker):
    """Keeps what it is told."""

    def __init__(self, cfg: RecordingTrackerConfig):
        self.cfg = cfg
        self.calls: list[tuple[str, Any]] = []

    def start(self, plan: Plan, run_dir: Path) -> None:
        self.calls.append(("start", run_dir))
        if self.cfg.break_at_start:
            raise RuntimeError("no screen")

    def evaluated(self, step: int, records: Mapping[str, Any], metrics: Mapping[str, Any]) -> None:
        self.calls.append(("evaluated", (step, dict(records), dict(metrics))))

    def stepped(self, step: int, records: Mapping[str, Any], metrics: Mapping[str, Any]) -> None:
        self.calls.append(("stepped", (step, dict(records), dict(metrics))))

    def finish(self, advice: Sequence[str]) -> None:
        self.calls.append(("finish", list(advice)))

    def close(self) -> None:
        self.calls.append(("close", None))
