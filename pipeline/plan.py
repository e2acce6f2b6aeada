"""The plan: every part built, every edge, capability, fact and requirement checked, before anything heavy loads."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pipeline import registry
from pipeline.config import CommandLine, Configured, Mode, Placement, RootConfig, load, plain
from pipeline.errors import PlanError, Problem, near
from pipeline.graph import Graph, build
from pipeline.stage import Component, Part, Stage, component_types, has, ports


@dataclass(frozen=True, slots=True)
class Facts:
    """What a part may know of the rest when it checks itself.

    `values` are the facts of all forward parts (`{"prompts_per_step": 32}`); `fed` and `fed_learn` are the
    ports of this part's node that something feeds.
    """

    key: str
    values: Mapping[str, Any]
    fed: frozenset[str]
    fed_learn: frozenset[str]
    root: RootConfig


@dataclass(frozen=True, slots=True)
class PartSpec:
    """How to build a part, here or in another process: class, config and the components it holds. Picklable."""

    key: str
    cls: type[Part]
    config: Any
    components: dict[str, PartSpec]

    def build(self) -> Any:
        return self.cls(self.config, **{name: c.build() for name, c in self.components.items()})  # pyright: ignore[reportCallIssue]

    def walk(self) -> Iterator[PartSpec]:
        yield self
        for c in self.components.values():
            yield from c.walk()


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
        cls: Any = spec.cls
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
    """Settings that differ from the schema's defaults."""
    out: dict[str, Any] = {}
    for f in fields(config):
        value = getattr(config, f.name)
        default = f.default_factory() if callable(f.default_factory) else f.default
        if value != default:
            out[f.name] = plain(value)
    return out


def make(line: CommandLine) -> Plan:
    """The plan of a command line; PlanError with every problem found."""
    configured, problems = load(line)
    return check(configured, problems)


def check(configured: Configured, problems: list[Problem]) -> Plan:
    """The plan of a configuration, with `problems` that were found before; PlanError if one is an error."""
    parts, entries, root = configured.parts, configured.entries, configured.root
    classes: dict[str, Any] = {k: e.cls for k, e in entries.items() if issubclass(e.cls, Stage)}
    graph, found = build(root.graph, classes)
    problems = [*problems, *found]
    specs = {k: _spec(k, configured, problems) for k in [*classes, "runner", "tracker"] if k in parts}
    for role in ("runner", "tracker"):
        if role not in specs:
            problems.append(Problem(where=role, what="is missing", hint=near("", [e.name for e in registry.entries(role)])))
    for key in sorted(set(root.placement) - set(classes)):
        problems.append(Problem(where=f"placement.{key}", what=f"there is no node '{key}'", hint=near(key, classes)))
    held = {c.key for s in specs.values() for c in s.walk()}
    for key in sorted(set(parts) - held - set(classes)):
        problems.append(Problem(where=key, what="no node of this run takes this component", level="warning"))
    built = {k: s.build() for k, s in specs.items()}
    facts = _facts(graph, specs, built)
    for key, spec in specs.items():
        feeds = (frozenset(graph.forward.get(key, {})), frozenset(graph.learn.get(key, {})))
        problems += _capabilities(spec)
        for part in _walk_built(built[key], spec):
            problems += part[1].check(Facts(part[0], facts, *feeds, root))
    problems += _requirements(specs, root)
    unique = list(dict.fromkeys(problems))
    if any(p.level == "error" for p in unique):
        raise PlanError(sorted(unique, key=lambda p: p.level))
    nodes = {n: specs[n] for n in graph.nodes()}
    return Plan(configured, graph, nodes, specs["runner"], specs["tracker"], facts, tuple(unique))


def _spec(key: str, configured: Configured, problems: list[Problem]) -> PartSpec:
    entry = configured.entries[key]
    held: dict[str, PartSpec] = {}
    for name, role in component_types(entry.cls).items():
        if name not in configured.parts:
            problems.append(Problem(where=name, what=f"'{key}' ({entry.role}={entry.name}) needs this component", hint=near("", [e.name for e in registry.entries(role.role)])))
        elif not issubclass(configured.entries[name].cls, role):
            problems.append(Problem(where=name, what=f"'{key}' takes a {role.role} here, this is a {configured.entries[name].role}"))
        else:
            held[name] = _spec(name, configured, problems)
    if len(held) < len(component_types(entry.cls)):
        raise PlanError(problems)
    return PartSpec(key, entry.cls, configured.parts[key], held)


def _walk_built(part: Any, spec: PartSpec) -> Iterator[tuple[str, Part]]:
    """The built parts of a spec: the part itself, and the components it keeps under their own names."""
    yield spec.key, part
    for c in spec.components.values():
        yield from _walk_built(c.build(), c)


def _facts(graph: Graph, specs: Mapping[str, PartSpec], built: Mapping[str, Any]) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for node in graph.forward:
        if node in specs:
            for _, part in _walk_built(built[node], specs[node]):
                facts.update(part.facts())
    return facts


def _capabilities(spec: PartSpec) -> Iterator[Problem]:
    offered = spec.cls.provides.union(*(c.cls.provides for c in spec.components.values()))
    for need in sorted(spec.cls.needs - offered):
        able = [f"{e.role}={e.name}" for e in registry.entries() if issubclass(e.cls, Component) and need in e.cls.provides]
        held = ", ".join(f"{c.cls.role}={c.cls.backend}" for c in spec.components.values())
        yield Problem(where=spec.key, what=f"{spec.cls.role}={spec.cls.backend} needs '{need}', which {held or 'no component'} does not provide", hint=f"these do: {', '.join(able) or 'none'}")
    for c in spec.components.values():
        for need in sorted(c.cls.needs - spec.cls.provides):
            able = [f"{e.role}={e.name}" for e in registry.entries(spec.cls.role) if need in e.cls.provides]
            yield Problem(where=c.key, what=f"{c.cls.role}={c.cls.backend} needs '{need}', which {spec.cls.role}={spec.cls.backend} does not provide", hint=f"these do: {', '.join(able) or 'none'}")
        yield from _capabilities(c)


def _requirements(specs: Mapping[str, PartSpec], root: RootConfig) -> Iterator[Problem]:
    level = "warning" if root.mode is Mode.plan else "error"
    for spec in (s for top in specs.values() for s in top.walk()):
        for need in spec.cls.requires:
            name = f"{spec.cls.role}={spec.cls.backend}"
            if need == "device:cuda" and not (has_cuda() and root.run.device != "cpu"):
                yield Problem(where=spec.key, what=f"{name} needs a CUDA device, and this run has none", level=level)
            elif not need.startswith("device:") and importlib.util.find_spec(need) is None:
                yield Problem(where=spec.key, what=f"{name} needs the package '{need}', which is not installed", hint=f"pip install {need}, or choose another {spec.cls.role}", level=level)


def has_cuda() -> bool:
    """Whether this machine has an NVIDIA device, without importing torch."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") != "" and any(Path(p).exists() for p in ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg"))
