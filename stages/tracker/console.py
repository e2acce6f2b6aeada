"""The terminal: the plan, one progress bar, and at the end what was learned and where the time went."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.metrics import JsonLines
from pipeline.plan import Plan
from pipeline.records import Record
from pipeline.registry import backend
from pipeline.show import render
from pipeline.stage import setting
from pipeline.tracker import Tracker
from stages.records import RolloutBatch
from stages.tracker import of_type, rollout_rows

if TYPE_CHECKING:
    from rich.table import Table

# Metrics that sum up a step, as the progress bar shows them: heading, metric, format.
SHOWN = (("reward", "reward/mean", ".3f"), ("kl", "policy/kl", ".4f"), ("tok/s", "rollout/tokens_per_s", ",.0f"))


@dataclass(slots=True, kw_only=True)
class ConsoleTrackerConfig:
    """What the terminal shows."""

    samples: int = setting(3, min=0, doc="responses shown before and after training")
    rollouts: bool = setting(True, doc="write every rollout to rollouts.jsonl")


@backend("tracker", "console")
class ConsoleTracker(Tracker):
    """Also writes `rollouts.jsonl`. Where standard output is no terminal, a line a step replaces the bar."""

    def __init__(self, cfg: ConsoleTrackerConfig):
        self.cfg = cfg
        self._rows: JsonLines | None = None
        self._bar: Any = None

    def start(self, plan: Plan, run_dir: Path) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._run_dir, self._total, self._plan = run_dir, plan.root.run.steps, plan
        self._seconds: dict[str, float] = defaultdict(float)
        self._ratios: dict[str, list[float]] = defaultdict(list)
        self._evals: list[tuple[int, str]] = []
        self._samples: list[list[tuple[str, str]]] = []
        self._unscored = self._failed = 0.0
        self._console = Console(highlight=False, soft_wrap=True)
        if self.cfg.rollouts:
            self._rows = JsonLines(run_dir / "rollouts.jsonl")
        print(render(plan) + "\n", flush=True)
        if sys.stdout.isatty():
            columns = [
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.fields[shown]}"),
                TimeRemainingColumn(),
            ]
            self._bar = Progress(*columns, console=self._console)
            self._task = self._bar.add_task("", total=self._total, shown="")
            self._bar.start()

    def evaluated(self, step: int, records: Mapping[str, Record], metrics: Mapping[str, Any]) -> None:
        self._write(step, records)
        rollouts = of_type(records, RolloutBatch)
        if "eval/accuracy" in metrics:
            accuracy = f"{metrics['eval/accuracy']:.3f}"
            if unscored := metrics.get("eval/unscored", 0):  # they count as wrong, which is not all that is to be said
                of_all = f" of {len(rollouts)}" if rollouts is not None else ""
                accuracy += f" ({unscored:.0f}{of_all} rows were not scored)"
            self._evals.append((step, accuracy))
            if not self._bar:
                print(f"step {step}: held-out accuracy {accuracy}", flush=True)
        if rollouts is not None:
            shown = range(min(self.cfg.samples, len(rollouts)))
            self._samples.append([(_last(rollouts.prompt.json(i)), rollouts.response.text(i)) for i in shown])

    def stepped(self, step: int, records: Mapping[str, Record], metrics: Mapping[str, Any]) -> None:
        self._write(step, records)
        self._unscored += metrics.get("reward/unscored", 0)
        self._failed += metrics.get("rollout/failed", 0)
        for name, value in metrics.items():
            if name.startswith("time/"):
                self._seconds[name[5:-2]] += value
            elif name.endswith("hit_ratio"):
                self._ratios[name].append(value)
        shown = "  ".join(f"{head} {metrics[name]:{form}}" for head, name, form in SHOWN if name in metrics)
        if self._bar:
            self._bar.update(self._task, completed=step, shown=shown)
        else:
            print(f"step {step}/{self._total}  {shown}", flush=True)

    def finish(self, advice: Sequence[str]) -> None:
        self._stop_bar()
        if self._evals:
            (_, before), (last, after) = self._evals[0], self._evals[-1]
            then = f", [bold]{after}[/bold] after {last} steps" if len(self._evals) > 1 else "; not evaluated since"
            self._console.print(f"\nheld-out accuracy: {before} before{then}")
        if self._samples and self._samples[0]:
            self._console.print(self._sample_table())
        self._console.print(self._time_table())
        for name, values in self._ratios.items():
            self._console.print(f"{name}: {sum(values) / len(values):.3f} (mean over steps)")
        if advice:
            self._console.print("\n  ".join(["advice, also in advice.txt:", *advice]), markup=False)
        if self._failed:
            self._console.print(f"[yellow]{self._failed:.0f} rollouts failed: see rollouts.jsonl[/yellow]")
        if self._unscored:
            self._console.print(
                f"[yellow]{self._unscored:.0f} rows were not scored and not learned from: see rollouts.jsonl[/yellow]"
            )
        self._console.print(f"run directory: {self._run_dir}", markup=False)

    def close(self) -> None:
        self._stop_bar()
        if self._rows:
            self._rows.close()
            self._rows = None

    def _stop_bar(self) -> None:
        if self._bar:
            self._bar.stop()
            self._bar = None

    def _write(self, step: int, records: Mapping[str, Record]) -> None:
        if self._rows:
            self._rows.write(rollout_rows(step, records))

    def _sample_table(self) -> Table:
        from rich.table import Table
        from rich.text import Text

        columns = ("prompt", "before", "after") if len(self._samples) > 1 else ("prompt", "before")
        table = Table(*columns, title="held-out samples", title_justify="left")
        for (prompt, before), (_, after) in zip(self._samples[0], self._samples[-1], strict=True):
            table.add_row(*(Text(t[:300]) for t in (prompt, before, after)[: len(columns)]))
        return table

    def _time_table(self) -> Table:
        from rich.table import Table

        whole = self._seconds.pop("step", 0.0) + self._seconds.get("eval", 0.0)
        table = Table("node", "seconds", "share", title="time of all steps", title_justify="left")
        for name, seconds in sorted(self._seconds.items(), key=lambda kv: -kv[1]):
            table.add_row(name, f"{seconds:.2f}", f"{seconds / whole:.0%}" if whole else "")
        table.add_row("all", f"{whole:.2f}", "")
        return table


def _last(prompt: Any) -> str:
    """A prompt as text: of a chat, what was said last."""
    return prompt if isinstance(prompt, str) else str(prompt[-1]["content"])
