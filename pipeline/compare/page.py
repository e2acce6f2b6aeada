"""compare.html: the comparison as bar charts, in one file without scripts, pictures or anything from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape
from typing import Any

from pipeline.compare.measure import Measure, Summary, measure_of
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

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2126; --quiet: #5b6570; --paper: #fff; --card: #f5f7f9; --rule: #d7dde3;
  --bar: #2b6cb0; --first: #8a97a5; --mark: #1c2126; --good: #1b6e3c; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6eaee; --quiet: #a3adb8; --paper: #14181c; --card: #1d2329;
  --rule: #353e47; --bar: #5aa0e6; --first: #7d8995; --mark: #f2f5f8; --good: #6fce94; --bad: #ff8a80; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.5rem; max-width: 80rem; background: var(--paper); color: var(--ink);
  font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .3rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2rem 0 .6rem; }
h3 { font-size: .95rem; margin: 0 0 .6rem; }
p { margin: .3rem 0; max-width: 60rem; }
.quiet { color: var(--quiet); font-size: .87rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); gap: 1rem;
  margin-top: 1rem; }
.chart { background: var(--card); border: 1px solid var(--rule); border-radius: 6px; padding: .8rem 1rem;
  break-inside: avoid; }
.line { display: grid; grid-template-columns: 8rem minmax(4rem, 1fr); gap: .1rem .8rem; align-items: center;
  margin-bottom: .5rem; }
.name { overflow-wrap: anywhere; line-height: 1.2; grid-row: span 2; }
.track { position: relative; height: .9rem; background: var(--rule); border-radius: 2px; }
.bar { position: absolute; top: 0; bottom: 0; background: var(--bar); border-radius: 2px; }
.first .bar { background: var(--first); }
.range { position: absolute; top: 50%; height: 0; border-top: 2px solid var(--mark); }
.range::before, .range::after { content: ""; position: absolute; top: -5px; height: 8px; border-left: 2px solid
  var(--mark); }
.range::before { left: 0; } .range::after { right: 0; }
.value { font-variant-numeric: tabular-nums; font-size: .87rem; }
.better { color: var(--good); font-weight: 600; } .worse { color: var(--bad); font-weight: 600; }
.alike { color: var(--quiet); } .better, .worse, .alike { white-space: nowrap; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .3rem .9rem .3rem 0; border-bottom: 1px solid var(--rule); vertical-align: top;
  overflow-wrap: anywhere; }
pre { background: var(--card); border: 1px solid var(--rule); border-radius: 6px; padding: .6rem .8rem; margin: .3rem 0;
  white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.4 ui-monospace, monospace; break-inside: avoid; }
@media print { :root { color-scheme: light; --ink: #000; --quiet: #444; --paper: #fff; --card: #fff; --rule: #ccc;
  --bar: #2b6cb0; --first: #8a97a5; --mark: #000; --good: #1b6e3c; --bad: #b3261e; }
  body { padding: 0; font-size: 11pt; max-width: none; } .charts { grid-template-columns: 1fr 1fr; }
  .track, .bar, .range { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
"""


def html(report: Report) -> str:
    """The whole page. Every text that comes from elsewhere is escaped."""
    title = "Compared: " + ", ".join(f"{axis['axis']} = {' | '.join(axis['options'])}" for axis in report.axes())
    body = "\n".join([*_head(report, title), *_charts(report), *_drift(report), *_failures(report), *_facts(report)])
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
{body}
</body>
</html>
"""


def _head(report: Report, title: str) -> Iterator[str]:
    yield f"<h1>{escape(title)}</h1>"
    yield f"<p>{escape(counted(report))}. The first is <strong>{escape(report.baseline.cell.name)}</strong>.</p>"
    if report.stopped:
        yield '<p class="worse">Stopped before all runs had ended.</p>'
    if warning := busy(report):
        yield f"<p><strong>{escape(warning)}</strong></p>"
    yield f'<p class="quiet">Bars: {escape(LEGEND)} The line on a bar is from quartile to quartile.</p>'


# -- charts ------------------------------------------------------------------------------------------------------


def _charts(report: Report) -> Iterator[str]:
    if not (metrics := report.metrics()):
        yield "<p>No run ended well: there is nothing to compare.</p>"
        return
    yield '<div class="charts">'
    for metric in metrics:
        of = measure_of(metric)
        assert of is not None
        yield f'<section class="chart" data-metric="{escape(metric)}">\n<h3>{escape(heading(*of))}</h3>'
        scale = _Scale(o.summaries[metric] for o in report.outcomes if metric in o.summaries)
        for outcome in report.outcomes:
            yield _line(report, metric, of[0], outcome, scale)
        yield "</section>"
    yield "</div>"


class _Scale:
    """Places on a track in percent, from 0 (or what is below it) to the largest value or quartile of all cells."""

    def __init__(self, summaries: Iterable[Summary]):
        every = [v for s in summaries for v in (s.low, s.median, s.high)]
        self._least = min(0.0, *every)
        self._span = max(0.0, *every) - self._least

    def at(self, value: float) -> float:
        return 100 * (value - self._least) / self._span if self._span else 0.0

    def span(self, a: float, b: float) -> str:
        """CSS of what lies between two values."""
        left, right = sorted((self.at(a), self.at(b)))
        return f"left:{left:.4f}%;width:{right - left:.4f}%"


def _line(report: Report, metric: str, of: Measure, outcome: Outcome, scale: _Scale) -> str:
    name, found = escape(outcome.cell.name), outcome.summaries.get(metric)
    first = " first" if outcome is report.baseline else ""
    if found is None:
        state = outcome.state if outcome.state != "done" else "not measured"
        return f'<div class="line{first}"><div class="name">{name}</div><div class="value alike">{state}</div></div>'
    bar = f'<div class="bar" data-value="{found.median!r}" style="{scale.span(0.0, found.median)}"></div>'
    if found.count > 1:
        bar += f'<div class="range" style="{scale.span(found.low, found.high)}"></div>'
    words = escape(spread(of, found))
    if compared := report.against(metric, outcome):
        words += f' <span class="{compared.verdict}">{escape(change(of, compared))}</span>'
    if outcome.state != "done":
        words += f' <span class="worse">{escape(outcome.state)}</span>'
    track = f'<div class="track">{bar}</div><div class="value">{words}</div>'
    return f'<div class="line{first}"><div class="name">{name}</div>{track}</div>'


# -- the rest ----------------------------------------------------------------------------------------------------


def _drift(report: Report) -> Iterator[str]:
    found = [(outcome, d) for outcome in report.outcomes if (d := report.drift(outcome))]
    if not found:
        return
    rows = [(outcome.cell.name, *drift_words(d)) for outcome, d in found]
    yield "<h2>Log-prob drift</h2>"
    yield _table(("", *DRIFT_TITLES), rows)
    yield f'<p class="quiet">{escape(DRIFT_LEGEND)}</p>'


def _failures(report: Report) -> Iterator[str]:
    failed = [(outcome, run) for outcome in report.outcomes for run in outcome.failed]
    if failed:
        yield "<h2>What failed</h2>"
        rows = [(o.cell.name, str(run.repeat), run.failure, str(run.log)) for o, run in failed]
        yield _table(("", "run", "reason", "log"), rows)


def _facts(report: Report) -> Iterator[str]:
    yield "<h2>Machine and versions</h2>"
    yield _table(("", ""), list(_machine(report.environment)))
    yield "<h2>Each again</h2>"
    for outcome in report.outcomes:
        yield f"<p>{escape(outcome.cell.name)}</p><pre>{escape(outcome.command)}</pre>"
    yield f'<p class="quiet">The runs in the order they were started in: {escape(", ".join(report.order))}</p>'


def _machine(environment: Any) -> Iterator[tuple[str, str]]:
    for name, value in environment.items():
        if isinstance(value, dict):
            value = ", ".join(f"{k} {v}" for k, v in value.items())
        elif isinstance(value, list):
            value = " ".join(map(str, value))
        yield name, str(value)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [f"<tr>{''.join(f'<th>{escape(h)}</th>' for h in head)}</tr>"] if any(head) else []
    lines += [f"<tr>{''.join(f'<td>{escape(c)}</td>' for c in row)}</tr>" for row in rows]
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'
