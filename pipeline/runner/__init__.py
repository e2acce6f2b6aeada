"""The contract of a runner: in which order, and how far at the same time, the nodes of a step are worked."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from pipeline.records import Rows
from pipeline.stage import Component

if TYPE_CHECKING:
    from pipeline.program import Program


class Runner(Component):
    """Whatever the order of work, a step yields the records and metrics that `sync` yields, unless rows are
    made by an older policy (which their `version_min` then says)."""

    role: ClassVar[str] = "runner"

    def steps(self, program: Program, first: int, count: int) -> Iterator[tuple[int, dict[str, Rows]]]:
        """Each step's number and forward records, once its learning and publishing are done."""
        for step in range(first, first + count):
            records = self.forward(program, step)
            program.learn(step, records)
            program.publish(step)
            yield step, records

    @abstractmethod
    def forward(self, program: Program, step: int) -> dict[str, Rows]:
        """The records of every forward node, by node."""
