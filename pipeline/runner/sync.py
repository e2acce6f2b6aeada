"""One node after the other."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.program import Program
from pipeline.records import Record
from pipeline.registry import backend
from pipeline.runner import Runner


@dataclass(slots=True, kw_only=True)
class SyncRunnerConfig:
    """Nothing to set."""


@backend("runner", "sync")
class SyncRunner(Runner):
    """The reference: forward nodes in topological order, then learning, then publishing."""

    def __init__(self, cfg: SyncRunnerConfig):
        self.cfg = cfg

    def forward(self, program: Program, step: int) -> dict[str, Record]:
        records: dict[str, Record] = {}
        for node in program.graph.forward:
            records[node] = program.forward(node, step, **program.inputs(node, records))
        return records
