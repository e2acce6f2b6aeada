"""Metrics of a step: collected where they arise, merged exactly, written as one JSON object a line.

A name keeps every sample of a step, and the mean is taken with `math.fsum`, so a step cut into parts (by a
streaming runner, or by processes) reports the same numbers to the last bit as one that was not.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from threading import Lock
from typing import Any, Literal

import numpy as np

How = Literal["mean", "sum", "max", "last", "ratio", "spread"]
Samples = dict[str, tuple[How, list[Any]]]


class Meter:
    """Where a stage puts its numbers: `ctx.meter.add("reward/mean", scores)`.

    mean    over all samples            sum     over all samples        max, last    as said
    ratio   add(name, (part, whole)): sum of parts over sum of wholes
    spread  add("rollout/length", x): name_mean, name_p50, name_p95, name_max
    NaN and infinity are kept and written as null: a hole in a metric is shown, not averaged away.
    """

    def __init__(self) -> None:
        self._samples: Samples = {}
        self._lock = Lock()

    def add(self, name: str, values: Any, how: How = "mean") -> None:
        samples = [tuple(float(v) for v in values)] if how == "ratio" else np.asarray(values, np.float64).reshape(-1).tolist()
        with self._lock:
            kept, old = self._samples.setdefault(name, (how, []))
            if kept != how:
                raise ValueError(f"metric '{name}' was added as {kept} and as {how}")
            old.extend(samples)

    def drain(self) -> Samples:
        """All samples since the last drain."""
        with self._lock:
            out, self._samples = self._samples, {}
        return out

    def absorb(self, samples: Samples) -> None:
        for name, (how, values) in samples.items():
            for v in values if how == "ratio" else [values]:
                self.add(name, v, how)


def summarise(samples: Samples) -> dict[str, float]:
    """One number a name (four for a spread). Names without samples are left out."""
    out: dict[str, float] = {}
    for name, (how, values) in samples.items():
        if not values:
            continue
        if how == "mean":
            out[name] = math.fsum(values) / len(values)
        elif how == "sum":
            out[name] = math.fsum(values)
        elif how == "max":
            out[name] = max(values)
        elif how == "last":
            out[name] = values[-1]
        elif how == "ratio":
            whole = math.fsum(w for _, w in values)
            out[name] = math.fsum(p for p, _ in values) / whole if whole else math.nan
        else:
            ordered = np.sort(np.asarray(values))
            out[f"{name}_mean"] = math.fsum(values) / len(values)
            out[f"{name}_p50"], out[f"{name}_p95"] = (float(q) for q in np.quantile(ordered, [0.5, 0.95]))
            out[f"{name}_max"] = float(ordered[-1])
    return out


class JsonLines:
    """A file of JSON objects, one a line, each line whole or absent: flushed after every write."""

    def __init__(self, path: Path):
        self._file = path.open("a", encoding="utf-8")

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        self._file.write("".join(json.dumps(finite(r), ensure_ascii=False) + "\n" for r in rows))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def finite(value: Any) -> Any:
    """The same with NaN and infinity as None, which is what JSON can say, and NumPy scalars as Python's."""
    if isinstance(value, Mapping):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def group_by_prefix(metrics: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """`{"reward/mean": 1}` as `{"reward": {"mean": 1}}`, for tables."""
    out: dict[str, dict[str, float]] = defaultdict(dict)
    for name, value in metrics.items():
        head, _, tail = name.partition("/")
        out[head][tail or head] = value
    return dict(out)
