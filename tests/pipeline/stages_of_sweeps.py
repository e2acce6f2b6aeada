"""A tracker that tells in which process it is, for the tests of sweeps."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pipeline.records import Record
from pipeline.registry import backend
from pipeline.tracker import Tracker

if TYPE_CHECKING:
    from pipeline.plan import Plan


@dataclass(slots=True, kw_only=True)
class TellingTrackerConfig:
    """No settings."""


@backend("tracker", "telling")
class TellingTracker(Tracker):
    """Prints its process, how many runs this process has seen, and the GPUs it may use."""

    runs: ClassVar[int] = 0

    def __init__(self, cfg: TellingTrackerConfig):
        self.cfg = cfg

    def start(self, plan: Plan, run_dir: Path) -> None:
        TellingTracker.runs += 1
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
        print(f"process {os.getpid()} run {self.runs} gpus {gpus} in {Path.cwd()}", flush=True)

    def evaluated(self, step: int, records: Mapping[str, Record], metrics: Mapping[str, Any]) -> None: ...

    def stepped(self, step: int, records: Mapping[str, Record], metrics: Mapping[str, Any]) -> None: ...

    def finish(self, advice: Sequence[str]) -> None: ...

    def close(self) -> None: ...
