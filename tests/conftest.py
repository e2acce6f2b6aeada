"""Fixtures that many tests share. Small records come from tests/builders.py."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before NumPy or torch: several threads slow tiny models down
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest

from pipeline.context import Context

ROOT = Path(__file__).resolve().parent.parent


# Under nohup, or in the background of a script, signals are ignored, and programs that are started inherit that.
# Tests of how a run ends need what a user's terminal gives.
for _number, _handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGTERM, signal.SIG_DFL),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """The folder of the small base model of the default run."""
    return ROOT / "data" / "base"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of large data sets beside the checkout; tests that need it skip where there is none."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip(f"no folder {folder}")
    return folder


@pytest.fixture
def make_context(tmp_path: Path) -> Callable[..., Context]:
    """`make_context("rollout")`: a context whose run directory exists. Its meter is fresh."""

    def make(
        node: str = "node", run_dir: Path | None = None, *, seed: int = 0, threads: int = 1, device: str = "cpu"
    ) -> Context:
        return Context(node=node, run_seed=seed, run_dir=run_dir or tmp_path, threads=threads, device=device)

    return make
