"""One node after the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.records import Rows
from pipeline.registry import backend
from pipeline.runner import Runner

if TYPE_CHECKING:
    from pipeline.program import Program


@dataclass(slots=True, kw_only=True)
class SyncRunnerConfig:
    """Nothing to set."""


@backend("runner", "sync")
class SyncRunner(Runner):
    """The reference: forward nodes in topological order, then learning, then publishing."""

    def __init__(self, cfg: SyncRunnerConfig):
        self.cfg = cfg

    def forward(self, program: Program, step: int) -> dict[str, Rows]:
        records: dict[str, Rows] = {}
        for node, feeds in program.graph.forward.items():
            inputs = {port: records[producer] for port, producer in feeds.items()}
            records[node] = program.forward(node, step, **inputs)
        program.meter.add("time/wait_s", 0.0, "sum")  # no node ever waits for another
        return records
