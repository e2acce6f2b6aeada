"""Every way in which a graph can be wrong is found, named, and found together with the others."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from pipeline.errors import Problem
from pipeline.graph import GraphConfig, build
from pipeline.records import Rows, Snapshot
from pipeline.stage import Stage, ports


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Raw(Rows):
    pass


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fine(Raw):
    """A Raw with more in it: fits where a Raw is asked for."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Marks(Rows):
    pass


class Loader(Stage):
    backend = "file"

    def run(self) -> Raw: ...  # type: ignore[empty-body]


class Refiner(Stage):
    backend = "fine"

    def run(self, raws: Raw) -> Fine: ...  # type: ignore[empty-body]

    def receive(self, snapshot: Snapshot) -> None: ...


class Marker(Stage):
    backend = "mark"

    def run(self, raws: Raw, hints: Marks | None = None) -> Marks: ...  # type: ignore[empty-body]


class Learner(Stage):
    backend = "sgd"

    def run(self, raws: Raw) -> Marks: ...  # type: ignore[empty-body]

    def learn(self, raws: Fine, marks: Marks) -> None: ...

    def publish(self) -> Snapshot: ...  # type: ignore[empty-body]


CLASSES = {"loader": Loader, "eval_loader": Loader, "refiner": Refiner, "marker": Marker, "learner": Learner}


def good() -> GraphConfig:
    return GraphConfig(
        forward={
            "marker": {"raws": "refiner", "hints": "learner"},
            "learner": {"raws": "refiner"},
            "refiner": {"raws": "loader"},
            "loader": {},
        },
        learn={"learner": {"raws": "refiner", "marks": "marker"}},
        publish={"refiner": "learner"},
        evaluate=["eval_loader", "refiner", "marker"],
    )


def found(config: GraphConfig, classes: dict[str, type[Stage]] | None = None) -> list[Problem]:
    return build(config, classes or CLASSES)[1]


def only(config: GraphConfig, classes: dict[str, type[Stage]] | None = None) -> Problem:
    problems = found(config, classes)
    assert len(problems) == 1, problems
    return problems[0]


def test_a_good_graph() -> None:
    graph, problems = build(good(), CLASSES)
    assert problems == []
    assert list(graph.forward) == ["loader", "refiner", "learner", "marker"]
    assert graph.eval_port == {"refiner": "raws", "marker": "raws"}
    assert graph.nodes() == ["loader", "refiner", "learner", "marker", "eval_loader"]


def test_ports_are_read_from_signatures() -> None:
    run = ports(Marker, "run")
    assert {n: (p.type, p.optional) for n, p in run.inputs.items()} == {"raws": (Raw, False), "hints": (Marks, True)}
    assert run.output is Marks
    assert ports(Learner, "learn").output is None


def test_a_port_without_a_record_type_is_refused() -> None:
    class Bad(Stage):
        def run(self, raws: dict) -> Raw: ...  # type: ignore[empty-body,type-arg,override]

    class Loose(Stage):
        def run(self, **records: Raw) -> Raw: ...  # type: ignore[empty-body]

    for cls, parameter in ((Bad, "raws"), (Loose, "records")):
        with pytest.raises(TypeError, match=f"{cls.__name__}.run: parameter '{parameter}' needs a record type"):
            ports(cls, "run")


def test_unknown_node() -> None:
    config = good()
    config.forward["refinr"] = {"raws": "loader"}
    problem = only(config)
    assert problem.where == "graph.forward.refinr"
    assert "no stage is configured under 'refinr'" in problem.what
    assert "did you mean 'refiner'?" in problem.hint


def test_unwired_stage() -> None:
    problem = only(good(), CLASSES | {"judge": Marker})
    assert (problem.where, problem.what) == ("judge", "is configured but not wired")
    assert "~judge" in problem.hint


def test_unknown_port() -> None:
    config = good()
    config.forward["marker"] = {"raws": "refiner", "hint": "learner"}
    problem = only(config)
    assert problem.where == "graph.forward.marker.hint"
    assert "did you mean 'hints'?" in problem.hint


def test_missing_port_names_who_makes_it() -> None:
    config = good()
    config.learn["learner"] = {"raws": "refiner"}
    problem = only(config)
    assert problem.where == "graph.learn.learner.marks"
    assert problem.hint == "nodes that make one: learner, marker"


def test_unknown_producer() -> None:
    config = good()
    config.forward["marker"] = {"raws": "refinr"}
    problem = only(config)
    assert problem.where == "graph.forward.marker.raws"
    assert "did you mean 'refiner'?" in problem.hint


def test_a_producer_must_be_in_the_forward_section() -> None:
    config = good()
    config.forward["marker"] = {"raws": "eval_loader"}
    assert only(config).what == "'eval_loader' is not a node of graph.forward"


def test_wrong_record_type() -> None:
    config = good()
    config.learn["learner"] = {"raws": "loader", "marks": "marker"}
    problem = only(config)
    assert problem.what == "takes a Fine, but 'loader' makes a Raw"
    assert problem.hint == "nodes that make one: refiner"


def test_a_producer_that_is_configured_but_left_out_can_be_wired() -> None:
    config = good()
    del config.forward["marker"]
    config.evaluate = ["eval_loader", "refiner", "marker"]
    problem = only(config)
    assert problem.what == "'marker' is not a node of graph.forward"
    assert "'graph.forward.marker={raws: loader}'" in problem.hint, "of its two inputs, one need not be fed"


def test_what_was_told_is_not_told_again() -> None:
    """Not of the part that is missing, and not of those that it would have fed."""
    config = good()
    told = {"refiner"}
    problems = build(config, {k: c for k, c in CLASSES.items() if k != "refiner"}, told)[1]
    assert problems == []
    del config.forward["marker"]
    assert not [
        p for p in build(config, CLASSES, {"graph.forward.marker"})[1] if p.where == "graph.learn.learner.marks"
    ]


def test_cycle_is_named() -> None:
    config = good()
    config.forward["learner"] = {"raws": "refiner"}
    config.forward["refiner"] = {"raws": "refiner"}
    problem = only(config)
    assert (problem.where, problem.what) == ("graph.forward", "has a cycle: refiner -> refiner")
    assert problem.hint == "take away or change one of its edges: graph.forward.refiner.raws=refiner"
    config.forward["marker"] = {"raws": "loader", "hints": "judge"}
    config.forward["judge"] = {"raws": "loader", "hints": "marker"}
    config.forward["refiner"] = {"raws": "loader"}
    assert set(only(config, CLASSES | {"judge": Marker}).what.removeprefix("has a cycle: ").split(" -> ")) == {
        "judge",
        "marker",
    }


def test_what_cannot_learn_publish_receive_or_run() -> None:
    class Sink(Stage):
        backend = "sink"

        def learn(self, raws: Raw) -> None: ...

    config = good()
    config.learn["marker"] = {}
    config.learn["sink"] = {"raws": "loader"}
    config.publish = {"marker": "loader"}
    config.forward["sink"] = {}
    problems = {(p.where, p.what): p.hint for p in found(config, CLASSES | {"sink": Sink})}
    assert problems == {
        ("graph.learn.marker", "'marker' (mark) has no method 'learn'"): "nodes that do: learner, sink",
        ("graph.publish.marker", "'marker' (mark) has no method 'receive'"): "nodes that do: refiner",
        ("graph.publish.marker", "'loader' (file) has no method 'publish'"): "nodes that do: learner",
        ("graph.forward.sink", "'sink' (sink) has no method 'run'"): (
            "nodes that do: loader, eval_loader, refiner, marker, learner"
        ),
    }


def test_evaluate_chain() -> None:
    config = good()
    config.evaluate = ["eval_loader", "marker", "refiner"]
    assert only(config).what == "'refiner' is given a Marks from 'marker'"
    config.evaluate = ["refiner", "marker"]
    problems = [p.what for p in found(config)]
    assert "'refiner' is given nothing" in problems
    config.evaluate = ["loader", "refiner"]
    problems = [p.what for p in found(config)]
    assert "'loader' also feeds training, and evaluating would use up its batches" in problems


def test_all_at_once() -> None:
    config = good()
    config.forward["refinr"] = {"raws": "loader"}
    config.forward["marker"] = {"raws": "loadr", "hint": "learner"}
    config.learn["learner"] = {"raws": "loader"}
    config.publish = {"loader": "learner"}
    config.evaluate = ["eval_loader", "eval_loader"]
    where = [p.where for p in found(config)]
    assert sorted(where) == sorted(
        [
            "graph.forward.refinr",
            "graph.forward.marker.hint",
            "graph.forward.marker.raws",
            "graph.learn.learner.raws",
            "graph.learn.learner.marks",
            "graph.publish.loader",
            "graph.evaluate",
        ]
    )
