"""The plan: every part built, every edge, capability, fact and requirement checked, before anything heavy loads."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from pipeline import machine, registry
from pipeline.config import CommandLine, Configured, Device, Mode, RootConfig, load, plain
from pipeline.errors import PlanError, Problem, listed, near
from pipeline.graph import Graph, build
from pipeline.machine import Memory
from pipeline.placement import Placement
from pipeline.registry import PartSpec
from pipeline.stage import Part, Stage, component_types, has, ports
from pipeline.versions import versions

T = TypeVar("T")
GB = 10**9
HELD = ("weights", "gradients", "optimizer")
"""What a part holds from the first step to the end (`Part.memory`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a part may know of the rest when it checks itself.

    `values` are the facts of all forward parts (`{"prompts_per_step": 32}`); `fed` are the ports of this part's node
    that something feeds; `evaluates`: its node is in the evaluation chain and not in the forward phase. `nodes` are
    all nodes of the run as they were built, by name. `device` is `cpu` or `cuda`; `device_memory` its bytes, None where
    there is no such device here.
    """

    key: str
    root: RootConfig
    values: Mapping[str, Any] = field(default_factory=dict)
    fed: frozenset[str] = frozenset()
    evaluates: bool = False
    nodes: Mapping[str, Part] = field(default_factory=dict)
    device: str = "cpu"
    device_memory: int | None = None


@dataclass(frozen=True, slots=True)
class Estimates:
    """What the nodes say of themselves: derived sizes, and bytes by what they are for (`Part.sizes`, `Part.memory`).

    `there` is what memory this machine has, by device; None where there is no such device.
    """

    device: str
    there: Mapping[str, Memory | None]
    sizes: dict[str, dict[str, int | str]]
    memory: dict[str, dict[str, int]]

    def needed(self, kinds: Collection[str] | None = None) -> dict[str, dict[str, int]]:
        """Device -> node -> bytes; of some kinds of memory, or of all."""
        out: dict[str, dict[str, int]] = {}
        for node, parts in self.memory.items():
            for kind, size in parts.items():
                if kinds is None or kind in kinds:
                    of_device = out.setdefault("cpu" if kind.startswith("host/") else self.device, {})
                    of_device[node] = of_device.get(node, 0) + size
        return out


@dataclass(frozen=True, slots=True)
class Plan:
    """What will be executed. `problems` holds warnings only, once `make` has returned."""

    configured: Configured
    graph: Graph
    nodes: dict[str, PartSpec]
    runner: PartSpec
    tracker: PartSpec
    facts: dict[str, Any]
    problems: tuple[Problem, ...]
    estimates: Estimates

    @property
    def root(self) -> RootConfig:
        return self.configured.root

    def placement(self, node: str) -> Placement:
        return self.root.placement.get(node, Placement.local)

    def plain(self) -> dict[str, Any]:
        """The content of `plan.json`."""
        there = {d: m and {"total": m.total, "free": m.free} for d, m in self.estimates.there.items()}
        needed = {d: sum(of_nodes.values()) for d, of_nodes in self.estimates.needed().items()}
        return {
            "name": self.root.name,
            "graph": plain(self.root.graph),
            "order": list(self.graph.forward),
            "nodes": {n: self._node(n, s) for n, s in self.nodes.items()},
            "components": {
                k: {"role": s.cls.role, "backend": s.cls.backend, "changed": changed(s.config)}
                for k, s in self.components().items()
            },
            "runner": self.runner.cls.backend,
            "facts": self.facts,
            "memory": {"device": self.estimates.device, "needed": needed, "there": there},
            "warnings": [str(p) for p in self.problems],
            "overrides": list(self.configured.overrides),
            "settings": self.configured.plain(),
            "versions": versions(),
        }

    def components(self) -> dict[str, PartSpec]:
        """Everything that is no node, by config key: what nodes hold, the runner, the tracker."""
        held = {c.key: c for s in self.nodes.values() for c in s.walk() if c.key not in self.nodes}
        return held | {"runner": self.runner, "tracker": self.tracker}

    def _node(self, name: str, spec: PartSpec) -> dict[str, Any]:
        cls = spec.cls
        run = ports(cls, "run") if has(cls, "run") else None
        return {
            "role": cls.role,
            "backend": cls.backend,
            "placement": self.placement(name).value,
            "grain": cls.grain,
            "inputs": {p: self.graph.forward.get(name, {}).get(p) for p in (run.inputs if run else {})},
            "output": run.output.__name__ if run and run.output else None,
            "components": {k: c.cls.backend for k, c in spec.components.items()},
            "changed": changed(spec.config),
            "sizes": self.estimates.sizes.get(name, {}),
            "memory": self.estimates.memory.get(name, {}),
        }


def changed(config: Any) -> dict[str, Any]:
    """Settings that differ from the schema's defaults; `fields.prompt` for one inside a section."""
    out: dict[str, Any] = {}
    for f in fields(config):
        value, default = getattr(config, f.name), f.default_factory() if callable(f.default_factory) else f.default
        if is_dataclass(value):
            out |= {f"{f.name}.{inner}": v for inner, v in changed(value).items()}
        elif value != default:
            out[f.name] = plain(value)
    return out


def make(line: CommandLine) -> Plan:
    """The plan of a command line; PlanError with every problem found."""
    return check(*load(line))


def check(configured: Configured, problems: list[Problem]) -> Plan:
    """The plan of a configuration, with `problems` that were found before; PlanError if one is an error."""
    entries, root, problems = configured.entries, configured.root, list(problems)
    classes: dict[str, type[Stage]] = {k: e.cls for k, e in entries.items() if issubclass(e.cls, Stage)}
    told = {p.where for p in problems}
    if told & {"graph", *(f"graph.{f.name}" for f in fields(root.graph))}:
        raise PlanError(problems)  # without its edges, all that could be said is that nothing is wired
    if unreadable := list(_unreadable(classes)):
        raise PlanError([*problems, *unreadable])  # what cannot be read cannot be wired
    graph, found = build(root.graph, classes, told)
    problems += found
    specs: dict[str, PartSpec] = {}
    for key in (*classes, "runner", "tracker"):
        if spec := _spec(key, configured, problems):
            specs[key] = spec
    problems += _unused(configured, classes, specs)
    problems += _device(root)
    problems += _kept(root)
    for spec in specs.values():
        problems += _capabilities(spec)
        problems += _requirements(spec, root)
    parts = _Parts(root, graph, specs, problems)
    parts.check()
    _stop_at_errors(problems)
    estimates = parts.estimates()
    problems += _memory_problems(estimates, root)
    unique = _stop_at_errors(problems)
    nodes = {n: specs[n] for n in graph.nodes()}
    return Plan(configured, graph, nodes, specs["runner"], specs["tracker"], parts.values, tuple(unique), estimates)


def _unreadable(classes: Mapping[str, type[Stage]]) -> Iterator[Problem]:
    """Stages of a user's own whose methods do not say what they take."""
    for key, cls in classes.items():
        for method in ("run", "learn"):
            try:
                if has(cls, method):
                    ports(cls, method)
            except (TypeError, NameError) as e:
                hint = f"annotate it with records of stages.records; it is defined at {_place(getattr(cls, method))}"
                yield Problem(where=key, what=f"{type(e).__name__}: {e}", hint=hint)


def _place(function: Callable[..., Any]) -> str:
    code = function.__code__
    return f"{code.co_filename}:{code.co_firstlineno}"


def _stop_at_errors(problems: Iterable[Problem]) -> list[Problem]:
    """Each problem once, errors first; PlanError if there is an error."""
    unique = sorted(dict.fromkeys(problems), key=lambda p: p.level)
    if any(p.level == "error" for p in unique):
        raise PlanError(unique)
    return unique


class _Parts:
    """All parts of a run, built, and asked for facts, problems, sizes and memory.

    A part that raises instead of answering is a problem like any other: it does not keep the rest from being told.
    """

    def __init__(self, root: RootConfig, graph: Graph, specs: Mapping[str, PartSpec], problems: list[Problem]):
        self.graph, self.problems = graph, problems
        self.built: dict[str, list[tuple[str, Part]]] = {}
        for node, spec in specs.items():
            made = [(s.key, part) for s in spec.walk() if (part := self._ask(s.key, s.build, None)) is not None]
            if len(made) == len([*spec.walk()]):
                self.built[node] = made
        self.values: dict[str, Any] = {}
        for node in graph.forward:
            for key, part in self.built.get(node, ()):
                self.values |= self._ask(key, part.facts, {})
        device = device_of(root)
        self.there = {"cpu": machine.host()} | ({"cuda": machine.cuda()} if device == "cuda" else {})
        whole = {node: made[0][1] for node, made in self.built.items()}
        memory = self.there[device]
        self.device = device
        self._common: dict[str, Any] = {
            "root": root,
            "values": self.values,
            "nodes": whole,
            "device": device,
            "device_memory": memory.total if memory else None,
        }

    def check(self) -> None:
        for _, part, facts in self._with_facts():
            self.problems += self._ask(facts.key, lambda p=part, f=facts: list(p.check(f)), [])

    def estimates(self) -> Estimates:
        sizes: dict[str, dict[str, int | str]] = {}
        memory: dict[str, dict[str, int]] = {}
        for node, part, facts in self._with_facts():
            if told := self._ask(facts.key, lambda p=part, f=facts: dict(p.sizes(f)), {}):
                sizes[node] = sizes.get(node, {}) | told
            for kind, size in self._ask(facts.key, lambda p=part, f=facts: dict(p.memory(f)), {}).items():
                of_node = memory.setdefault(node, {})
                of_node[kind] = of_node.get(kind, 0) + size
        return Estimates(self.device, self.there, sizes, memory)

    def _with_facts(self) -> Iterator[tuple[str, Part, Facts]]:
        wired = {*self.graph.nodes(), "runner", "tracker"}  # of another node all that counts is that it is not
        for node, made in ((n, m) for n, m in self.built.items() if n in wired):
            fed = frozenset(self.graph.forward.get(node, ()))
            evaluates = node in self.graph.evaluate and node not in self.graph.forward
            for key, part in made:
                yield node, part, Facts(key=key, fed=fed, evaluates=evaluates, **self._common)

    def _ask(self, key: str, question: Callable[[], T], otherwise: T) -> T:
        try:
            return question()
        except Exception as e:
            what = f"the stage itself broke while it was planned: {type(e).__name__}: {e}"
            hint = (
                f"raised at {registry.place_of(e)}; a plan asks a stage for its facts and problems, and it must answer"
            )
            self.problems.append(Problem(where=key, what=what, hint=hint))
            return otherwise


def _memory_problems(estimates: Estimates, root: RootConfig) -> Iterator[Problem]:
    """What does not fit. What is held all the time is exact, and more of it than a device has cannot run."""
    for device, of_nodes in estimates.needed(HELD).items():
        need, there = sum(of_nodes.values()), estimates.there.get(device)
        if there and need > there.total:
            has = f"and {device} has {there.total / GB:.1f} GB"
            what = f"{', '.join(HELD)} of all nodes need {need / GB:.1f} GB, {has}"
            yield _too_large(of_nodes, what, _level(root))
            return
    for device, of_nodes in estimates.needed().items():
        need, there = sum(of_nodes.values()), estimates.there.get(device)
        if there and need > there.free:
            what = f"the run may need {need / GB:.1f} GB, and {there.free / GB:.1f} GB of {device} are free"
            yield _too_large(of_nodes, what, "warning")


def _too_large(of_nodes: Mapping[str, int], what: str, level: Literal["warning", "error"]) -> Problem:
    largest = sorted(of_nodes, key=lambda n: -of_nodes[n])
    shown = ", ".join(f"{n} {of_nodes[n] / GB:.1f} GB" for n in largest[:3])
    hint = f"most of it: {shown}; a smaller model or smaller batches, or a larger machine"
    return Problem(where=largest[0], what=what, hint=hint, level=level)


def _spec(key: str, configured: Configured, problems: list[Problem], role: type[Part] = Part) -> PartSpec | None:
    """The spec of a part and of all it holds; None, and a problem, if one of them cannot be built."""
    entry = configured.entries.get(key)
    if entry is None:
        able = [str(e) for e in registry.entries(key) or registry.entries() if issubclass(e.cls, role)]
        if not any(p.where == key for p in problems):  # else it is there, but was found wrong
            problems.append(Problem(where=key, what="is missing", hint=f"choose one of: {listed(able)}"))
        return None
    if not issubclass(entry.cls, role):
        problems.append(Problem(where=key, what=f"must be a {role.role}, but {entry} is configured here"))
        return None
    held = {name: _spec(name, configured, problems, kind) for name, kind in component_types(entry.cls).items()}
    if configured.parts[key] is None or None in held.values():
        return None
    return PartSpec(key, entry.cls, configured.parts[key], {n: s for n, s in held.items() if s})


def _unused(configured: Configured, classes: Collection[str], specs: Mapping[str, PartSpec]) -> Iterator[Problem]:
    """Placements of nodes that do not exist, and components that nothing takes."""
    for key in configured.root.placement:
        if key not in classes:
            yield Problem(where=f"placement.{key}", what=f"there is no node '{key}'", hint=near(key, classes))
    taken = {name for e in configured.entries.values() for name in component_types(e.cls)}
    for key in configured.entries:
        if key not in {*taken, *classes, "runner", "tracker"}:
            yield Problem(where=key, what="nothing in this run takes this component", level="warning")


def _capabilities(spec: PartSpec, holder: PartSpec | None = None) -> Iterator[Problem]:
    """What a part needs, its components or the part that holds it must provide."""
    near_by = [*spec.components.values(), *([holder] if holder else [])]
    for need in sorted(spec.cls.needs.difference(*(s.cls.provides for s in near_by))):
        roles = {s.cls.role for s in near_by}
        able = [e for e in registry.entries() if e.role in roles and need in e.cls.provides]
        lacking = [str(s) for s in near_by if not able or s.cls.role in {e.role for e in able}]
        what = f"{spec} needs '{need}', which {listed(lacking)} does not provide"
        yield Problem(where=spec.key, what=what, hint=f"these do: {listed(str(e) for e in able)}")
    for c in spec.components.values():
        yield from _capabilities(c, spec)


def _level(root: RootConfig) -> Literal["warning", "error"]:
    """A plan that is only looked at may lack packages and devices."""
    return "error" if root.mode in (Mode.run, Mode.compare) else "warning"


def _device(root: RootConfig) -> Iterator[Problem]:
    if root.run.device is Device.cuda and not has_cuda():
        hint = "run it where there is one, or choose run.device=auto or cpu"
        yield Problem(where="run.device", what="is cuda, and there is no CUDA device", hint=hint, level=_level(root))


def _kept(root: RootConfig) -> Iterator[Problem]:
    for step in root.run.keep_records:
        if not 1 <= step <= root.run.steps:
            what = f"there is no step {step}: this run has {root.run.steps}, counted from 1"
            yield Problem(where="run.keep_records", what=what, hint="leave it out, or more run.steps")


def _requirements(spec: PartSpec, root: RootConfig) -> Iterator[Problem]:
    """Packages and devices."""
    level = _level(root)
    for part in spec.walk():
        for need in part.cls.requires:
            if need == "device:cuda":
                if not has_cuda() or root.run.device is Device.cpu:
                    what = f"{part} needs a CUDA device, and this run has none"
                    hint = f"run it where there is one, or choose another {part.cls.role}"
                    yield Problem(where=part.key, what=what, hint=hint, level=level)
            elif importlib.util.find_spec(need) is None:
                what = f"{part} needs the package '{need}', which is not installed"
                hint = f"install it, or choose another {part.cls.role}"
                yield Problem(where=part.key, what=what, hint=hint, level=level)


def device_of(root: RootConfig) -> str:
    """`cpu` or `cuda`: where stages compute, on this machine."""
    return ("cuda" if has_cuda() else "cpu") if root.run.device is Device.auto else root.run.device.value


def has_cuda() -> bool:
    """Whether this machine has an NVIDIA device, without importing torch."""
    devices = (Path(p) for p in ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg"))
    return os.environ.get("CUDA_VISIBLE_DEVICES") != "" and any(d.exists() for d in devices)
