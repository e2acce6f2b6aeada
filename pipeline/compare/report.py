"""What a comparison has found, read from the directories of its runs; and compare.json, which holds all of it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeline import quoting, redact
from pipeline.compare import measure
from pipeline.compare.busy import BUSY
from pipeline.compare.cells import SHARED_STEP, Cell, axes
from pipeline.compare.drift import Drift, drift, rollouts
from pipeline.compare.measure import OTHERS, SECONDS, Against, Summary, against, in_order, measure_of, summary
from pipeline.config import CompareSettings
from pipeline.disk import write_whole
from pipeline.metrics import finite, steps_of
from pipeline.sweep.jobs import LOG, RECORD

SPREAD = "quartiles over the counted steps of all repeats (of a measure with one value a run: over the repeats)"


@dataclass(frozen=True, slots=True)
class Run:
    """A run of a cell as its directory shows it. `record`: job.json; `metrics`: of every step. `others`: how many CPUs
    other programs took meanwhile."""

    repeat: int
    folder: Path
    record: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    others: float

    @property
    def state(self) -> str:
        return self.record["state"]

    @property
    def log(self) -> Path:
        return self.folder / LOG

    @property
    def failure(self) -> str:
        """How it ended and what it said last."""
        code = self.record["exit"]
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit status {code}"
        return f"ended {how}: {_reason(self.log.read_text('utf-8', 'replace'))}"

    def values(self, warmup: int) -> dict[str, list[float]]:
        of_process = {SECONDS: [self.record["seconds"]], OTHERS: [self.others]}
        return measure.values(self.metrics, warmup) | of_process


def read(repeat: int, folder: Path, others: float) -> Run | None:
    """None if the run was not started."""
    try:
        record = json.loads((folder / RECORD).read_text("utf-8"))
    except FileNotFoundError:
        return None
    return Run(repeat, folder, record, steps_of(folder), others)


def _reason(log: str) -> str:
    """The line that names the stage, or the last one that is not about where to look."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    told = [line for line in lines if line.startswith("stage '")] or [
        line for line in lines if not line.startswith(("The traceback is in", "No stage was started"))
    ]
    return told[-1] if told else "it printed nothing"


@dataclass
class Outcome:
    """A cell with its runs, of which those that ended well count. `arguments` of run.py repeat one."""

    cell: Cell
    arguments: tuple[str, ...]
    runs: list[Run]
    warmup: int

    @cached_property
    def well(self) -> list[Run]:
        return [run for run in self.runs if run.state == "done"]

    @property
    def failed(self) -> list[Run]:
        return [run for run in self.runs if run.state == "failed"]

    @property
    def state(self) -> str:
        """failed if one run is; not started if none was."""
        states = [run.state for run in self.runs]
        return next((s for s in ("failed", "stopped", "done") if s in states), "not started")

    @cached_property
    def values(self) -> dict[str, list[list[float]]]:
        """By metric: of each run that ended well, its values."""
        of_runs = [run.values(self.warmup) for run in self.well]
        names = in_order([name for values in of_runs for name in values])
        return {name: [values[name] for values in of_runs if values.get(name)] for name in names}

    @cached_property
    def summaries(self) -> dict[str, Summary]:
        pooled = {name: [v for values in of_runs for v in values] for name, of_runs in self.values.items()}
        return {name: summary(values) for name, values in pooled.items() if values}

    @property
    def command(self) -> str:
        return " ".join(["python", "run.py", *map(quoting.shell, self.arguments)])


@dataclass
class Report:
    """A comparison. The first outcome is the baseline; `order`: the runs as they were started."""

    settings: CompareSettings
    steps: int
    outcomes: list[Outcome]
    order: list[str]
    environment: Mapping[str, Any]
    stopped: bool = False
    _drifts: dict[int, Drift | None] = field(default_factory=dict)

    @property
    def baseline(self) -> Outcome:
        return self.outcomes[0]

    @property
    def well(self) -> bool:
        return all(outcome.state == "done" for outcome in self.outcomes)

    def metrics(self) -> list[str]:
        """What is measured in any of the cells, in the order it is shown in."""
        return in_order([name for outcome in self.outcomes for name in outcome.summaries])

    def against(self, metric: str, outcome: Outcome) -> Against | None:
        """None for the baseline itself, and where one of the two has no value."""
        base, other, of = self.baseline.summaries.get(metric), outcome.summaries.get(metric), measure_of(metric)
        if outcome is self.baseline or not (base and other and of):
            return None
        return against(of[0], base, other)

    def drift(self, outcome: Outcome) -> Drift | None:
        """Of the cell's first run against the baseline's; of the baseline, its last run against its first."""
        number = outcome.cell.number
        if number not in self._drifts:
            runs = outcome.well[-1:] if outcome is self.baseline else outcome.well[:1]
            self._drifts[number] = self._drift(self.baseline.well[:1], runs)
        return self._drifts[number]

    def _drift(self, base: Sequence[Run], other: Sequence[Run]) -> Drift | None:
        if not base or not other or base[0] is other[0]:
            return None
        ours, theirs = rollouts(base[0].folder, SHARED_STEP), rollouts(other[0].folder, SHARED_STEP)
        return drift(ours, theirs) if ours and theirs else None

    @property
    def busy(self) -> float | None:
        """The most CPUs that other programs took during a run; None if that is little."""
        most = max((run.others for outcome in self.outcomes for run in outcome.runs), default=0.0)
        return most if most > BUSY * (os.cpu_count() or 1) else None

    def axes(self) -> list[dict[str, Any]]:
        return [{"axis": a.axis, "options": list(a.options)} for a in axes(self.settings).values()]

    def plain(self) -> dict[str, Any]:
        """The content of compare.json."""
        settings = {name: getattr(self.settings, name) for name in ("repeats", "warmup", "whole_runs")}
        return finite(
            {
                "axes": self.axes(),
                **settings,
                "steps": self.steps,
                "baseline": self.baseline.cell.name,
                "spread": SPREAD,
                "drift_step": SHARED_STEP,
                "stopped": self.stopped,
                "order": self.order,
                "cells": [self._cell(outcome) for outcome in self.outcomes],
                "environment": dict(self.environment),
            }
        )

    def _cell(self, outcome: Outcome) -> dict[str, Any]:
        found = self.drift(outcome)
        return {
            "name": outcome.cell.name,
            "choices": dict(outcome.cell.choices),
            "state": outcome.state,
            "command": outcome.command,
            "measures": {name: self._measure(name, outcome) for name in outcome.summaries},
            "drift": found and asdict(found),
            "failures": [
                {"repeat": run.repeat, "reason": run.failure, "log": f"{run.folder.name}/{LOG}"}
                for run in outcome.failed
            ],
            "runs": [
                {"repeat": run.repeat, "directory": run.folder.name}
                | {name: run.record.get(name) for name in ("state", "exit", "seconds", "started")}
                | {"others": run.others, "metrics": list(run.metrics)}
                for run in outcome.runs
            ],
        }

    def _measure(self, name: str, outcome: Outcome) -> dict[str, Any]:
        of, change = measure_of(name), self.against(name, outcome)
        assert of is not None
        facts = {"title": of[1], "unit": of[0].unit, "better": of[0].better, "by": of[0].by}
        compared = {"change": change and change.change, "verdict": change and change.verdict}
        return facts | asdict(outcome.summaries[name]) | compared | {"values": outcome.values[name]}


def write(report: Report, folder: Path) -> None:
    write_whole(folder / "compare.json", json.dumps(redact.structure(report.plain()), indent=1) + "\n")
