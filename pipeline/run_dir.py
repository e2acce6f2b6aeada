"""The run directory: what was asked for, on which machine, so that a stranger can repeat it."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from pipeline import redact
from pipeline.config import to_yaml
from pipeline.disk import write_whole
from pipeline.errors import PlanError, Problem, listed
from pipeline.plan import Plan, has_cuda
from pipeline.versions import git, versions


def claim(run_dir: Path, plan: Plan, hydras: Collection[str] = ("run.log",)) -> None:
    """Write `plan.json`, `config.yaml` and `environment.json`.

    PlanError if another run was here first, or anything else lies here but `hydras`: what Hydra wrote just now.
    DiskError if it cannot be.
    """
    if others := sorted({p.name for p in run_dir.iterdir()} - set(hydras)):
        shown = listed(others[:5]) + (", ..." if len(others) > 5 else "")
        what = f"'{run_dir}' is not empty ({shown}); a run never writes among the files of another"
        raise PlanError([Problem(where="hydra.run.dir", what=what, hint="choose a new directory")])
    try:
        write_whole(run_dir / "plan.json", json.dumps(redact.structure(plan.plain()), indent=1), new=True)
    except FileExistsError:
        what = f"'{run_dir}' already holds a run"
        raise PlanError([Problem(where="hydra.run.dir", what=what, hint="choose a new directory")]) from None
    write_whole(run_dir / "config.yaml", to_yaml(redact.structure(plan.configured.plain())))
    write_whole(run_dir / "environment.json", json.dumps(redact.structure(environment()), indent=1) + "\n")


def environment() -> dict[str, Any]:
    """Versions, commit and machine; no variable of the process environment, which may hold secrets."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "device": _device(),
        "packages": {p: v for p, v in versions().items() if p not in ("python", "headrace")},
        "git": git(),
        "command": ["python", *sys.argv],
    }


def _device() -> str:
    if not has_cuda():
        return "cpu"
    names = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    models = [
        line.partition(":")[2].strip() for n in names for line in n.read_text().splitlines() if line.startswith("Model")
    ]
    return ", ".join(models) or "cuda"
