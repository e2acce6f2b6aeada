"""How many jobs of a sweep run at a time, and which GPUs each of them sees."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import Problem, listed

_VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(kw_only=True)
class Lanes:
    """Settings: `at_once`, the most jobs at a time; `gpus_per_job`, 0: each job sees every GPU."""

    _target_: str = "hydra_plugins.headrace_launcher.HeadraceLauncher"
    at_once: int = 1
    gpus_per_job: int = 0

    def problems(self) -> Iterator[Problem]:
        if self.at_once < 1:
            yield Problem(where="hydra.launcher.at_once", what=f"{self.at_once} is not allowed", hint="must be >= 1")
        needed, there = self.at_once * self.gpus_per_job, visible()
        if self.gpus_per_job < 0 or needed > len(there):
            what = f"{self.gpus_per_job} for each of {self.at_once} jobs at once, and {len(there)} are here"
            hint = f"GPUs of this machine: {listed(there)}; 0: each job sees them all"
            yield Problem(where="hydra.launcher.gpus_per_job", what=what, hint=hint)

    def environments(self) -> list[Mapping[str, str]]:
        """What each lane adds to the environment of its jobs."""
        if not self.gpus_per_job:
            return [{}] * self.at_once
        gpus, size = visible(), self.gpus_per_job
        return [{_VISIBLE: ",".join(gpus[i * size : (i + 1) * size])} for i in range(self.at_once)]


def visible() -> Sequence[str]:
    """The GPUs that this process may use, as CUDA names them; without importing torch."""
    if (named := os.environ.get(_VISIBLE)) is not None:
        return [name.strip() for name in named.split(",") if name.strip()]
    count = sum(bool(re.fullmatch(r"nvidia\d+", p.name)) for p in Path("/dev").glob("nvidia*"))
    return [str(i) for i in range(count)]
