"""From a command line to typed dataclasses. The only module that knows Hydra's and OmegaConf's objects.

Every problem is collected: overrides are added one at a time after a failure, each part of the result is
checked against its schema, and the caller gets dataclasses plus a list of `Problem`.
"""

from __future__ import annotations

import math
import operator
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from pipeline.errors import PlanError, Problem, listed, near
from pipeline.graph import GraphConfig
from pipeline.placement import Placement
from pipeline.registry import Entry, discover, entries, entry_of
from pipeline.stage import setting

Composed = DictConfig
"""What Hydra hands over; only this module looks into it."""
CONF = Path(__file__).resolve().parent.parent / "conf"


class Mode(Enum):
    run = "run"
    plan = "plan"


class Device(Enum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


@dataclass(slots=True, kw_only=True)
class RunSettings:
    """The `run` section."""

    steps: int = setting(30, min=0, doc="training steps")
    threads: int = setting(1, min=0, doc="compute threads of each process, best 1 for tiny models; 0: every core")
    device: Device = setting(Device.auto, doc="cpu, cuda, or auto: cuda where there is one")

    @property
    def cores(self) -> int:
        """`threads`, with 0 as every core that this process may use."""
        return self.threads or len(os.sched_getaffinity(0))


@dataclass(slots=True, kw_only=True)
class EvalSettings:
    """The `eval` section."""

    every: int = setting(10, min=0, doc="steps between evaluations; 0: only before the first and after the last step")


@dataclass(slots=True, kw_only=True)
class RootConfig:
    """Everything in the configuration that is not a node or a component."""

    name: str = setting("run", doc="names the run directory")
    seed: int = setting(0, min=0, doc="all randomness of a run derives from it")
    mode: Mode = setting(Mode.run, doc="run, or plan: check, print and stop")
    run: RunSettings = setting(RunSettings, doc="")
    eval: EvalSettings = setting(EvalSettings, doc="")
    placement: dict[str, Placement] = setting({}, doc="where a node runs: local (default) or process")
    plugins: list[str] = setting([], doc="modules to import, whose backends register themselves")
    graph: GraphConfig = setting(GraphConfig, doc="")


@dataclass(frozen=True, slots=True)
class Configured:
    """A composed configuration: the config dataclasses of nodes and components by config key, and their backends.

    A part is None if a value that must be given is missing.
    """

    root: RootConfig
    parts: dict[str, Any]
    entries: dict[str, Entry]
    run_dir: Path
    sweep_dir: Path
    overrides: tuple[str, ...]

    def plain(self) -> dict[str, Any]:
        """The resolved configuration as plain values."""
        return plain(self.root) | {k: plain(v) for k, v in self.parts.items()}


@dataclass(frozen=True, slots=True)
class CommandLine:
    """What stands on the command line: Hydra's own flags apart from overrides."""

    overrides: tuple[str, ...]
    config_dir: Path | None
    multirun: bool
    inspects: bool
    """Hydra is asked to print something (`--help`, `--cfg`, `--info`, ...), not to run."""


# Flags with which Hydra would run something else than what was planned.
_REFUSED = {
    "config_name": "the recipes of your own are chosen by experiment=..., from a folder given by --config-dir",
    "config_path": "add a folder of your own with --config-dir; its options come beside the built-in ones",
    "package": "it only goes with --cfg; nodes and settings are chosen by overrides, recipes by experiment=...",
    "experimental_rerun": "give the overrides of that run again; its plan.json has them",
}


def parse(argv: Sequence[str]) -> CommandLine:
    """PlanError for a flag of Hydra that the plan cannot follow."""
    args = get_args_parser().parse_args(list(argv))
    given = [name for name in _REFUSED if getattr(args, name) is not None and not (name == "package" and args.cfg)]
    if given:
        what = "this flag cannot be used here"
        raise PlanError(Problem(where=f"--{n.replace('_', '-')}", what=what, hint=_REFUSED[n]) for n in given)
    inspects = any((args.help, args.hydra_help, args.cfg, args.info, args.shell_completion))
    config_dir = Path(args.config_dir).resolve() if args.config_dir else None
    return CommandLine(tuple(args.overrides), config_dir, bool(args.multirun), inspects)


def prepare(line: CommandLine) -> None:
    """Register every backend, so that its schema can be composed. PlanError if a module does not import."""
    for path in (Path.cwd(), line.config_dir.parent if line.config_dir else None):
        if path and str(path) not in sys.path:
            sys.path.append(str(path))
    root: Any = {f.name: getattr(RootConfig(), f.name) for f in fields(RootConfig)}
    root["placement"] = OmegaConf.create({}, flags={"struct": False})  # any node may be named without '+'
    root["mode"] = root["mode"].value
    # A plain dict and no dataclass, so that nodes and components may stand beside these keys.
    ConfigStore.instance().store(group="schema", name="root", node=root, provider="pipeline.config")
    for package in ("pipeline.runner", "stages"):
        discover(package)
    for package in _plugins(line.overrides):
        discover(package, where="plugins")
    for e in entries():
        ConfigStore.instance().store(group=f"schema/{e.role}", name=e.name, node=e.config, provider=e.origin)


def _plugins(overrides: Sequence[str]) -> list[str]:
    """Plug-ins must be imported before composing, for their schemas are part of it: so they are read first."""
    named = [text for text in overrides if re.match(r"\+{0,2}plugins=", text)]
    try:
        values = [OverridesParser.create().parse_override(text).value() for text in named[-1:]]
    except HydraException as e:
        raise PlanError([Problem(where="plugins", what=_first_line(e), hint=f"the override was: {named[-1]}")]) from e
    return [str(m) for value in values for m in (value if isinstance(value, list) else [value])]


def load(line: CommandLine) -> tuple[Configured, list[Problem]]:
    """Import plug-ins, compose, and check every key and value against its schema."""
    prepare(line)
    search = [f"hydra.searchpath=['file://{line.config_dir}']"] if line.config_dir else []
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg, problems = _compose([*search, *line.overrides])
    configured, problems = read(cfg, line.overrides, problems)
    if late := set(configured.root.plugins) - set(_plugins(line.overrides)):
        what = f"{listed(sorted(late))} cannot be imported from here, for composing needs it before"
        problems.append(Problem(where="plugins", what=what, hint="give plugins=[...] on the command line"))
    return configured, problems


def _compose(overrides: Sequence[str]) -> tuple[DictConfig, list[Problem]]:
    """Compose with as many overrides as can be applied; one problem for each that cannot.

    Hydra stops at the first bad override. So those that fail together are tried by halves, and those that fail
    alone are tried again as long as others went well: an override may depend on one that stands behind it.
    """
    cfg, kept, failed, rest = None, list[str](), dict[str, Exception](), list(overrides)

    def add(texts: list[str]) -> None:
        nonlocal cfg
        try:
            cfg = compose("config", overrides=[*kept, *texts], return_hydra_config=True)
            kept.extend(texts)
        except (HydraException, OmegaConfBaseException, ValueError, YAMLError) as e:
            if not texts:
                raise PlanError([Problem(where="conf", what=f"does not compose by itself: {_first_line(e)}")]) from e
            if len(texts) == 1:
                failed[texts[0]] = e
            else:
                add(texts[: len(texts) // 2])
                add(texts[len(texts) // 2 :])

    add(rest)
    while len(failed) < len(rest):
        rest = list(failed)
        failed.clear()
        for text in rest:
            add([text])
    if cfg is None:
        add([])
    assert cfg is not None
    return cfg, [_override_problem(text, e, cfg) for text, e in failed.items()]


def _override_problem(text: str, error: Exception, cfg: DictConfig) -> Problem:
    key, _, value = text.lstrip("+~").partition("=")
    if options := re.search(r"Available options in '(.*)':\n((?:\t.*\n)+)", str(error)):
        what = f"there is no '{value}' in the group '{options[1]}'"
        return Problem(where=key, what=what, hint=near(value, options[2].split()))
    if re.match(r"Could not (override|delete)", str(error)):
        return _unknown(key, cfg)
    return Problem(where=key, what=_first_line(error.__cause__ or error), hint=f"the override was: {text}")


def _unknown(key: str, cfg: DictConfig) -> Problem:
    """A key that is not there, told at the first of its parts that is missing."""
    parent, _, leaf = key.rpartition(".")
    while parent and not isinstance(OmegaConf.select(cfg, parent), DictConfig):
        parent, _, leaf = parent.rpartition(".")
    node = OmegaConf.select(cfg, parent) if parent else cfg
    kind = OmegaConf.get_type(node)
    allowed = [f.name for f in fields(kind)] if is_dataclass(kind) else [str(k) for k in node if k != "hydra"]
    if parent or leaf in allowed:
        return Problem(where=key, what="no such setting", hint=near(leaf, allowed))
    what = f"there is no '{leaf}' in this pipeline"
    return Problem(where=key, what=what, hint=near(leaf, allowed, "configured"))


def _first_line(error: BaseException) -> str:
    if isinstance(error, YAMLError):  # its other lines say where
        return " ".join(str(error).split())
    return str(error).strip().split("\n")[0]


def read(
    cfg: DictConfig, overrides: Sequence[str] = (), problems: Sequence[Problem] = ()
) -> tuple[Configured, list[Problem]]:
    """A composed configuration as dataclasses, and everything in it that its schemas do not allow after `problems`."""
    known = {f.name for f in fields(RootConfig)}
    top = OmegaConf.create({k: v for k, v in cfg.items_ex(resolve=False) if k in known})
    top._set_parent(cfg)
    root, bad = _typed("", top, RootConfig)
    problems = [*problems, *bad]
    if root is None:
        raise PlanError(problems)
    parts: dict[str, Any] = {}
    found: dict[str, Entry] = {}
    for key in (str(k) for k in cfg if k not in known and k != "hydra"):
        node = cfg._get_node(key)
        entry = entry_of(OmegaConf.get_type(node)) if isinstance(node, DictConfig) else None
        if entry is None or not isinstance(node, DictConfig):
            what = "is neither a setting nor a stage or component with a schema"
            hint = f"an option file must extend one: '- /schema/<role>/<backend>@_here_'; {near(key, known)}"
            problems.append(Problem(where=key, what=what, hint=hint))
            continue
        found[key] = entry
        parts[key], bad = _typed(key, node, entry.config)
        problems += bad
    run_dir, sweep_dir = (
        Path(str(OmegaConf.select(cfg, f"hydra.{kind}.dir", default="outputs"))) for kind in ("run", "sweep")
    )
    return Configured(root, parts, found, run_dir, sweep_dir, tuple(overrides)), problems


def _typed(where: str, node: DictConfig, schema: type) -> tuple[Any, list[Problem]]:
    """The node as an instance of its schema, and what was wrong; None if it cannot be made, as a value is missing.

    A bad key or value is reported and left out, so that its schema's default stands in for the rest of the checks.
    """
    problems = list(_misplaced(where, node, schema))
    for p in problems:
        _leave_out(node, p.where.removeprefix(f"{where}."))
    while True:
        try:
            merged = OmegaConf.merge(OmegaConf.structured(schema), node)
            merged._set_parent(node._get_parent())
            if missing := sorted(OmegaConf.missing_keys(merged)):
                docs = {f.name: f.metadata.get("doc", "") for f in fields(schema)}
                given = (Problem(where=_path(where, k), what="must be given", hint=docs.get(k, "")) for k in missing)
                return None, [*problems, *given]
            value = OmegaConf.to_object(merged)
            return value, [*problems, *_ranges(where, value)]
        except (OmegaConfBaseException, ValueError) as e:
            key = str(getattr(e, "full_key", None) or "").removeprefix(f"{where}.")
            problems.append(Problem(where=_path(where, key), what=_first_line(e)))
            if not _leave_out(node, key):
                return None, problems


def _path(*keys: str) -> str:
    return ".".join(k for k in keys if k)


def _leave_out(node: DictConfig, path: str) -> bool:
    """Remove a key, however deep; False if it is not there."""
    parent, _, leaf = path.rpartition(".")
    target = OmegaConf.select(node, parent) if parent else node
    if not isinstance(target, DictConfig) or leaf not in target._content:  # type: ignore[operator]
        return False
    del target._content[leaf]  # type: ignore[attr-defined]  # pop() refuses for a typed node
    return True


def _misplaced(where: str, node: DictConfig, schema: type) -> Iterator[Problem]:
    """Keys that the schema does not have, at any depth (`+key=value` brings them in past Hydra's own check), and
    single values where it has a section."""
    known = {f.name: f.default_factory for f in fields(schema)}
    for key in (str(k) for k in node):
        child, section = node._get_node(key), known.get(key)
        if key not in known:
            yield Problem(where=_path(where, key), what="no such setting", hint=near(key, known))
        elif isinstance(section, type) and is_dataclass(section):
            if isinstance(child, DictConfig):
                yield from _misplaced(_path(where, key), child, section)
            else:
                what, keys = f"is a section, and '{child}' is a single value", (f.name for f in fields(section))
                yield Problem(where=_path(where, key), what=what, hint=f"its keys: {listed(keys)}")


def _ranges(where: str, value: Any) -> Iterator[Problem]:
    """Values outside what `setting(min=, max=, above=)` allows; NaN never is inside."""
    for f in fields(value):
        item, path = getattr(value, f.name), _path(where, f.name)
        if is_dataclass(item):
            yield from _ranges(path, item)
        elif isinstance(item, (int, float)) and not isinstance(item, bool):
            signs = {">=": f.metadata.get("min"), "<=": f.metadata.get("max"), ">": f.metadata.get("above")}
            bounds = {sign: bound for sign, bound in signs.items() if bound is not None}
            if math.isnan(item) or not all(_COMPARE[sign](item, bound) for sign, bound in bounds.items()):
                allowed = " and ".join(f"{sign} {bound}" for sign, bound in bounds.items()) or "a number"
                hint = f"must be {allowed}: {f.metadata.get('doc')}"
                yield Problem(where=path, what=f"{item} is not allowed", hint=hint)


_COMPARE: dict[str, Callable[[float, float], bool]] = {">=": operator.ge, "<=": operator.le, ">": operator.gt}


def plain(value: Any) -> Any:
    """Dataclasses and enums as dicts and strings."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value


def to_yaml(value: dict[str, Any]) -> str:
    return OmegaConf.to_yaml(OmegaConf.create(value))
