"""From a command line to typed dataclasses. The only module that knows Hydra's and OmegaConf's objects.

Every problem is collected: overrides are added one at a time after a failure, each part of the result is
checked against its schema, and the caller gets dataclasses plus a list of `Problem`.
"""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
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

from pipeline.errors import PlanError, Problem, near
from pipeline.graph import GraphConfig
from pipeline.registry import Entry, discover, entry_of
from pipeline.stage import setting

CONF = Path(__file__).resolve().parent.parent / "conf"


class Mode(Enum):
    run = "run"
    plan = "plan"


class Placement(Enum):
    local = "local"
    process = "process"


@dataclass(slots=True, kw_only=True)
class RunSettings:
    """The `run` section."""

    steps: int = setting(30, min=0, doc="training steps")
    threads: int = setting(1, min=1, doc="compute threads of each process; one is fastest for tiny models")
    device: str = setting("auto", doc="cpu, cuda, or auto: cuda where there is one")


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
    """A composed configuration: `parts` are the config dataclasses of nodes and components by config key."""

    root: RootConfig
    parts: dict[str, Any]
    entries: dict[str, Entry]
    run_dir: Path
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


def parse(argv: Sequence[str]) -> CommandLine:
    args = get_args_parser().parse_args(list(argv))
    inspects = bool(args.help or args.hydra_help or args.cfg or args.info or args.shell_completion or args.version) if hasattr(args, "version") else bool(args.help or args.hydra_help or args.cfg or args.info)
    config_dir = Path(args.config_dir).resolve() if args.config_dir else None
    return CommandLine(tuple(args.overrides), config_dir, bool(args.multirun), inspects)


def register_root() -> None:
    """Store the root schema. A plain dict at the top, so that nodes may stand beside these keys."""
    node: dict[str, Any] = {}
    for f in fields(RootConfig):
        value = f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
        if isinstance(value, dict):  # open: any node may be given a placement without '+'
            value = OmegaConf.create(value, flags={"struct": False})
        node[f.name] = value.value if isinstance(value, Enum) else value
    ConfigStore.instance().store(group="schema", name="root", node=node, provider="pipeline.config")


def load(line: CommandLine) -> tuple[Configured, list[Problem]]:
    """Import plug-ins, compose, and check every key and value against its schema."""
    prepare(line)
    overrides = [*line.overrides]
    if line.config_dir:
        overrides.append(f"hydra.searchpath=['file://{line.config_dir}']")
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg, problems = _compose(overrides)
    configured, more = read(cfg, overrides=line.overrides)
    return configured, problems + more


def prepare(line: CommandLine) -> None:
    """Register every backend, so that its schema can be composed. PlanError if a module does not import."""
    for path in (Path.cwd(), line.config_dir.parent if line.config_dir else None):
        if path and str(path) not in sys.path:
            sys.path.append(str(path))
    register_root()
    for package in ("pipeline.runner", "stages", *_plugins(line.overrides)):
        discover(package)


def _plugins(overrides: Sequence[str]) -> list[str]:
    """Plug-ins must be imported before composing, for their schemas are part of it: so they are read first."""
    for text in overrides:
        if re.match(r"\+{0,2}plugins=", text):
            value = OverridesParser.create().parse_override(text).value()
            return [str(v) for v in value] if isinstance(value, list) else [str(value)]
    return []


def _compose(overrides: Sequence[str]) -> tuple[DictConfig, list[Problem]]:
    """Compose with as many overrides as can be applied; one problem for each that cannot."""
    try:
        return compose("config", overrides=list(overrides), return_hydra_config=True), []
    except (HydraException, OmegaConfBaseException, ValueError):
        pass
    kept: list[str] = []
    problems: list[Problem] = []
    try:
        cfg = compose("config", return_hydra_config=True)
    except (HydraException, OmegaConfBaseException) as e:
        raise PlanError([Problem(where="conf", what=f"does not compose by itself: {_first_line(e)}")]) from e
    for text in sorted(overrides, key=lambda t: "." in t.split("=")[0]):  # groups first: they bring the keys
        try:
            cfg = compose("config", overrides=[*kept, text], return_hydra_config=True)
            kept.append(text)
        except (HydraException, OmegaConfBaseException, ValueError) as e:
            problems.append(_override_problem(text, e, cfg))
    return cfg, problems


def _override_problem(text: str, error: Exception, cfg: DictConfig) -> Problem:
    key = text.split("=")[0].lstrip("+~")
    options = re.search(r"Available options in '([^']*)':\n((?:\t.*\n?)+)", str(error))
    if options:
        return Problem(where=key, what=f"no option '{text.partition('=')[2]}' in group '{options[1]}'", hint=near(text.partition("=")[2], options[2].split()))
    cause = error.__cause__ or error
    if "is not in struct" in str(cause) or "not in '" in str(cause) or "Could not override" in str(error) or "Could not delete" in str(error):
        parent, _, leaf = key.rpartition(".")
        node = OmegaConf.select(cfg, parent) if parent else cfg
        while parent and node is None:
            parent, _, leaf = parent.rpartition(".")
            node = OmegaConf.select(cfg, parent) if parent else cfg
        allowed = [str(k) for k in node if k != "hydra"] if isinstance(node, DictConfig) else []
        return Problem(where=key, what=f"no such setting ('{leaf}' is not a key of {parent or 'the configuration'})", hint=near(leaf, allowed))
    return Problem(where=key, what=_first_line(cause), hint=f"the override was: {text}")


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]


def read(cfg: DictConfig, overrides: Sequence[str] = ()) -> tuple[Configured, list[Problem]]:
    """A composed configuration as dataclasses, with everything in it that its schemas do not allow."""
    problems: list[Problem] = []
    known = {f.name for f in fields(RootConfig)}
    top = OmegaConf.create({k: v for k, v in cfg.items_ex(resolve=False) if k in known})
    top._set_parent(cfg)
    root, bad = _typed("", top, RootConfig)
    problems += bad
    parts: dict[str, Any] = {}
    found: dict[str, Entry] = {}
    for key in (str(k) for k in cfg if k not in known and k != "hydra"):
        node = cfg._get_node(key)
        entry = entry_of(OmegaConf.get_type(node)) if isinstance(node, DictConfig) else None
        if entry is None:
            what = "is neither a setting nor a stage or component with a schema"
            problems.append(Problem(where=key, what=what, hint=f"an option file must extend one: '- /schema/<role>/<backend>@_here_'; {near(key, known)}"))
            continue
        value, bad = _typed(key, node, entry.config)
        problems += bad
        if value is not None:
            parts[key], found[key] = value, entry
    run_dir = Path(str(OmegaConf.select(cfg, "hydra.run.dir", default="outputs")))
    return Configured(root or RootConfig(), parts, found, run_dir, tuple(overrides)), problems


def _typed(where: str, node: DictConfig, schema: type) -> tuple[Any, list[Problem]]:
    """The node as an instance of its schema, or None and why not."""
    problems = list(_unknown_keys(where, node, schema))
    if problems:
        for p in problems:
            parent, leaf = p.where.rpartition(".")[::2]
            target = OmegaConf.select(node, parent.removeprefix(where).lstrip(".")) if parent != where else node
            if isinstance(target, DictConfig):
                OmegaConf.set_struct(target, False)
                target.pop(leaf, None)
    try:
        merged = OmegaConf.merge(OmegaConf.structured(schema), node)
        merged._set_parent(node._get_parent())
        missing = OmegaConf.missing_keys(merged)
        problems += [Problem(where=f"{where}.{k}".lstrip("."), what="must be given", hint=_doc(schema, k)) for k in sorted(missing)]
        if missing:
            return None, problems
        value = OmegaConf.to_object(merged)
    except (OmegaConfBaseException, ValueError) as e:
        key = getattr(e, "full_key", None)
        problems.append(Problem(where=".".join(x for x in (where, key) if x) or where, what=_first_line(e)))
        return None, problems
    return value, problems + list(_ranges(where, value))


def _unknown_keys(where: str, node: DictConfig, schema: type) -> Iterator[Problem]:
    """Keys that the schema does not have, at any depth; `+key=value` brings them in past Hydra's own check."""
    known = {f.name: f for f in fields(schema)}
    for key in (str(k) for k in node):
        path = f"{where}.{key}".lstrip(".")
        if key not in known:
            yield Problem(where=path, what="no such setting", hint=near(key, known))
        elif is_dataclass(OmegaConf.get_type(child)) if isinstance(child := node._get_node(key), DictConfig) else False:
            yield from _unknown_keys(path, child, OmegaConf.get_type(child))


def _ranges(where: str, value: Any) -> Iterator[Problem]:
    """Values outside what `setting(min=, max=, above=)` allows; NaN never is inside."""
    for f in fields(value):
        item, path = getattr(value, f.name), f"{where}.{f.name}".lstrip(".")
        if is_dataclass(item):
            yield from _ranges(path, item)
        elif isinstance(item, (int, float)) and not isinstance(item, bool):
            low, high, above = (f.metadata.get(k) for k in ("min", "max", "above"))
            bounds = [f">= {low}" if low is not None else "", f"> {above}" if above is not None else "", f"<= {high}" if high is not None else ""]
            if any(b is not None for b in (low, high, above)) and not (
                (low is None or item >= low) and (high is None or item <= high) and (above is None or item > above) and not math.isnan(item)
            ):
                yield Problem(where=path, what=f"{item} is not allowed", hint=f"must be {' and '.join(b for b in bounds if b)}: {f.metadata.get('doc', '')}")


def _doc(schema: type, key: str) -> str:
    return next((f.metadata.get("doc", "") for f in fields(schema) if f.name == key), "")


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
