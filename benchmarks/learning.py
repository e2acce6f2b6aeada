"""Claim: the default job learns the asked-for skill to at least 0.95 in under a minute, for every target and seed.

    python -m benchmarks.learning                                    # 2 pipelines x 4 targets x 5 seeds, in turn
    python -m benchmarks.learning pipelines=ppo targets=sort seeds=0

Each run is a fresh process of the same command line a user types; the wall time includes start-up.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import measure
from benchmarks.measure import ROOT, Failure, Report, Spread

REQUIRED, LIMIT_S = 0.95, 60.0


@dataclasses.dataclass(slots=True, kw_only=True)
class LearningSettings:
    pipelines: tuple[str, ...] = measure.option(("ppo", "grpo"), "with and without a critic")
    targets: tuple[str, ...] = measure.option(("copy", "reverse", "sort", "sort_down"), "reward.target of the runs")
    seeds: tuple[int, ...] = measure.option((0, 1, 2, 3, 4), "one run each")
    extra: str = measure.option("", "further overrides for every run, with spaces between")
    out: str = measure.option("", "write the last line to this file too; `results`: into benchmarks/results")


def one_run(pipeline: str, target: str, seed: int, extra: Sequence[str]) -> dict[str, float]:
    """Accuracy before and after, and wall seconds, of one run in its own process and directory. Failure."""
    with tempfile.TemporaryDirectory() as folder:
        words = [f"pipeline={pipeline}", f"reward.target={target}", f"seed={seed}", f"hydra.run.dir={folder}/run"]
        log = Path(folder, "out.txt")
        with log.open("wb") as out:
            started = time.monotonic()
            process = measure.start([sys.executable, str(ROOT / "run.py"), *words, *extra], out)
            try:
                code = process.wait(measure.LIMIT_S)
            except subprocess.TimeoutExpired:
                raise Failure(f"took longer than {measure.LIMIT_S:g} s") from None
            finally:
                measure.end(process)
            seconds = time.monotonic() - started
        if code:
            raise Failure(measure.last_lines(log) or f"ended with exit code {code}")
        lines = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    accuracy = [line["eval/accuracy"] for line in lines if "eval/accuracy" in line]
    return {"before": accuracy[0], "after": accuracy[-1], "seconds": seconds}


def main() -> int:
    asked = measure.settings(LearningSettings, __doc__ or "")
    report = Report("learning", asked, Path(tempfile.gettempdir()))
    every: list[dict[str, float]] = []
    rows: list[list[Any]] = []
    for pipeline in asked.pipelines:
        for target in asked.targets:
            runs = {
                f"{pipeline} {target} seed {seed}": partial(one_run, pipeline, target, seed, asked.extra.split())
                for seed in asked.seeds
            }
            found = [one for one in report.in_turn(runs, 1).values() if one]
            group = [{name: spread.median for name, spread in one.items()} for one in found]
            every += group
            if group:
                before, worst = max(r["before"] for r in group), min(r["after"] for r in group)
                rows.append([pipeline, target, before, worst, Spread.of([r["seconds"] for r in group])])
    report.table("Held-out accuracy", ("pipeline", "target", "before", "after, worst of the seeds", "seconds"), rows)
    seconds = [r["seconds"] for r in every] or [0.0]
    report.facts |= {
        "runs": len(every),
        "reached": sum(r["after"] >= REQUIRED for r in every),
        "required": REQUIRED,
        "in_time": sum(r["seconds"] < LIMIT_S for r in every),
        "limit_s": LIMIT_S,
        "before_max": max((r["before"] for r in every), default=None),
        "after_min": min((r["after"] for r in every), default=None),
        "seconds_median": round(statistics.median(seconds), 2),
        "seconds_max": round(max(seconds), 2),
    }
    report.bar("share of runs that learned", report.facts["reached"] / max(len(every), 1), least=1)
    report.bar("share of runs in time", report.facts["in_time"] / max(len(every), 1), least=1)
    return report.finish((), asked.out)


if __name__ == "__main__":
    sys.exit(main())
