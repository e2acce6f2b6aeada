"""Metrics of a step: collected where they arise, merged exactly, written as one JSON object a line.

A name keeps every sample of a step, and the mean is taken with `math.fsum`, so a step cut into parts (by a
streaming runner, or by processes) reports the same numbers to the last bit as one that was not.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, Literal

import numpy as np

from pipeline import progress, redact
from pipeline.disk import Appended

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

    def __reduce__(self):
        return (Meter, ())  # another process measures for itself, and sends what it drained

    def add(self, name: str, values: Any, how: How = "mean") -> None:
        if how == "ratio":
            part, whole = values
            self.absorb({name: (how, [(float(part), float(whole))])})
        else:
            self.absorb({name: (how, np.asarray(values, np.float64).reshape(-1).tolist())})

    def drain(self) -> Samples:
        """All samples since the last drain."""
        with self._lock:
            out, self._samples = self._samples, {}
        return out

    def absorb(self, samples: Samples) -> None:
        """ValueError if a name comes in two ways."""
        progress.alive()
        with self._lock:
            for name, (how, values) in samples.items():
                kept, old = self._samples.setdefault(name, (how, []))
                if kept != how:
                    raise ValueError(f"metric '{name}' was added as {kept} and as {how}")
                old.extend(values)


def summarise(samples: Samples) -> dict[str, float]:
    """One number a name (four for a spread). Names without samples are left out."""
    out: dict[str, float] = {}
    for name, (how, values) in samples.items():
        if not values:
            continue
        if how == "spread":
            out[f"{name}_mean"] = _mean(values)
            out[f"{name}_p50"], out[f"{name}_p95"] = (float(q) for q in np.quantile(values, [0.5, 0.95]))
            out[f"{name}_max"] = float(np.max(values))
        else:
            out[name] = float(_ONE_NUMBER[how](values))
    return out


def _sum(values: Iterable[float]) -> float:
    """Exactly rounded, so in any order; the plain sum where fsum refuses (infinities of both signs, overflow)."""
    values = list(values)
    try:
        return math.fsum(values)
    except (ValueError, OverflowError):
        return sum(values)


def _mean(values: Sequence[float]) -> float:
    return _sum(values) / len(values)


def _ratio(values: Sequence[tuple[float, float]]) -> float:
    whole = _sum(w for _, w in values)
    return _sum(p for p, _ in values) / whole if whole else math.nan


_ONE_NUMBER: dict[How, Callable[[Any], Any]] = {
    "mean": _mean,
    "sum": _sum,
    "max": np.max,
    "last": lambda values: values[-1],
    "ratio": _ratio,
}


class JsonLines:
    """A new file of JSON objects, one a line, each line whole or absent, and there when `write` returns.

    FileExistsError if there is one: lines of two runs never stand in one file. DiskError if it cannot be written.
    """

    def __init__(self, path: Path):
        self._file = Appended(path)

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        lines = "".join(json.dumps(redact.structure(finite(r)), ensure_ascii=False) + "\n" for r in rows)
        self._file.add(lines.encode())

    def close(self) -> None:
        self._file.close()


METRICS = "metrics.jsonl"
"""Name of the file in a run directory that holds an object a step."""


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    """The metrics of each step that was finished, with step 0 (before the first); [] if there is no file.

    A last line that is cut short, as kill -9 may leave one, is left out.
    """
    file = run_dir / METRICS
    lines = file.read_text("utf-8").split("\n") if file.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def finite(value: Any) -> Any:
    """The same with NaN and infinity as None, which is what JSON can say, and NumPy scalars as Python's."""
    if isinstance(value, Mapping):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
