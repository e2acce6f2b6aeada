"""The writer: a user's verl configuration as a recipe of ours, and the report of what became of each of its keys."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from importers.verl import table, values
from importers.verl.source import Config, Given, Untold, read
from importers.verl.table import Rule
from pipeline import config
from pipeline.compose import compose_all
from pipeline.errors import PlanError, Problem, closest

DUMP = 150
"""A file with more keys is a whole configuration: what it leaves at verl's default is counted and not listed."""

ORDER = ("name", "seed", "run", "eval", "tracker", "model", "loader", "eval_loader", "rollout", "reward", "critic")


UNREAD = (ValueError, TypeError, AttributeError, ArithmeticError)
"""A value that the file does not tell, or of another kind than verl takes: a text for a number, no batch at all."""


class Kind(Enum):
    mapped = "mapped"
    differs = "mapped, with a difference"
    none = "no equal here"
    unknown = "no key of verl's configuration"


@dataclass(frozen=True, slots=True)
class Line:
    """What became of one key of the file."""

    given: Given
    kind: Kind
    settings: Mapping[str, Any]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Recipe:
    """`text` is the recipe as YAML, with the report on top; `report` is for the terminal."""

    text: str
    report: str


def bring(path: Path, name: str) -> Recipe:
    """PlanError with everything in the file that cannot be read."""
    c = read(path)
    lines = [classify(c, given) for given in c.given.values()]
    settings, sources = settings_of(c)
    choices = {"pipeline": "", **{k[1:]: str(v) for k, v in settings.items() if k.startswith("/")}}  # it stands first
    wanted = {"name": name} | {k: v for k, v in settings.items() if not k.startswith("/")}
    base, by_itself = composed(choices), composed({"pipeline": choices["pipeline"]}).hydra.runtime.choices
    changed = {k: v for k, v in wanted.items() if not same_as(base, k, v)}
    chosen = {k: v for k, v in choices.items() if k == "pipeline" or by_itself.get(k) != v}
    report = list(_report(c, lines, changed, sources))
    head = (
        f"From {path.name}, of verl {c.version}: `python run.py import.verl=...` wrote it; docs/verl.md has the table."
    )
    text = "\n".join(_recipe(head, report, chosen, changed, sources)) + "\n"
    return Recipe(text, "\n".join(report))


# -- keys --------------------------------------------------------------------------------------------------------


def classify(c: Config, given: Given) -> Line:
    """Exactly one kind for each key that the file sets."""
    rule = table.find(given.key)
    if given.key.startswith("hydra."):
        return Line(given, Kind.none, {}, "Hydra's own: `hydra.run.dir`, `-m` and the launchers are in the README")
    known = given.key in c.known or not c.complete or (rule is not None and rule.open) or _below_empty(c, given.key)
    if rule is None or not known:
        return Line(given, Kind.unknown, {}, _near(c, given))
    if given.removed:
        return Line(given, Kind.none, {}, "nothing is removed here: what is not set has its default")
    try:
        settings, same = rule.settings(c), rule.same(c) if rule.same else False
    except UNREAD as e:
        return Line(given, Kind.differs if rule.here else Kind.none, {}, f"not carried over: {_why(e)}")
    if rule.here:
        lost = bool(rule.note) and not same
        return Line(given, Kind.differs if lost else Kind.mapped, settings, rule.note if lost else rule.how)
    return Line(given, Kind.mapped if same else Kind.none, {}, rule.note)


def _why(error: Exception) -> str:
    return str(error) if isinstance(error, Untold) else f"verl would not take such a value: {error}"


def _below_empty(c: Config, key: str) -> bool:
    """verl's configuration has an empty section there, for names of the user's own."""
    return any(key.startswith(f"{k}.") and OmegaConf.select(c.default, k) == {} for k in c.known)


def _near(c: Config, given: Given) -> str:
    leaf = given.key.rpartition(".")[2]
    match = closest(given.key, c.known) or next((k for k in sorted(c.known) if k.endswith(f".{leaf}")), None)
    own = "; it was added with '+', for code of its own" if given.added and "+" in given.raw[:3] else ""
    return (f"did you mean {match}?" if match else "nothing in it is like it") + own


def settings_of(c: Config) -> tuple[dict[str, Any], dict[str, str]]:
    """All settings that verl's configuration amounts to, and for each the key that says so, a given one first.

    PlanError for values that the file does not tell.
    """
    made: dict[str, Any] = {}
    sources: dict[str, str] = {}
    problems: dict[str, Problem] = {}
    for rule in (r for r in table.RULES if r.here):
        for key in _keys(rule, c):
            try:
                found = rule.settings(c)
            except UNREAD as e:
                if not rule.given:
                    why, hint = _why(e), "write a value that verl takes into the file"
                    problems.setdefault(why, Problem(where=key, what=why, hint=hint))
                continue
            for path, value in found.items():
                if path not in sources or key in c.given:
                    sources[path] = key
                made[path] = value
    if problems:
        raise PlanError(problems.values())
    return made, sources


def _keys(rule: Rule, c: Config) -> Iterable[str]:
    if "*" not in rule.keys:
        return [rule.keys]
    return [k for k in c.given if table.find(k) is rule][:1]


# -- our defaults ------------------------------------------------------------------------------------------------


def composed(choices: Mapping[str, str]) -> DictConfig:
    """Our configuration with these options and without a task: what the recipe need not say."""
    line = config.parse(["~task", *(f"{group}={option}" for group, option in choices.items())])
    if problems := config.prepare(line):
        raise PlanError(problems)
    with config.composing(line):
        cfg, problems = compose_all(line.overrides, config.slot_of)
    if problems:
        raise PlanError(problems)
    return cfg


def same_as(base: DictConfig, path: str, value: Any) -> bool:
    """Whether our configuration has the value already."""
    parent, _, leaf = path.rpartition(".")
    node = OmegaConf.select(base, parent) if parent else base
    if not isinstance(node, DictConfig) or leaf not in node or OmegaConf.is_missing(node, leaf):
        return False
    own = node[leaf]
    own = OmegaConf.to_container(own) if OmegaConf.is_config(own) else getattr(own, "value", own)
    return own is None if value is values.NULL else own == value


# -- the report --------------------------------------------------------------------------------------------------


def _report(c: Config, lines: list[Line], changed: Mapping[str, Any], sources: Mapping[str, str]) -> Iterator[str]:
    dump = len(lines) > DUMP
    shown = [n for n in lines if not (dump and n.given.key in c.known and c.at_default(n.given.key))]
    if len(shown) < len(lines):
        yield f"{len(lines) - len(shown)} keys have verl's own default values."
    for kind in Kind:
        if those := [n for n in shown if n.kind is kind]:
            yield f"{kind.value}{' ' + c.version if kind is Kind.unknown else ''} ({len(those)}):"
            for line in those:
                yield from _told(line, changed)
    carried = {p: k for p, k in sources.items() if p in changed and k not in c.given}
    if carried:
        yield f"carried over from verl's defaults, which are not ours ({len(carried)}):"
        for path, key in carried.items():
            yield f"  {key}: {path}={_plain(changed[path])}"
    if "run.steps" in changed and (how := values.steps(c)[1]):
        yield f"run.steps={changed['run.steps']}: {how}"
    if c.notes:
        yield f"in the file, and not of the command ({len(c.notes)}):"
        yield from (f"  {note}" for note in c.notes)


def _told(line: Line, changed: Mapping[str, Any]) -> Iterator[str]:
    raw = " ".join(line.given.raw.split())
    ours = [k for k in line.settings if k not in changed and k[0] != "/"]
    made = [f"{k.lstrip('/')}={_plain(v)}{' (the default)' * (k in ours)}" for k, v in line.settings.items()]
    as_here = ["as it is here"] if line.kind is Kind.mapped else []
    yield f"  {raw}" + (f"  ->  {', '.join(made or as_here)}" if made or as_here else "")
    if line.note and line.kind is not Kind.mapped:
        yield f"      {line.note}"


def _plain(value: Any) -> str:
    return _yaml(value) if value is not values.NULL else "null"


# -- the file ----------------------------------------------------------------------------------------------------


def _recipe(
    head: str, report: list[str], choices: Mapping[str, str], changed: Mapping[str, Any], sources: Mapping[str, str]
) -> Iterator[str]:
    yield "# @package _global_"
    yield f"# {head}"
    for line in report:
        indent = " " * (len(line) - len(line.lstrip()))
        wrapped = textwrap.TextWrapper(130, break_long_words=False, break_on_hyphens=False)
        wrapped.initial_indent, wrapped.subsequent_indent = "# ", f"#   {indent}"
        yield from wrapped.wrap(_printable(line))
    yield "defaults:"
    for group, option in choices.items():
        yield f"  - override /{group}: {option}"
    yield "  - override /task: null"
    yield "  - _self_"
    tree: dict[str, Any] = {}
    for path in sorted(changed, key=_place):
        *sections, leaf = path.split(".")
        node = tree
        for name in sections:
            node = node.setdefault(name, {})
        node[leaf] = (changed[path], sources.get(path, ""))
    for name, inner in tree.items():
        yield from _node(name, inner, "")


def _place(path: str) -> int:
    top = path.partition(".")[0]
    return ORDER.index(top) if top in ORDER else len(ORDER)


def _node(name: str, inner: Any, indent: str) -> Iterator[str]:
    if isinstance(inner, dict):
        yield f"{indent}{_yaml(name)}:"
        for key, value in inner.items():
            yield from _node(key, value, f"{indent}  ")
        return
    value, source = inner
    yield f"{indent}{_yaml(name)}: {_plain(value)}" + (f"  # {_printable(source)}" if source else "")


def _yaml(value: Any) -> str:
    """On one line; an interpolation in a text stays text."""
    if isinstance(value, str) and value != values.UNTOLD:
        value = re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    made = yaml.safe_dump(value, default_flow_style=True, width=10**9, allow_unicode=True).strip()
    return made.removesuffix("...").strip()


def _printable(text: str) -> str:
    return "".join(ch if ch.isprintable() else " " for ch in text)
