"""What a person sees of a sweep, and what is kept of it: a live table, then one table, `sweep.csv` and `sweep.jsonl`.

Everything is read from the directories of the jobs, so it is the same under every launcher.
"""

from __future__ import annotations

import csv
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.sweep.jobs import LOG, RECORD, last_metrics
from pipeline.sweep.points import distinct

if TYPE_CHECKING:
    from rich.table import Table

SHOWN = (("step", "step", ".0f"), ("reward", "reward/mean", ".3f"), ("accuracy", "eval/accuracy", ".3f"))
"""Heading, metric, format."""
_COLOURS = {"running": "cyan", "done": "green", "failed": "red", "stopped": "yellow", "lost": "red"}
_LOOK_S, _LINE_S = 0.5, 10.0
_NESTED = ("overrides", "metrics")


@dataclass
class View:
    """A job as its directory shows it. `latest`: the last value seen of each metric."""

    record: dict[str, Any]
    latest: dict[str, Any] = field(default_factory=dict)
    told_s: float = 0.0

    @property
    def running(self) -> bool:
        return self.record["state"] == "running"

    @property
    def seconds(self) -> float:
        return self.record.get("seconds") or time.time() - self.record["started"]

    def cells(self) -> dict[str, str]:
        """The metrics of `SHOWN` that are there, and the time, as text."""
        values = {head: self.latest.get(name) for head, name, _ in SHOWN}
        texts = {head: format(values[head], form) for head, _, form in SHOWN if values[head] is not None}
        return texts | {"time": f"{self.seconds:.1f} s"}


class Board:
    """`with Board(...) as board: ...` shows the sweep in `folder` meanwhile, and keeps it at the end.

    `jobs`: how many there will be, None where a search decides; `common`: the overrides that all of them have. Where
    standard output is no terminal, a line a change.
    """

    def __init__(self, folder: Path, jobs: int | None, common: Collection[str] = ()):
        from rich.console import Console

        self.folder, self.jobs, self.common = folder, jobs, common
        self._views: dict[Path, View] = {}
        self._kept = False
        width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 160
        self._console = Console(highlight=False, width=width)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._show, name="board", daemon=True)

    def __enter__(self) -> Board:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join()
        if views := self._in_order():
            for view in views:
                if view.running:  # whoever had started it is gone
                    view.record["state"] = "lost"
            self._kept = self._keep(views)
            self._console.print(self._table(views, ""))
            self._say(f"{self._counts()}; with all metrics: {self.folder / 'sweep.csv'}")

    @property
    def well(self) -> bool:
        """Whether every job ended well."""
        states = [view.record["state"] for view in self._views.values()]
        return self._kept and set(states) == {"done"} and self.jobs in (None, len(states))

    def _in_order(self) -> list[View]:
        return sorted(self._views.values(), key=lambda view: view.record["job"])

    # -- meanwhile -------------------------------------------------------------------------------------------

    def _show(self) -> None:
        from rich.live import Live

        terminal = sys.stdout.isatty()
        live = Live(console=self._console, auto_refresh=False, transient=True) if terminal else None
        over = False
        with live or nullcontext():
            while not over:
                over = self._over.wait(_LOOK_S)
                for view, before in self._look():
                    self._tell(view, before, terminal)
                if live:
                    live.update(self._table(self._that_fit(), self._counts()), refresh=True)

    def _look(self) -> Iterator[tuple[View, str]]:
        """Read what may have changed: each such job, and its state before."""
        for file in sorted(self.folder.glob(f"*/{RECORD}")):
            view = self._views.get(file.parent)
            if view is None or view.running:
                record = json.loads(file.read_text("utf-8"))
                before = view.record["state"] if view else ""
                view = self._views.setdefault(file.parent, View(record))
                view.record = record
                view.latest |= last_metrics(file.parent) or {}
                yield view, before

    def _tell(self, view: View, before: str, terminal: bool) -> None:
        """Of a terminal's jobs only what went wrong, for the rest is in the table."""
        record, state = view.record, view.record["state"]
        name = f"job {record['job']}"
        if state != before and state == "failed":
            code = record["exit"]
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit status {code}"
            self._say(f"{name} {state} {how} after {view.seconds:.1f} s: {self._own(view)}")
            for line in _tail(self._log(view)):
                self._say(f"    {line}")
            self._say(f"    its log is {self._log(view)}")
        elif not terminal and (state != before or view.seconds - view.told_s >= _LINE_S):
            view.told_s = view.seconds
            self._say(f"{name} {state}: {self._own(view)}  {'  '.join(f'{k} {v}' for k, v in view.cells().items())}")

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def _own(self, view: View) -> str:
        """What distinguishes a job."""
        return " ".join(distinct(view.record["overrides"], self.common))

    def _log(self, view: View) -> Path:
        return self.folder / view.record["directory"] / LOG

    # -- tables ----------------------------------------------------------------------------------------------

    def _that_fit(self) -> list[View]:
        """As many as the terminal has lines for: those that run, then those that ended last."""
        views = sorted(self._in_order(), key=lambda view: view.running)
        return sorted(views[-max(3, self._console.height - 6) :], key=lambda view: view.record["job"])

    def _table(self, views: Sequence[View], caption: str) -> Table:
        from rich.table import Table
        from rich.text import Text

        heads = [head for head, *_ in SHOWN if any(head in view.cells() for view in views)]
        table = Table("job", "settings", "state", *heads, "time", caption=caption, caption_justify="left")
        for view in views:
            state, cells = view.record["state"], view.cells()
            shown = [cells.get(head, "") for head in (*heads, "time")]
            table.add_row(str(view.record["job"]), Text(self._own(view)), Text(state, _COLOURS[state]), *shown)
        return table

    def _counts(self) -> str:
        counts = Counter(view.record["state"] for view in self._views.values())
        if self.jobs:
            counts["not running yet" if not self._over.is_set() else "not started"] = self.jobs - len(self._views)
        return ", ".join(f"{count} {state}" for state, count in sorted(counts.items()) if count)

    # -- what is kept ----------------------------------------------------------------------------------------

    def _keep(self, views: Sequence[View]) -> bool:
        """False, after saying why, if it cannot be written."""
        try:
            self._write([self._row(view) for view in views])
        except OSError as e:
            self._say(f"what the jobs did could not be kept: {e}")
            return False
        return True

    def _write(self, rows: Sequence[dict[str, Any]]) -> None:
        with (self.folder / "sweep.jsonl").open("w", encoding="utf-8") as f:
            f.writelines(json.dumps(row) + "\n" for row in rows)
        flat = [row | row["overrides"] | row["metrics"] for row in rows]
        names = [name for name in dict.fromkeys(name for row in flat for name in row) if name not in _NESTED]
        with (self.folder / "sweep.csv").open("w", encoding="utf-8", newline="") as f:
            writer = csv.DictWriter(f, names, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(flat)

    def _row(self, view: View) -> dict[str, Any]:
        """`metrics`: those of the last step that the job has finished."""
        record = view.record
        kept = {name: record.get(name) for name in ("job", "directory", "state", "exit", "seconds")}
        overrides = dict(text.partition("=")[::2] for text in record["overrides"])
        return kept | {"overrides": overrides, "metrics": last_metrics(self.folder / record["directory"]) or {}}


def _tail(log: Path, lines: int = 6) -> list[str]:
    with log.open("rb") as f:
        f.seek(max(0, f.seek(0, os.SEEK_END) - 4096))
        text = f.read().decode("utf-8", "replace")
    return [line.rstrip() for line in text.splitlines() if line.strip()][-lines:]
