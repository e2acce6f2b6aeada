"""The graph: who feeds whom in the forward, learn, publish and evaluate sections, and whether that can be.

    forward:  {node: {port: producer}}     run in topological order; a producer is a node of this section
    learn:    {node: {port: producer}}     in the order written, after all forwards; producers are forwards
    publish:  {server: learner}            weights, after the learners
    evaluate: [node, node, ...]            a chain: each takes what the one before gives
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter

from pipeline.errors import Problem, near
from pipeline.stage import Ports, Stage, has, ports

Edges = dict[str, dict[str, str]]


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
        """Every node once: forwards in order, then those that only evaluate."""
        return list(dict.fromkeys([*self.forward, *self.learn, *self.publish, *self.publish.values(), *self.evaluate]))

    def consumers(self, producer: str) -> list[str]:
        return [n for n, feeds in self.forward.items() if producer in feeds.values()]


def build(config: GraphConfig, classes: Mapping[str, type[Stage]]) -> tuple[Graph, list[Problem]]:
    """The graph and everything that is wrong with it. `classes` are the configured nodes."""
    problems: list[Problem] = []
    forward = {n: dict(feeds or {}) for n, feeds in config.forward.items()}
    learn = {n: dict(feeds or {}) for n, feeds in config.learn.items()}
    used = {*forward, *learn, *config.publish, *config.publish.values(), *config.evaluate}
    for name in sorted(used - set(classes)):
        problems.append(Problem(where=f"graph ({name})", what=f"no stage is configured under '{name}'", hint=near(name, classes)))
    for name in sorted(set(classes) - used):
        problems.append(
            Problem(where=name, what="is configured but not wired", hint=f"add it to graph.forward, or remove it with '~{name}'")
        )
    problems += _check_feeds("forward", forward, forward, classes)
    problems += _check_feeds("learn", learn, forward, classes)
    problems += _check_publish(config.publish, classes)
    chain, chain_problems = _chain(config.evaluate, classes)
    order, cycle = _order(forward)
    problems += chain_problems + cycle
    return Graph({n: forward[n] for n in order}, learn, dict(config.publish), tuple(config.evaluate), chain), problems


def _order(forward: Edges) -> tuple[list[str], list[Problem]]:
    """Topological order, ties in the order written."""
    known = {n: [p for p in feeds.values() if p in forward] for n, feeds in forward.items()}
    try:
        return list(TopologicalSorter(known).static_order()), []
    except CycleError as e:
        path = " -> ".join(e.args[1])
        return list(forward), [Problem(where="graph.forward", what=f"has a cycle: {path}", hint="remove one of these edges")]


def _ports(cls: type[Stage], section: str) -> Ports:
    return ports(cls, "run" if section == "forward" else "learn")


def _check_feeds(section: str, edges: Edges, forward: Edges, classes: Mapping[str, type[Stage]]) -> Iterator[Problem]:
    for node, feeds in edges.items():
        cls = classes.get(node)
        if cls is None:
            continue
        if not has(cls, "run" if section == "forward" else "learn"):
            fit = [n for n, c in classes.items() if has(c, "run" if section == "forward" else "learn")]
            yield Problem(where=f"graph.{section}.{node}", what=f"{node}={cls.backend} has no {section} method", hint=f"those that do: {', '.join(fit)}")
            continue
        inputs = _ports(cls, section).inputs
        for port in sorted(set(feeds) - set(inputs)):
            yield Problem(where=f"graph.{section}.{node}.{port}", what=f"{node}={cls.backend} has no input '{port}'", hint=near(port, inputs))
        for port, p in inputs.items():
            where = f"graph.{section}.{node}.{port}"
            producer = feeds.get(port)
            if producer is None:
                if not p.optional:
                    makers = [n for n, c in classes.items() if n in forward and (out := _output(c)) and issubclass(out, p.type)]
                    yield Problem(where=where, what=f"nothing feeds this input, which takes a {p.type.__name__}", hint=f"nodes that make one: {', '.join(makers) or 'none'}")
            elif producer not in forward:
                yield Problem(where=where, what=f"'{producer}' is not a node of graph.forward", hint=near(producer, forward))
            elif producer in classes and not issubclass(out := _output(classes[producer]) or type(None), p.type):
                yield Problem(where=where, what=f"takes a {p.type.__name__}, but '{producer}' makes a {out.__name__}", hint="wire a node that makes the right record")


def _output(cls: type[Stage]) -> type | None:
    return ports(cls, "run").output if has(cls, "run") else None


def _check_publish(publish: Mapping[str, str], classes: Mapping[str, type[Stage]]) -> Iterator[Problem]:
    for server, learner in publish.items():
        for name, method in ((server, "receive"), (learner, "publish")):
            if name in classes and not has(classes[name], method):
                fit = [n for n, c in classes.items() if has(c, method)]
                yield Problem(where=f"graph.publish.{server}", what=f"'{name}' cannot {method} weights", hint=f"those that can: {', '.join(fit) or 'none'}")


def _chain(evaluate: list[str], classes: Mapping[str, type[Stage]]) -> tuple[dict[str, str], list[Problem]]:
    chain: dict[str, str] = {}
    problems: list[Problem] = []
    for before, node in zip(evaluate, evaluate[1:]):
        if before not in classes or node not in classes or not has(classes[before], "run") or not has(classes[node], "run"):
            continue
        made, inputs = _output(classes[before]), ports(classes[node], "run").inputs
        fit = [p.name for p in inputs.values() if made and issubclass(made, p.type)]
        rest = [p.name for p in inputs.values() if not p.optional and p.name not in fit]
        if len(fit) != 1 or rest:
            problems.append(
                Problem(where="graph.evaluate", what=f"'{node}' cannot take the {made.__name__ if made else 'nothing'} of '{before}'", hint=f"its inputs: {', '.join(inputs)}")
            )
        else:
            chain[node] = fit[0]
    return chain, problems
