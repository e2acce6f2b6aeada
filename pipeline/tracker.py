"""The contract of a tracker: what a person, or a service, is shown of a run."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pipeline.records import Record
from pipeline.stage import Component

if TYPE_CHECKING:
    from pipeline.plan import Plan


class Tracker(Component):
    """Called by the program, in the controlling process: start, then (evaluated, stepped)*, finish, close."""

    role: ClassVar[str] = "tracker"

    @abstractmethod
    def start(self, plan: Plan, run_dir: Path) -> None: ...

    @abstractmethod
    def evaluated(self, step: int, records: Mapping[str, Record], metrics: Mapping[str, Any]) -> None:
        """`records` of the evaluation chain by node; `metrics` are those of the step."""

    @abstractmethod
    def stepped(self, step: int, records: Mapping[str, Record], metrics: Mapping[str, Any]) -> None:
        """`records` of the forward phase by node."""

    @abstractmethod
    def finish(self, advice: Sequence[str]) -> None:
        """The run ended well. `advice` is what the stages say of their settings, each with the name of its node."""

    @abstractmethod
    def close(self) -> None:
        """Always called, also after an error."""
