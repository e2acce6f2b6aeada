"""Claim: the default job learns the asked-for skill to at least 0.95 in under a minute, for every target and seed.

    python -m benchmarks.learning                              # 2 pipelines x 4 targets x 5 seeds, one after another
    python -m benchmarks.learning --pipelines ppo --targets sort --seeds 0

Each run is a fresh process of the same command line a user types; the wall time includes start-up.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

TARGETS = ("copy", "reverse", "sort", "sort_down")
REQUIRED, LIMIT_S = 0.95, 60.0


def one_run(pipeline: str, target: str, seed: int, extra: Sequence[str]) -> dict[str, float]:
    """Accuracy before and after, and wall seconds, of one run in its own process and directory."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "run.py",
            f"pipeline={pipeline}",
            f"reward.target={target}",
            f"seed={seed}",
            f"hydra.run.dir={folder}/run",
        ]
        started = time.monotonic()
        subprocess.run([*command, *extra], check=True, stdout=subprocess.DEVNULL)
        seconds = time.monotonic() - started
        lines = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    accuracy = [line["eval/accuracy"] for line in lines if "eval/accuracy" in line]
    return {"before": accuracy[0], "after": accuracy[-1], "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pipelines", nargs="+", default=["ppo", "grpo"])
    parser.add_argument("--targets", nargs="+", default=list(TARGETS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(5)))
    parser.add_argument("overrides", nargs="*", help="further overrides, after --")
    args = parser.parse_args()
    rows: list[dict[str, float]] = []
    print(f"{'pipeline':<9} {'target':<10} {'before':>7} {'after (worst of seeds)':>23} {'seconds (median, max)':>22}")
    for pipeline in args.pipelines:
        for target in args.targets:
            group = [one_run(pipeline, target, seed, args.overrides) for seed in args.seeds]
            seconds = [r["seconds"] for r in group]
            worst = min(r["after"] for r in group)
            times = f"{statistics.median(seconds):.1f}, {max(seconds):.1f}"
            print(
                f"{pipeline:<9} {target:<10} {max(r['before'] for r in group):>7.3f} {worst:>23.3f} {times:>22}",
                flush=True,
            )
            rows += group
    reached = sum(r["after"] >= REQUIRED for r in rows)
    in_time = sum(r["seconds"] < LIMIT_S for r in rows)
    print(
        json.dumps(
            {
                "benchmark": "learning",
                "runs": len(rows),
                "reached": reached,
                "required": REQUIRED,
                "in_time": in_time,
                "limit_s": LIMIT_S,
                "before_max": max(r["before"] for r in rows),
                "after_min": min(r["after"] for r in rows),
                "seconds_median": round(statistics.median(r["seconds"] for r in rows), 2),
                "seconds_max": round(max(r["seconds"] for r in rows), 2),
                "cpus": os.cpu_count(),
                "machine": platform.machine(),
                "python": platform.python_version(),
            }
        )
    )


if __name__ == "__main__":
    main()
