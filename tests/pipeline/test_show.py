"""A plan can be read: in a hundred columns, without a terminal, as a picture, by a program."""

from __future__ import annotations

import json
import re

import pytest

from pipeline import show
from pipeline.graph import Graph
from pipeline.machine import Memory
from pipeline.plan import Plan
from pipeline.show import as_json, mermaid, render, size_of, tree
from tests.pipeline import test_plan
from tests.pipeline.conftest import toy_plan


def graph(forward: dict[str, dict[str, str]]) -> Graph:
    return Graph(forward, {}, {}, (), {})


def test_the_tree_of_a_graph() -> None:
    forward = {
        "load": {},
        "other": {},
        "cut": {"rows": "load"},
        "score": {"rows": "cut"},
        "judge": {"rows": "cut", "scores": "score"},
        "count": {"rows": "cut", "more": "other"},
    }
    assert tree(graph(forward)) == [
        "load",
        "└─ cut",
        "   ├─ score",
        "   │  └─ judge   (also from cut)",
        "   └─ count   (also from other)",
        "other",
    ]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Plan:
    test_plan.of_memory(monkeypatch, Memory(64 * 10**9, 32 * 10**9), weights=3 * 10**9, kv_cache=15 * 10**8)
    path = "a/very/long/" * 12 + "path"
    return toy_plan(
        "mode=plan", "double=streaming", "+placement.double=process", f"source.path={path}", "seed=1", "seed=2"
    )


@pytest.mark.parametrize("columns", [50, 72, 100])
def test_lines_are_no_longer_than_they_may_be(made: Plan, columns: int) -> None:
    """A word that is longer than a line stays whole: paths are copied."""
    for line in render(made, columns).splitlines():
        assert len(line) <= columns or len(max(line.split(), key=len)) > columns - 20, line
        assert line == line.rstrip()


def test_a_plan_as_text(made: Plan) -> None:
    text = render(made)
    assert text.startswith("plan of 'toy': 3 steps on cpu\n\nsource\n")
    for line in (
        "then learn   learner",
        "publish      learner -> double",
        "evaluate     eval_source -> double -> scorer",
        "  eval_source  groups=2, purpose=eval",
        "  scorer           3.00 GB   1.50 GB   4.50 GB",
        "  all on cpu: 9.00 GB at most; 32.0 GB of 64.0 GB are free here",
        "    the last one counts: seed=2",
    ):
        assert line in text.splitlines()
    assert re.search(r"^double +streaming @process +numbers=source +Numbers$", text, re.MULTILINE)
    assert re.search(r"^scale +exact +\(component\)$", text, re.MULTILINE)


def test_a_plan_as_json_is_what_a_run_writes(made: Plan) -> None:
    told = json.loads(as_json(made))
    assert told == json.loads(json.dumps(made.plain()))
    assert told["settings"]["double"]["most"] == 3
    assert told["settings"]["seed"] == 2
    assert told["versions"]["hydra-core"] == "1.3.8"
    assert told["components"]["scale"]["backend"] == "exact"


def test_a_plan_as_a_flowchart(made: Plan) -> None:
    lines = mermaid(made).splitlines()
    assert lines[0] == "flowchart LR"
    for line in (
        '  double["double<br/>streaming @process"]',
        "  source -->|Numbers| double",
        "  scorer -->|Scores| judge",
        "  judge -.-> learner_learn",
        "  learner_learn ==>|weights| double",
        "  eval_source -. evaluate .-> double",
    ):
        assert line in lines
    edges = [line for line in lines if "-->|" in line]
    assert len(edges) == sum(len(feeds) for feeds in made.graph.forward.values())


def test_the_format_is_chosen_by_a_setting() -> None:
    assert show.show(toy_plan("mode=plan", "plan.format=mermaid")).startswith("flowchart LR")
    assert json.loads(show.show(toy_plan("mode=plan", "plan.format=json")))["name"] == "toy"
    assert show.show(toy_plan("mode=plan")).startswith("plan of 'toy'")


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (123_456, "123 kB"),
        (10_500_000, "10.5 MB"),
        (2 * 10**12, "2.00 TB"),
    ],
)
def test_sizes_in_words(count: int, text: str) -> None:
    assert size_of(count) == text
