"""The plan: every part built, every edge, capability, fact and requirement checked, before anything heavy loads."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

from pipeline import registry
from pipeline.config import CommandLine, Configured, Device, Mode, RootConfig, load, plain
from pipeline.errors import PlanError, Problem, listed, near
from pipeline.graph import Graph, build
from pipeline.placement import Placement
from pipeline.registry import PartSpec
from pipeline.stage import Part, Stage, component_types, has, ports


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a part may know of the rest when it checks itself.

    `values` are the facts of all forward parts (`{"prompts_per_step": 32}`); `fed` are the ports of this part's node
    that something feeds; `evaluates`: its node is in the evaluation chain and not in the forward phase. `nodes` are
    all nodes of the run as they were built, by name.
    """

    key: str
    root: RootConfig
    values: Mapping[str, Any] = field(default_factory=dict)
    fed: frozenset[str] = frozenset()
    evaluates: bool = False
    nodes: Mapping[str, Part] = field(default_factory=dict)


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

    @property
    def root(self) -> RootConfig:
        return self.configured.root

    def placement(self, node: str) -> Placement:
        return self.root.placement.get(node, Placement.local)

    def plain(self) -> dict[str, Any]:
        """The content of `plan.json`."""
        return {
            "graph": plain(self.root.graph),
            "order": list(self.graph.forward),
            "nodes": {n: self._node(n, s) for n, s in self.nodes.items()},
            "runner": self.runner.cls.backend,
            "facts": self.facts,
            "warnings": [str(p) for p in self.problems],
            "overrides": list(self.configured.overrides),
        }

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
    graph, found = build(root.graph, classes)
    problems += found
    specs: dict[str, PartSpec] = {}
    for key in (*classes, "runner", "tracker"):
        if spec := _spec(key, configured, problems):
            specs[key] = spec
    problems += _unused(configured, classes, specs)
    problems += _device(root)
    built = {key: [(s.key, s.build()) for s in spec.walk()] for key, spec in specs.items()}
    facts = {n: v for node in graph.forward for _, part in built.get(node, ()) for n, v in part.facts().items()}
    whole = {node: built[node][0][1] for node in specs}
    for node, spec in specs.items():
        fed, evaluates = frozenset(graph.forward.get(node, ())), node in graph.evaluate and node not in graph.forward
        problems += _capabilities(spec)
        problems += _requirements(spec, root)
        for key, part in built[node]:
            seen = Facts(key=key, root=root, values=facts, fed=fed, evaluates=evaluates, nodes=whole)
            problems += part.check(seen)
    unique = sorted(dict.fromkeys(problems), key=lambda p: p.level)
    if any(p.level == "error" for p in unique):
        raise PlanError(unique)
    nodes = {n: specs[n] for n in graph.nodes()}
    return Plan(configured, graph, nodes, specs["runner"], specs["tracker"], facts, tuple(unique))


def _spec(key: str, configured: Configured, problems: list[Problem], role: type[Part] = Part) -> PartSpec | None:
    """The spec of a part and of all it holds; None, and a problem, if one of them cannot be built."""
    entry = configured.entries.get(key)
    if entry is None:
        able = [str(e) for e in registry.entries() if issubclass(e.cls, role)]
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
    return "warning" if root.mode is Mode.plan else "error"


def _device(root: RootConfig) -> Iterator[Problem]:
    if root.run.device is Device.cuda and not has_cuda():
        hint = "run it where there is one, or choose run.device=auto or cpu"
        yield Problem(where="run.device", what="is cuda, and there is no CUDA device", hint=hint, level=_level(root))


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


def has_cuda() -> bool:
    """Whether this machine has an NVIDIA device, without importing torch."""
    devices = (Path(p) for p in ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg"))
    return os.environ.get("CUDA_VISIBLE_DEVICES") != "" and any(d.exists() for d in devices)
