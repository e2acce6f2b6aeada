"""From a command line to typed dataclasses.

Every problem is collected: what pipeline/compose.py could not compose, and each value that the schema of its part
does not allow. The caller gets dataclasses plus a list of `Problem`.
"""

from __future__ import annotations

import math
import operator
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn

from hydra import version
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path, get_args_parser
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipeline import quoting, texts
from pipeline.compose import CONF, compose_all, elsewhere, first_line
from pipeline.errors import PlanError, Problem, listed, near
from pipeline.graph import GraphConfig
from pipeline.launching import Launching, alone, launching, too_late
from pipeline.placement import Placement
from pipeline.registry import Entry, discover, entries, entry_of
from pipeline.slots import Slot, find, innermost, limits_of, refusal, words
from pipeline.stage import setting

Composed = DictConfig
"""What Hydra hands over; only this module and pipeline/compose.py look into it."""

__all__ = ["CONF", "CommandLine", "Composed", "Configured", "Device", "Mode", "RootConfig", "load", "parse", "read"]


class Mode(Enum):
    run = "run"
    plan = "plan"
    diff = "diff"
    compare = "compare"


class PlanFormat(Enum):
    text = "text"
    mermaid = "mermaid"
    json = "json"


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
    stall_s: float = setting(600.0, min=0, doc="seconds without progress after which a node ends the run; 0: no limit")
    grace_s: float = setting(25.0, min=0, doc="seconds after SIGTERM that the step may still take; 0: no limit")
    only_steps: bool = setting(False, doc="no evaluation and no export: a run that is only measured")
    keep_records: list[int] = setting([], doc="steps whose records are kept, in records/STEP/NODE.npz")

    @property
    def cores(self) -> int:
        """`threads`, with 0 as every core that this process may use."""
        return self.threads or len(os.sched_getaffinity(0))


@dataclass(slots=True, kw_only=True)
class EvalSettings:
    """The `eval` section."""

    every: int = setting(10, min=0, doc="steps between evaluations; 0: only before the first and after the last step")


@dataclass(slots=True, kw_only=True)
class PlanSettings:
    """The `plan` section: what mode=plan and mode=diff show."""

    format: PlanFormat = setting(PlanFormat.text, doc="how a plan is printed: text, mermaid, or json as in plan.json")
    a: str = setting("", doc="for mode=diff: a run directory, or a plan in JSON")
    b: str = setting("", doc="for mode=diff: what to compare it with")


@dataclass(slots=True, kw_only=True)
class AxisSettings:
    """The `compare.second` section."""

    axis: str = setting("", doc="a second group or setting: every option of one goes with every option of the other")
    options: list[str] = setting([], doc="its options")


@dataclass(slots=True, kw_only=True)
class CompareSettings:
    """The `compare` section: what mode=compare runs."""

    axis: str = setting("", doc="the group or setting that is compared, such as rollout or loader.batch_size")
    options: list[str] = setting([], doc="its options; the first is what the others are compared with")
    second: AxisSettings = setting(AxisSettings, doc="")
    repeats: int = setting(2, min=1, doc="runs of each, every one in a process of its own")
    warmup: int = setting(1, min=0, doc="first steps of a run that are not counted")
    whole_runs: bool = setting(False, doc="evaluate before and after, and export, as a run does")


@dataclass(slots=True, kw_only=True)
class RootConfig:
    """Everything in the configuration that is not a node or a component."""

    name: str = setting("run", doc="names the run directory")
    seed: int = setting(0, min=0, doc="all randomness of a run derives from it")
    mode: Mode = setting(Mode.run, doc="run; plan: check, print and stop; diff: of two runs; compare: of backends")
    run: RunSettings = setting(RunSettings, doc="")
    eval: EvalSettings = setting(EvalSettings, doc="")
    placement: dict[str, Placement] = setting({}, doc="where a node runs: local (default) or process")
    plugins: list[str] = setting([], doc="modules to import, whose backends register themselves")
    graph: GraphConfig = setting(GraphConfig, doc="")
    plan: PlanSettings = setting(PlanSettings, doc="")
    compare: CompareSettings = setting(CompareSettings, doc="")


@dataclass(frozen=True, slots=True)
class Configured:
    """A composed configuration: the config dataclasses of nodes and components by config key, and their backends.

    A part is None if a value that must be given is missing.
    """

    root: RootConfig
    parts: dict[str, Any]
    entries: dict[str, Entry]
    run_dir: Path
    overrides: tuple[str, ...]
    master: Launching | None = None
    """Of a point of a sweep: how that sweep starts its jobs."""
    job_dir: str = ""
    """Of a point of a sweep: its directory in that of the sweep."""

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
    master: Launching | None = None
    """Of a point of a sweep: how that sweep starts its jobs."""


# Flags with which Hydra would run something else than what was planned.
_REFUSED = {
    "config_name": "the recipes of your own are chosen by experiment=..., from a folder given by --config-dir",
    "config_path": "add a folder of your own with --config-dir; its options come beside the built-in ones",
    "package": "it only goes with --cfg; nodes and settings are chosen by overrides, recipes by experiment=...",
    "experimental_rerun": "give the overrides of that run again; its plan.json has them",
}


_ONE_OF = ("run", "multirun", "cfg", "info", "shell_completion")
"""Flags of which Hydra takes one."""


def parse(argv: Sequence[str]) -> CommandLine:
    """PlanError for a flag of Hydra that the plan cannot follow."""
    parser = get_args_parser()
    parser.error = _refuse_flags  # type: ignore[method-assign]  # argparse would print its usage and exit
    args = parser.parse_args(list(argv))
    given = [name for name in _REFUSED if getattr(args, name) is not None and not (name == "package" and args.cfg)]
    if given:
        what = "this flag cannot be used here"
        raise PlanError(Problem(where=f"--{n.replace('_', '-')}", what=what, hint=_REFUSED[n]) for n in given)
    if args.config_dir and not Path(args.config_dir).is_dir():
        what, hint = f"there is no folder '{args.config_dir}'", "it holds option files: GROUP/OPTION.yaml"
        raise PlanError([Problem(where="--config-dir", what=what, hint=hint)])
    one_of = [f"--{n.replace('_', '-')}" for n in _ONE_OF if getattr(args, n)]
    if len(one_of) > 1:
        what, hint = f"{' and '.join(one_of)} ask for different things", "give one of them"
        raise PlanError([Problem(where=one_of[0], what=what, hint=hint)])
    inspects = any((args.help, args.hydra_help, args.cfg, args.info, args.shell_completion))
    config_dir = Path(args.config_dir).resolve() if args.config_dir else None
    return CommandLine(tuple(args.overrides), config_dir, bool(args.multirun), inspects)


def _refuse_flags(message: str) -> NoReturn:
    hint = "flags: -m, --config-dir DIR, --help, --cfg job, --info; all else is an override, PATH=VALUE"
    unread = message.removeprefix("unrecognized arguments: ").split()
    if message.startswith("unrecognized") and not any(word.startswith("-") for word in unread):
        hint = "a flag stands between overrides: let flags come before all of them, or after"
    raise PlanError([Problem(where="command line", what=message, hint=hint)])


def prepare(line: CommandLine) -> list[Problem]:
    """Register every backend, so that its schema can be composed; what is wrong with plug-ins.

    PlanError if a module of our own does not import.
    """
    for path in (Path.cwd(), line.config_dir.parent if line.config_dir else None):
        if path and str(path) not in sys.path:
            sys.path.append(str(path))
    root: Any = {f.name: getattr(RootConfig(), f.name) for f in fields(RootConfig)}
    # Nodes and edges are named freely, without '+'; the graph's own check finds the misspelt.
    root |= {name: OmegaConf.create(plain(root[name]), flags={"struct": False}) for name in ("placement", "graph")}
    root["mode"] = root["mode"].value
    # A plain dict and no dataclass, so that nodes and components may stand beside these keys.
    ConfigStore.instance().store(group="schema", name="root", node=root, provider="pipeline.config")
    for package in ("pipeline.runner", "stages"):
        discover(package)
    named, problems = _plugins(line.overrides)
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # a plan leaves nothing beside a user's files
    for package in named:
        try:
            discover(package, where="plugins")
        except PlanError as e:
            problems += e.problems
    sys.dont_write_bytecode = writes
    for e in entries():
        try:
            node = _schema(e.config)
        except (OmegaConfBaseException, ValueError, TypeError) as error:
            what = f"{e.config.__name__}, the settings of {e}, cannot be read: {first_line(error)}"
            hint = f"mend it beside {e.origin}: fields have simple types, and each default is of its field's type"
            problems.append(Problem(where="plugins", what=what, hint=hint))
            continue
        ConfigStore.instance().store(group=f"schema/{e.role}", name=e.name, node=node, provider=e.origin)
    return problems


def _schema(config: type) -> DictConfig:
    """The schema of a backend, in which a dict takes any key without '+'."""
    node = OmegaConf.structured(config)
    for f in fields(config):
        child = node._get_node(f.name)
        if isinstance(child, DictConfig) and not is_dataclass(OmegaConf.get_type(child)):
            child._set_flag("struct", False)
    return node


def _plugins(overrides: Sequence[str]) -> tuple[list[str], list[Problem]]:
    """Plug-ins must be imported before composing, for their schemas are part of it: so they are read first."""
    parsed, problems = quoting.parse([t for t in overrides if re.match(r"\+{0,2}plugins=", t)][-1:])
    values: list[Any] = [o.value() for o in parsed]
    named = [str(m) for value in values if isinstance(value, list) for m in value]
    for name in (n for n in named if not all(part.isidentifier() for part in n.split("."))):
        hint = "a name as in an import statement: plugins=[my_stages]"
        problems.append(Problem(where="plugins", what=f"'{name}' is no module name", hint=hint))
        named.remove(name)
    return named, problems


def load(line: CommandLine) -> tuple[Configured, list[Problem]]:
    """Import plug-ins, compose, and check every key and value against its schema."""
    problems = prepare(line)
    broken = bool(problems)
    with composing(line):
        cfg, found = compose_all(line.overrides, slot_of, OWN)
    HydraConfig.instance().set_config(cfg)  # for ${hydra:...}
    problems += [p for p in found if p not in problems and not (broken and "no stage is registered" in p.what)]
    problems += texts.shadowed(cfg.hydra)
    problems += too_late(cfg, line.master) if line.master else alone(cfg, line.overrides)
    configured, problems = read(cfg, written(cfg.hydra.overrides.task), problems)
    if line.master:
        job_dir = _text(cfg, "hydra.sweep.subdir", problems)
        configured = replace(configured, master=line.master, job_dir=job_dir)
    problems += _given_twice(line.overrides)
    if not broken and (late := set(configured.root.plugins) - set(_plugins(line.overrides)[0])):
        what = f"{listed(sorted(late))} cannot be imported from here, for composing needs it before"
        problems.append(Problem(where="plugins", what=what, hint="give plugins=[...] on the command line"))
    return configured, problems


@contextmanager
def composing(line: CommandLine) -> Iterator[Hydra]:
    """Hydra as `hydra.main` sets it up: inside, `compose` looks into `conf` and into `--config-dir`."""
    version.setbase("1.3")
    search = create_config_search_path(str(CONF))
    if line.config_dir:
        search.prepend("command-line", f"file://{line.config_dir}", anchor=SearchPathQuery(provider="schema"))
    GlobalHydra.instance().clear()
    try:
        yield Hydra.create_main_hydra2("run", search)
    finally:
        GlobalHydra.instance().clear()


def sweep_launching(overrides: Sequence[str]) -> Launching:
    """Inside `composing`: what Hydra reads of a sweep before it composes the first job. Bad overrides are left out."""
    return launching(compose_all(overrides, slot_of, OWN)[0])


def changeable(line: CommandLine) -> tuple[dict[str, list[str]], Callable[[str], Slot | None]]:
    """What an override can change in what this command line composes: the options of each group by its config key, and
    what the setting or section at a config path takes."""
    prepare(line)
    with composing(line) as hydra:
        cfg, _ = compose_all(line.overrides, slot_of, OWN)
        keys = [str(key) for key in cfg.hydra.runtime.choices if not key.startswith("hydra/")]
        groups = {key: list(hydra.config_loader.get_group_options(key.partition("@")[0])) for key in keys}

    def slot(path: str) -> Slot | None:
        kind = OmegaConf.get_type(cfg._get_node(path)) if path in cfg else None
        return slot_of(cfg, path) or (Slot(kind, MISSING, {}) if is_dataclass(kind) else None)

    return groups, slot


def written(overrides: Any) -> tuple[str, ...]:
    """Overrides that Hydra has kept, as they were written: an interpolation in one is not for now."""
    kept: Any = OmegaConf.to_container(overrides, resolve=False)
    return tuple(map(str, kept))


def assignment(key: str, value: object) -> str:
    """An override that sets a text, whatever characters are in it."""
    text = re.sub(r"(\\*)\$\{", r"\1\1\\${", str(value))  # no interpolation begins in it
    return f"{key}={QuotedString(text, Quote.single).with_quotes()}"


def _given_twice(overrides: Sequence[str]) -> Iterator[Problem]:
    sections = {str(o.input_line) for o in quoting.parse(overrides)[0] if isinstance(o.value(), dict)}
    for key, count in Counter(quoting.key_of(t) for t in overrides if t not in sections).items():
        if count > 1:  # of an option and a section of settings both count
            given = [t for t in overrides if quoting.key_of(t) == key and t not in sections]
            what, hint = f"is given {count} times: {', '.join(given)}", f"the last one counts: {given[-1]}"
            yield Problem(where=key, what=what, hint=hint, level="warning")


OWN = frozenset(f.name for f in fields(RootConfig))
"""Keys at the top of the configuration that are no nodes and no components."""


def slot_of(cfg: DictConfig, path: str) -> Slot | None:
    """What the setting at a config path takes; None if there is no such setting, or no schema."""
    top, _, inner = path.partition(".")
    if top in {f.name for f in fields(RootConfig)}:
        return find(RootConfig, path)
    node = cfg._get_node(top) if top in cfg else None
    if top == "hydra":
        kind = OmegaConf.get_type(node)
        return find(kind, inner) if is_dataclass(kind) and inner else None
    entry = entry_of(OmegaConf.get_type(node)) if isinstance(node, DictConfig) else None
    return find(entry.config, inner) if entry and inner else None


def read(
    cfg: DictConfig, overrides: Sequence[str] = (), problems: Sequence[Problem] = ()
) -> tuple[Configured, list[Problem]]:
    """A composed configuration as dataclasses, and everything in it that its schemas do not allow after `problems`.

    `overrides` are those that it was composed with.
    """
    known = {f.name for f in fields(RootConfig)}
    hydra: Any = cfg.get("hydra") or (HydraConfig.get() if HydraConfig.initialized() else None)
    misread = texts.keep(cfg, hydra, overrides, lambda path: slot_of(cfg, path))
    top = OmegaConf.create({k: v for k, v in cfg.items_ex(resolve=False) if k in known})
    top._set_parent(cfg)
    root, bad = _typed("", top, RootConfig)
    problems = [*problems, *misread, *bad]
    if root is None:
        raise PlanError(problems)
    problems += _name_problems(root.name)
    parts: dict[str, Any] = {}
    found: dict[str, Entry] = {}
    files = texts.option_files(hydra) if hydra is not None else {}
    for key in (str(k) for k in cfg if k not in known and k != "hydra"):
        node = cfg._get_node(key)
        entry = entry_of(OmegaConf.get_type(node)) if isinstance(node, DictConfig) else None
        if entry is None or not isinstance(node, DictConfig):
            if not any(p.where == key for p in problems):
                problems.append(_no_schema(key, node, files.get(key), known))
            continue
        found[key] = entry
        parts[key], bad = _typed(key, node, entry.config, cfg)
        problems += bad
    run_dir = Path(_text(cfg, "hydra.run.dir", problems))
    return Configured(root, parts, found, run_dir, tuple(overrides)), problems


def _text(cfg: DictConfig, key: str, problems: list[Problem]) -> str:
    """A value of Hydra's own, which may hold interpolations that do not work."""
    try:
        return str(OmegaConf.select(cfg, key))
    except OmegaConfBaseException as e:
        hint = "name settings and resolvers that are there, such as ${name} and ${now:%H-%M-%S}"
        problems.append(Problem(where=key, what=first_line(e), hint=hint))
        return ""


def _no_schema(key: str, node: Any, file: Path | None, known: set[str]) -> Problem:
    """A key at the top that no backend stands behind; `file`: that of the option that was chosen for it."""
    roles = {e.role for e in entries()}
    if file:
        role = file.parent.name
        what = f"its option file {file} extends no schema, so nothing says which stage it is of"
        first = f"let it begin with: defaults: [/schema/{role}/BACKEND@_here_, _self_]"
        return Problem(where=key, what=what, hint=f"{first}; backends: {listed(e.name for e in entries(role))}")
    if isinstance(node, DictConfig):
        what = f"has settings ({listed(map(str, node))}), and no option of a group is chosen for it"
        able = [str(e) for e in entries(key)] or [f"+GROUP@{key}=OPTION, of the groups {listed(sorted(roles))}"]
        hint = f"choose one: {listed(able)}; or take its settings out too: experiment, task and overrides bring some"
        return Problem(where=key, what=what, hint=hint)
    hint = f"{near(key, known)}; a stage or component is added by +GROUP@{key}=OPTION"
    return Problem(where=key, what="no such setting", hint=hint)


def _name_problems(name: str) -> Iterator[Problem]:
    """It becomes a part of a folder's name, which has 255 bytes on most file systems, and no '/' in it."""
    odd = sorted({c for c in name if not (c.isalnum() or c in "._-")})
    if odd or not name or len(name.encode()) > 100:
        why = f"holds {' '.join(map(repr, odd))}" if odd else "is empty" if not name else "is longer than 100 bytes"
        what = f"'{name[:40]}{'...' if len(name) > 40 else ''}' {why}, and it names the run directory"
        yield Problem(where="name", what=what, hint="letters, digits, '.', '_' and '-', at most 100 bytes")


def _typed(where: str, node: DictConfig, schema: type, whole: DictConfig | None = None) -> tuple[Any, list[Problem]]:
    """The node as an instance of its schema, and what was wrong; None if it cannot be made, as a value is missing.

    A bad key or value is reported and left out, so that its schema's default stands in for the rest of the checks.
    `whole` is the configuration that the node is part of.
    """
    problems = list(_misplaced(where, node, schema, whole))
    for p in problems:
        _leave_out(node, p.where.removeprefix(f"{where}."))
    while True:
        try:
            merged = node
            if problems or OmegaConf.get_type(node) is not schema:  # else it is what merging would make anew
                merged = OmegaConf.merge(OmegaConf.structured(schema), node)
                merged._set_parent(node._get_parent())
            if missing := sorted(OmegaConf.missing_keys(merged)):
                told = {p.where for p in problems}
                missing = [k.removeprefix(f"{where}.") for k in missing]
                absent = (k for k in missing if _path(where, k) not in told)
                return None, [*problems, *(_not_given(_path(where, k), find(schema, k)) for k in absent)]
            value = OmegaConf.to_object(merged)
            return value, [*problems, *_unfit(where, value)]
        except (OmegaConfBaseException, ValueError) as e:
            key = str(getattr(e, "full_key", None) or "").removeprefix(f"{where}.")
            key = re.sub(r"\[(\d+)\]", r".\1", key)  # an item of a list
            problems.append(_mistyped(_path(where, key), node, key, schema, e))
            if not _leave_out(node, problems[-1].where.removeprefix(f"{where}.")):
                return None, problems


def _not_given(where: str, slot: Slot | None) -> Problem:
    hint = (slot.meta.get("doc") or words(slot.type)) if slot else "a value"
    return Problem(where=where, what="must be given", hint=hint)


def _mistyped(where: str, node: DictConfig, key: str, schema: type, error: Exception) -> Problem:
    try:
        slot, value = find(schema, key) if key else None, OmegaConf.select(node, key) if key else None
    except OmegaConfBaseException as e:  # an interpolation that leads nowhere
        given = OmegaConf.to_container(node, resolve=False)
        hint = r"it must name a setting or a variable that is there; for a literal '${' write '\${'"
        return Problem(where=where, what=f"{first_line(e)}, which its value refers to", hint=hint + _raw(given, key))
    if slot is None:
        return Problem(where=where, what=first_line(error), hint="see the schema's own words for this setting")
    inner, value, slot = innermost(OmegaConf.to_container(value) if OmegaConf.is_config(value) else value, slot)
    return refusal(_path(where, inner), value, slot)


def _raw(given: Any, key: str) -> str:
    for name in key.split("."):
        given = given.get(name) if isinstance(given, dict) else None
    return f" (its value is {given})" if given is not None else ""


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


def _misplaced(where: str, node: DictConfig, schema: type, whole: DictConfig | None) -> Iterator[Problem]:
    """Keys that the schema does not have, at any depth (`+key=value` brings them in past Hydra's own check), and
    single values where it has a section."""
    known = {f.name: f.default_factory for f in fields(schema)}
    for key in (str(k) for k in node):
        child, section = node._get_node(key), known.get(key)
        if key not in known:
            other = elsewhere(key, where.partition(".")[0], whole) if whole is not None else ""
            hint = other + near(key, known, "allowed here" if other else "allowed")
            yield Problem(where=_path(where, key), what="no such setting", hint=hint)
        elif isinstance(section, type) and is_dataclass(section):
            if isinstance(child, DictConfig):
                yield from _misplaced(_path(where, key), child, section, whole)
            else:
                yield _no_section(_path(where, key), child, section)


def _no_section(where: str, value: Any, section: type) -> Problem:
    keys = listed(f.name for f in fields(section))
    return Problem(where=where, what=f"is a section, and '{value}' is a single value", hint=f"its keys: {keys}")


def _unfit(where: str, value: Any) -> Iterator[Problem]:
    """Values outside what `setting(min=, max=, above=)` allows, and what is wrong inside of lists and dicts.

    The setting's default takes their place in what is checked afterwards: that nothing fits them is no news.
    """
    for f in fields(value):
        item, path = getattr(value, f.name), _path(where, f.name)
        if is_dataclass(item):
            yield from _unfit(path, item)
            continue
        if isinstance(f.default_factory, type) and is_dataclass(f.default_factory):  # an interpolation gave it
            problem = _no_section(path, item, f.default_factory)
        else:
            problem = _out_of_range(path, item, f.metadata) or _wrong_inside(path, item, type(value), f.name)
        if problem:
            yield problem
            default = f.default_factory() if callable(f.default_factory) else f.default
            if default is not MISSING:
                setattr(value, f.name, default)


def _out_of_range(where: str, item: Any, meta: Mapping[str, Any]) -> Problem | None:
    """NaN and infinity never are in a range. Of a list, its first item that is not."""
    if isinstance(item, list):
        found = (_out_of_range(f"{where}.{i}", inner, meta) for i, inner in enumerate(item))
        return next((p for p in found if p), None)
    if not isinstance(item, (int, float)) or isinstance(item, bool):
        return None
    limits = {name: meta[name] for name in _COMPARE if meta.get(name) is not None}
    finite = abs(item) < 2**63 if isinstance(item, int) else math.isfinite(item)
    if finite and all(_COMPARE[name](item, limit) for name, limit in limits.items()):
        return None
    large = "" if finite or item != item else ", and less than 2**63" if isinstance(item, int) else ", and finite"
    shown = str(item) if len(str(item)) < 25 else f"{str(item)[:24]}..."
    hint = f"must be {limits_of(meta) or 'a number'}{large}: {meta.get('doc')}"
    return Problem(where=where, what=f"{shown} is not allowed", hint=hint)


def _wrong_inside(where: str, item: Any, schema: type, name: str) -> Problem | None:
    slot = find(schema, name) if isinstance(item, (dict, list)) else None
    if slot is None or slot.takes(item):
        return None
    inner, value, slot = innermost(item, slot)
    return refusal(_path(where, inner), value, slot)


_COMPARE: dict[str, Callable[[float, float], bool]] = {"min": operator.ge, "max": operator.le, "above": operator.gt}


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
