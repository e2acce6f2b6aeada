"""The table of a comparison in the terminal: a line a measure, a column a cell."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.compare.measure import measure_of
from pipeline.compare.report import Outcome, Report
from pipeline.compare.words import (
    DRIFT_LEGEND,
    DRIFT_TITLES,
    LEGEND,
    busy,
    change,
    counted,
    drift_words,
    heading,
    spread,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

_STYLE = {"better": "green", "worse": "red", "alike": ""}
_FILE_WIDTH = 160


def show(report: Report, folder: Path) -> None:
    """On standard output: as many columns beside each other as it is wide, the rest below."""
    from rich.console import Console

    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else _FILE_WIDTH
    console = Console(highlight=False, width=width)
    console.print(counted(report) if report.metrics() else "no run ended well: there is nothing to compare")
    for part in _that_fit(report, console) if report.metrics() else ():
        console.print(_table(report, part))
    if report.metrics():
        console.print(LEGEND)
        if any(map(report.drift, report.outcomes)):
            console.print(DRIFT_LEGEND)
    if warning := busy(report):
        console.print(warning, style="yellow")
    for line in failures(report):
        console.print(line, markup=False, soft_wrap=True)
    console.print(f"also in {folder / 'compare.html'} and compare.json", markup=False, soft_wrap=True)


def failures(report: Report) -> Iterator[str]:
    """What did not end well, with the reason and the log."""
    for outcome in report.outcomes:
        for run in outcome.failed:
            again = f"run {run.repeat} of {report.settings.repeats}"
            yield f"{outcome.cell.name}: {again} failed, {run.failure}"
            yield f"    its log is {run.log}"


def _that_fit(report: Report, console: Console) -> Iterator[list[Outcome]]:
    """Groups of cells whose table is not wider than the console; each has one at least."""
    from rich.measure import Measurement

    unbounded = console.options.update(width=10**6)
    part: list[Outcome] = []
    for outcome in report.outcomes:
        wanted = Measurement.get(console, unbounded, _table(report, [*part, outcome])).maximum
        if part and wanted > console.width:
            yield part
            part = []
        part.append(outcome)
    yield part


def _table(report: Report, outcomes: Sequence[Outcome]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table()
    table.add_column("")
    for outcome in outcomes:
        state = "" if outcome.state == "done" else f"\n{outcome.state}"
        first = " (the first)" if outcome is report.baseline else ""
        table.add_column(Text(f"{outcome.cell.name}{first}{state}"))
    for metric in report.metrics():
        of = measure_of(metric)
        assert of is not None
        table.add_row(heading(*of), *(_entry(report, metric, outcome) for outcome in outcomes))
    if any(map(report.drift, outcomes)):
        table.add_section()
        words = [drift_words(d) if (d := report.drift(o)) else ("", "", "", "") for o in outcomes]
        for i, title in enumerate(DRIFT_TITLES):
            table.add_row(title, *(w[i] for w in words))
    return table


def _entry(report: Report, metric: str, outcome: Outcome) -> Text:
    from rich.text import Text

    found, of = outcome.summaries.get(metric), measure_of(metric)
    if found is None or of is None:
        return Text("-")
    entry = Text(spread(of[0], found))
    if compared := report.against(metric, outcome):
        entry.append(f"  {change(of[0], compared)}", _STYLE[compared.verdict])
    return entry
