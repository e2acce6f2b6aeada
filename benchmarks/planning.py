"""Claim: a plan of the default pipeline is checked and printed in under 1.5 s, Python's start included.

    python -m benchmarks.planning
    python -m benchmarks.planning repeats=9 overrides="pipeline=grpo rollout=vllm_async"

Each plan is a fresh process of the command line a user types. `hydra` is one that imports Hydra and ends: the part of
the time that is not ours.
"""

from __future__ import annotations

import dataclasses
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks import measure
from benchmarks.measure import ROOT, Failure, Report

LIMIT_S = 1.5


@dataclasses.dataclass(slots=True, kw_only=True)
class PlanningSettings:
    repeats: int = measure.option(5, "fresh processes of each kind, in turn")
    overrides: str = measure.option("", "of the planned command line, with spaces between")
    out: str = measure.option("", "write the last line to this file too; `results`: into benchmarks/results")


def timed(command: Sequence[str]) -> dict[str, float]:
    """Wall seconds, and processor seconds of user and system. Failure."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        ended = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True)
    seconds, after = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    if ended.returncode:
        raise Failure(ended.stderr)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": seconds, "cpu_s": cpu}


def main() -> int:
    asked = measure.settings(PlanningSettings, __doc__ or "")
    report = Report("planning", asked, Path(tempfile.gettempdir()))
    plan = [str(ROOT / "run.py"), "mode=plan", *asked.overrides.split()]
    found = report.in_turn(
        {"plan": partial(timed, plan), "hydra": partial(timed, ["-c", "import hydra"])}, asked.repeats
    )
    report.keep(found["plan"], plan_s="seconds", plan_cpu_s="cpu_s")
    report.keep(found["hydra"], hydra_s="seconds", hydra_cpu_s="cpu_s")
    rows = [[name, of["seconds"], of["cpu_s"]] for name, of in found.items() if of]
    report.table("Seconds", ("process", "wall", "processor"), rows)
    report.bar("seconds of a plan", report.get("plan_s"), most=LIMIT_S)
    return report.finish(("plan_s", "plan_cpu_s", "hydra_s", "hydra_cpu_s"), asked.out)


if __name__ == "__main__":
    sys.exit(main())
