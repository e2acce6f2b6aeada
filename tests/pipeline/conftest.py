"""The toy pipeline, composed as from a command line."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import hypothesis
import pytest
import yaml

from pipeline import plan, registry
from pipeline.config import CommandLine, parse
from pipeline.errors import PlanError, Problem
from pipeline.plan import Plan
from tests.pipeline.stages_for_tests import Log

# The time of one example says nothing on a shared machine.
hypothesis.settings.register_profile("pipeline", deadline=None, max_examples=50, print_blob=True)
hypothesis.settings.load_profile("pipeline")

TOY = ("--config-dir", str(Path(__file__).parent / "conf"), "pipeline=toy")
PLUGINS = "plugins=[tests.pipeline.stages_for_tests]"


def toy_line(*overrides: str) -> CommandLine:
    return parse([*TOY, PLUGINS, *overrides])


def toy_plan(*overrides: str) -> Plan:
    return plan.make(toy_line(*overrides))


def toy(*overrides: str) -> Plan:
    """As `toy_plan`, but composed once for each choice of backends: single values are set in a copy."""
    choices = tuple(o for o in overrides if "." not in o.partition("=")[0])
    plan = copy.deepcopy(_composed(choices))
    for override in overrides:
        path, _, value = override.partition("=")
        section, _, name = path.partition(".")
        if name:
            configs = {"run": plan.root.run, "eval": plan.root.eval} | {
                s.key: s.config for top in (*plan.nodes.values(), plan.tracker) for s in top.walk()
            }
            assert hasattr(configs[section], name), override
            setattr(configs[section], name, yaml.safe_load(value))
    return plan


@cache
def _composed(choices: tuple[str, ...]) -> Plan:
    return toy_plan(*choices)


def problems(*overrides: str) -> dict[str, Problem]:
    """The problems of a toy command line by where they are; if there are several, the first."""
    with pytest.raises(PlanError) as caught:
        toy_plan(*overrides)
    found = caught.value.problems
    assert len({(p.where, p.what) for p in found}) == len(found), "a problem is listed twice"
    return {p.where: p for p in reversed(found)}


@pytest.fixture
def registered() -> Iterator[None]:
    """What a test registers is forgotten afterwards."""
    before = dict(registry._entries)
    yield
    registry._entries.clear()
    registry._entries.update(before)


@pytest.fixture
def log() -> list[tuple[str, ...]]:
    """The events of the stages of this process, from now on."""
    Log.events.clear()
    return Log.events
