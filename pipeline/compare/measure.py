"""What is measured of a run, and the middle and spread of it over steps and repeats."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np


@dataclass(frozen=True, slots=True)
class Measure:
    """`pattern` of the metrics it is, `title` with the first group of the pattern, `unit`, which direction is `better`.

    `by`: what is said of two values, their ratio or their difference. `per` run: there is one value a run, the last.
    """

    pattern: str
    title: str
    unit: str
    better: Literal["lower", "higher"]
    by: Literal["ratio", "difference"] = "ratio"
    per: Literal["step", "run"] = "step"
    digits: int = 3


MEASURES = (
    Measure("time/step_s", "time of a step", "s", "lower"),
    Measure("rollout/(tokens_per_s)", "tokens generated", "tok/s", "higher", digits=0),
    Measure("(?!rollout/)(.*)/tokens_per_s", "tokens learned from, {}", "tok/s", "higher", digits=0),
    Measure("time/(?!wait|eval|step)(.*)_s", "time of {}", "s", "lower"),
    Measure("time/wait_s", "nodes waiting for rows", "s", "lower"),
    Measure("(.*)/wait_s", "waiting in {}", "s", "lower", digits=4),
    Measure("(.*)/hit_ratio", "cache hits, {}", "", "higher", by="difference"),
    Measure("reward/mean", "reward", "", "higher", by="difference"),
    Measure("eval/accuracy", "held-out accuracy at the end", "", "higher", by="difference", per="run"),
    Measure("memory/peak_gb", "peak host memory, all processes", "GiB", "lower", per="run"),
    Measure("gpu/memory_gb", "memory of the first GPU, all processes", "GiB", "lower", per="run"),
    Measure("run/seconds", "time of a run, start and end included", "s", "lower", per="run", digits=1),
    Measure("run/others", "CPUs that other programs took meanwhile", "", "lower", "difference", per="run", digits=2),
)
"""In the order they are shown in. A metric belongs to the first that fits it."""

SECONDS, OTHERS = "run/seconds", "run/others"
"""The two that are no metrics of the run: how long its process lived, and pipeline/compare/busy.py."""


@dataclass(frozen=True, slots=True)
class Summary:
    """Median and quartiles of all values, of which there are `count`.

    A quantile between two values is interpolated linearly (Hyndman and Fan 1996, "Sample quantiles in statistical
    packages", definition 7), as NumPy does.
    """

    median: float
    low: float
    high: float
    count: int


def summary(values: Sequence[float]) -> Summary:
    """ValueError without values."""
    if not values:
        raise ValueError("there is nothing to summarise")
    low, median, high = (float(q) for q in np.quantile(np.asarray(values, np.float64), [0.25, 0.5, 0.75]))
    return Summary(median, low, high, len(values))


def measure_of(metric: str) -> tuple[Measure, str] | None:
    """What a metric measures, with its title; None for one that is not shown."""
    for measure in MEASURES:
        if found := re.fullmatch(measure.pattern, metric):
            return measure, measure.title.format(*found.groups()[-1:])
    return None


def in_order(metrics: Sequence[str]) -> list[str]:
    """The metrics that measure something, as they are shown."""
    place = {m: i for i, m in enumerate(MEASURES)}
    found = [(place[of[0]], i, name) for i, name in enumerate(dict.fromkeys(metrics)) if (of := measure_of(name))]
    return [name for *_, name in sorted(found)]


def values(metrics: Sequence[Mapping[str, Any]], warmup: int) -> dict[str, list[float]]:
    """Of one run, by metric, what counts: a value a step after the warm-up, or the last one of the run."""
    counted = [row for row in metrics if row["step"] > warmup]
    return {name: list(_of(name, counted)) for name in in_order([name for row in counted for name in row])}


def _of(name: str, counted: Sequence[Mapping[str, Any]]) -> Iterator[float]:
    """Without holes: NaN is null in the file."""
    found = [row[name] for row in counted if row.get(name) is not None]
    measure = measure_of(name)
    yield from found[-1:] if measure and measure[0].per == "run" else found


LEAST = 3
"""Of fewer values the quartiles say nothing: those of two always lie between the two."""


@dataclass(frozen=True, slots=True)
class Against:
    """A cell's value against the baseline's. `change`: ratio or difference; None where there is no ratio to 0.

    `verdict`: better or worse, if the quartiles of the two do not touch and each is of LEAST values or more; else the
    difference may be chance.
    """

    change: float | None
    verdict: Literal["better", "worse", "alike"]


def against(measure: Measure, base: Summary, other: Summary) -> Against:
    if measure.by == "difference":
        change = other.median - base.median
    else:
        change = other.median / base.median if base.median > 0 else None
    if min(base.count, other.count) < LEAST:
        verdict = "alike"
    elif other.low > base.high:
        verdict = "better" if measure.better == "higher" else "worse"
    elif other.high < base.low:
        verdict = "better" if measure.better == "lower" else "worse"
    else:
        verdict = "alike"
    return Against(change, verdict)
