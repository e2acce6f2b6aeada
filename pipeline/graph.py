"""The graph: who feeds whom in the forward, learn, publish and evaluate sections, and whether that can be.

forward:  {node: {port: producer}}     run in topological order; a producer is a node of this section
learn:    {node: {port: producer}}     in the order written, after all forwards; producers are forwards
publish:  {server: learner}            weights, after the learners
evaluate: [node, node, ...]            a chain: each takes what the one before gives
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import Literal

from pipeline.errors import Problem, listed, near
from pipeline.records import Rows
from pipeline.stage import Port, Stage, has, ports

Edges = dict[str, dict[str, str]]
Classes = Mapping[str, type[Stage]]


@dataclass(slots=True, kw_only=True)
class GraphConfig:
    """The `graph` section of a pipeline file."""

    forward: dict[str, dict[str, str]] = field(default_factory=dict)
    learn: dict[str, dict[str, str]] = field(default_factory=dict)
    publish: dict[str, str] = field(default_factory=dict)
    evaluate: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Graph:
    """A graph that was checked; `forward` is in the order of execution."""

    forward: Edges
    learn: Edges
    publish: dict[str, str]
    evaluate: tuple[str, ...]
    eval_port: dict[str, str]
    """For each node of the chain but the first, the port that takes what the one before gives."""

    def nodes(self) -> list[str]:
        """Every node once: forwards in order, then those that only learn, serve or evaluate."""
        return list(dict.fromkeys([*self.forward, *self.learn, *self.publish, *self.publish.values(), *self.evaluate]))


def build(config: GraphConfig, classes: Classes, told: Container[str] = ()) -> tuple[Graph, list[Problem]]:
    """The graph and everything that is wrong with it. `classes` are the configured nodes; nodes in `told` are known to
    be wrong already, and that they are missing here is no news."""
    order, problems = _order(config.forward)
    eval_port: dict[str, str] = {}
    graph = Graph(order, config.learn, config.publish, tuple(config.evaluate), eval_port)
    used = graph.nodes()
    for name in used:
        if name not in classes and name not in told:
            what = f"no stage is configured under '{name}'"
            problems.append(Problem(where=_where(graph, name), what=what, hint=near(name, classes)))
    for name in classes:
        if name not in used:
            hint = f"add it to graph.forward, or remove it with '~{name}'"
            problems.append(Problem(where=name, what="is configured but not wired", hint=hint))
    for node, feeds in graph.forward.items():
        problems += _news(told, feeds, _check_feeds(f"graph.forward.{node}", node, "run", feeds, graph, classes))
    for node, feeds in graph.learn.items():
        problems += _news(told, feeds, _check_feeds(f"graph.learn.{node}", node, "learn", feeds, graph, classes))
    for server, learner in graph.publish.items():
        problems += _able(f"graph.publish.{server}", server, "receive", classes)
        problems += _able(f"graph.publish.{server}", learner, "publish", classes)
    problems += _check_chain(graph, classes, eval_port)
    return graph, problems


def _news(told: Container[str], feeds: Mapping[str, str], problems: Iterable[Problem]) -> Iterator[Problem]:
    """Without those of an edge, or of a producer in graph.forward, that is known to be wrong."""
    for problem in problems:
        producer = feeds.get(problem.where.rpartition(".")[2])
        if problem.where not in told and f"graph.forward.{producer}" not in told:
            yield problem


def _order(forward: Edges) -> tuple[Edges, list[Problem]]:
    """In topological order, or as written if there is none."""
    known = {n: [p for p in feeds.values() if p in forward] for n, feeds in forward.items()}
    try:
        return {n: forward[n] for n in TopologicalSorter(known).static_order()}, []
    except CycleError as e:
        path = e.args[1]
        edges = [
            f"graph.forward.{node}.{port}={producer}"
            for producer, node in pairwise(path)
            for port, feeder in forward[node].items()
            if feeder == producer
        ]
        what, hint = f"has a cycle: {' -> '.join(path)}", f"take away or change one of its edges: {listed(edges)}"
        return forward, [Problem(where="graph.forward", what=what, hint=hint)]


def _where(graph: Graph, node: str) -> str:
    """The first section that names a node."""
    for section in ("forward", "learn", "publish"):
        edges = getattr(graph, section)
        if node in edges:
            return f"graph.{section}.{node}"
    return "graph.evaluate" if node in graph.evaluate else "graph.publish"


def _able(where: str, node: str, method: str, classes: Classes) -> Iterator[Problem]:
    """A problem if the node's class does not define the method."""
    if node in classes and not has(classes[node], method):
        what = f"'{node}' ({classes[node].backend}) has no method '{method}'"
        able = [n for n in classes if has(classes[n], method)]
        yield Problem(where=where, what=what, hint=f"nodes that do: {listed(able)}")


def _made_by(node: str, classes: Classes) -> type[Rows] | None:
    """The record that a node makes in the forward phase."""
    return ports(classes[node], "run").output if node in classes and has(classes[node], "run") else None


def _check_feeds(
    where: str, node: str, method: Literal["run", "learn"], feeds: Mapping[str, str], graph: Graph, classes: Classes
) -> Iterator[Problem]:
    yield from _able(where, node, method, classes)
    if node not in classes or not has(classes[node], method):
        return
    inputs = ports(classes[node], method).inputs
    for port in feeds:
        if port not in inputs:
            yield Problem(where=f"{where}.{port}", what=f"'{node}' has no input '{port}'", hint=near(port, inputs))
    for name, port in inputs.items():
        yield from _check_port(f"{where}.{name}", port, feeds.get(name), graph, classes)


def _check_port(where: str, port: Port, producer: str | None, graph: Graph, classes: Classes) -> Iterator[Problem]:
    makers = [n for n in graph.forward if issubclass(_made_by(n, classes) or object, port.type)]
    hint = f"nodes that make one: {listed(makers)}"
    none = not makers
    if producer is None:
        if not port.optional:
            yield Problem(where=where, what=f"nothing feeds this input, which takes a {port.type.__name__}", hint=hint)
    elif producer not in graph.forward:
        what = f"'{producer}' is not a node of graph.forward"
        add = _how_to_add(producer, graph, classes)
        hint = (add if none else f"{add}; {hint}") if add else near(producer, graph.forward)
        yield Problem(where=where, what=what, hint=hint)
    elif (made := _made_by(producer, classes)) and not issubclass(made, port.type):
        what = f"takes a {port.type.__name__}, but '{producer}' makes a {made.__name__}"
        yield Problem(where=where, what=what, hint=hint)


def _how_to_add(node: str, graph: Graph, classes: Classes) -> str:
    """The override that wires a configured node into the forward phase; empty if there is no such node."""
    if node not in classes or not has(classes[node], "run"):
        return ""
    needed = {name: port for name, port in ports(classes[node], "run").inputs.items() if not port.optional}
    makers = {
        name: next((n for n in graph.forward if issubclass(_made_by(n, classes) or object, port.type)), "NODE")
        for name, port in needed.items()
    }
    feeds = ", ".join(f"{name}: {maker}" for name, maker in makers.items())
    return f"it is configured: wire it by 'graph.forward.{node}={{{feeds}}}'"


def _check_chain(graph: Graph, classes: Classes, eval_port: dict[str, str]) -> Iterator[Problem]:
    """Also fills `eval_port`. The head of the chain takes nothing, and must not be a node of the training step."""
    where, chain = "graph.evaluate", graph.evaluate
    for node in chain:
        yield from _able(where, node, "run", classes)
    if chain and chain[0] in graph.forward:
        what = f"'{chain[0]}' also feeds training, and evaluating would use up its batches"
        yield Problem(where=where, what=what, hint="begin with a loader of its own: '+loader@eval_loader=...'")
    for before, node in pairwise(("", *chain)):
        if node not in classes or not has(classes[node], "run") or (before and before not in classes):
            continue
        inputs = ports(classes[node], "run").inputs
        made = _made_by(before, classes)
        fit = [n for n, p in inputs.items() if issubclass(made or object, p.type)]
        unfed = [n for n, p in inputs.items() if not p.optional and n not in fit[:1]]
        if made and len(fit) == 1:
            eval_port[node] = fit[0]
        if unfed or (made and len(fit) != 1):
            gives = f"a {made.__name__} from '{before}'" if made else "nothing"
            yield Problem(where=where, what=f"'{node}' is given {gives}", hint=f"its inputs: {listed(inputs)}")
