"""The toy pipeline, composed as from a command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline import plan
from pipeline.config import CommandLine, parse
from pipeline.errors import PlanError, Problem
from pipeline.plan import Plan
from tests.pipeline.stages_for_tests import Log

TOY = ("--config-dir", str(Path(__file__).parent / "conf"), "pipeline=toy")
PLUGINS = "plugins=[tests.pipeline.stages_for_tests]"


def toy_line(*overrides: str) -> CommandLine:
    return parse([*TOY, PLUGINS, *overrides])


def toy_plan(*overrides: str) -> Plan:
    return plan.make(toy_line(*overrides))


def problems(*overrides: str) -> dict[str, Problem]:
    """The problems of a toy command line by where they are."""
    with pytest.raises(PlanError) as caught:
        toy_plan(*overrides)
    found = caught.value.problems
    assert len({(p.where, p.what) for p in found}) == len(found), "a problem is listed twice"
    return {p.where: p for p in found}


@pytest.fixture
def log() -> list[tuple[str, ...]]:
    """The events of the stages of this process, from now on."""
    Log.events.clear()
    return Log.events


Planner = Callable[..., Plan]
