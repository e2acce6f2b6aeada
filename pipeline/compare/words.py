"""Numbers of a comparison as a person reads them, in the terminal and on the page."""

from __future__ import annotations

import os

from pipeline.compare.cells import SHARED_STEP
from pipeline.compare.drift import Drift
from pipeline.compare.measure import Against, Measure, Summary
from pipeline.compare.report import Report

_SMALL_S = 0.05
"""Seconds below which milliseconds are easier to read."""


def spread(measure: Measure, found: Summary) -> str:
    """`0.412 (0.401 to 0.430)`, `4.1 ms (3.9 to 4.4)`; where all values are the same, it alone."""
    in_ms = measure.unit == "s" and 0 < found.median < _SMALL_S
    low, middle, high = (_number(v, measure, in_ms) for v in (found.low, found.median, found.high))
    unit = " ms" if in_ms else ""
    return f"{middle}{unit}" if found.low == found.high else f"{middle}{unit} ({low} to {high})"


def _number(value: float, measure: Measure, in_ms: bool) -> str:
    if in_ms:
        return f"{1000 * value:.1f}" if value >= 1e-3 else f"{1000 * value:.3f}"
    return f"{value:,.{measure.digits}f}"


def change(measure: Measure, found: Against) -> str:
    """`0.62x better`, or `+0.012`: no word where it may be chance."""
    word = "" if found.verdict == "alike" else f" {found.verdict}"
    if found.change is None:
        return word.strip()
    if measure.by == "difference":
        return (f"{found.change:+.{measure.digits}f}" if found.change else "the same") + word
    return f"{found.change:.2f}x{word}"


def heading(measure: Measure, title: str) -> str:
    """`time of a step, s ↓`"""
    return f"{title}{', ' if measure.unit else ''}{measure.unit} {'↓' if measure.better == 'lower' else '↑'}"


def counted(report: Report) -> str:
    """What the numbers are of."""
    settings = report.settings
    steps, repeats = report.steps - settings.warmup, settings.repeats
    runs = f"{repeats} run{'s' if repeats != 1 else ''} of each"
    warmup = f" after {settings.warmup} that {'is' if settings.warmup == 1 else 'are'} not counted"
    return f"{runs}, {steps} step{'s' if steps != 1 else ''} a run{warmup if settings.warmup else ''}"


def busy(report: Report) -> str:
    """A warning where the runs did not have the machine for themselves; else empty."""
    if report.busy is None:
        return ""
    cpus = os.cpu_count() or 1
    return (
        f"The machine was busy: other programs took up to {report.busy:.1f} of {cpus} CPUs in a run. Times say little."
    )


LEGEND = (
    "median (lower to upper quartile); x: times the first, +/-: above or below it; ↓ less is better, ↑ more is better. "
    "Without a word the quartiles of the two touch, or there are fewer than 3 values: that may be chance."
)

DRIFT_TITLES = (
    f"log-prob drift in step {SHARED_STEP}, nats: mean",
    "largest",
    "tokens compared",
    "rows with equal tokens",
)


def drift_words(found: Drift) -> tuple[str, str, str, str]:
    """For each of DRIFT_TITLES."""

    def nats(value: float | None) -> str:
        return "no token in common" if value is None else "0" if value == 0 else f"{value:.1e}"

    tokens, rows = f"{found.tokens:,} of {found.all_tokens:,}", f"{found.equal:,} of {found.rows:,}"
    return nats(found.mean), nats(found.most), tokens, rows


DRIFT_LEGEND = (
    "drift: absolute difference of the engines' log-probs of the same tokens, against the first; of the first itself, "
    "between two of its runs"
)
