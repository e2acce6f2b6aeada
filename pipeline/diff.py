"""What differs between two plans, or two runs, in wiring and settings, versions and final metrics."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline import quoting
from pipeline.config import CommandLine, Mode, PlanSettings, RootConfig
from pipeline.errors import PlanError, Problem, listed
from pipeline.metrics import steps_of

Change = tuple[Any, Any]
"""A value in `a` and in `b`; ABSENT where one has none."""

ABSENT = "(absent)"
_OF_THE_COMMAND = ("mode", "plan.")
"""Settings that say what to do with a plan, and not what it is."""


@dataclass(frozen=True, slots=True)
class Side:
    """One plan or run, flat: config path -> value, package -> version, metric -> its last value."""

    settings: dict[str, Any]
    versions: dict[str, Any]
    metrics: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Difference:
    """What is not the same, by name. `speed`: metrics of time and memory, which never are the same twice."""

    settings: dict[str, Change]
    versions: dict[str, Change]
    metrics: dict[str, Change]
    speed: dict[str, Change]

    def __bool__(self) -> bool:
        """Whether anything differs but the speed."""
        return bool(self.settings or self.versions or self.metrics)

    def plain(self) -> dict[str, dict[str, dict[str, Any]]]:
        sections = {"settings": self.settings, "versions": self.versions, "metrics": self.metrics, "speed": self.speed}
        return {name: {k: {"a": a, "b": b} for k, (a, b) in s.items()} for name, s in sections.items()}


def unread(line: CommandLine, root: RootConfig) -> Iterator[Problem]:
    """`plan.a` and `plan.b` where nothing is compared: whoever forgot the mode would start a run."""
    keys = {quoting.key_of(text) for text in line.overrides} if root.mode is not Mode.diff else ()
    for key in ("plan.a", "plan.b"):
        if key in keys:
            hint = "add mode=diff, or leave it out"
            yield Problem(where=key, what="only mode=diff reads it, and this is none", hint=hint)


def compare(settings: PlanSettings) -> Difference:
    """PlanError if one of the two cannot be read."""
    problems: list[Problem] = []
    sides = [_read(f"plan.{name}", getattr(settings, name), problems) for name in ("a", "b")]
    if problems:
        raise PlanError(problems)
    a, b = (s for s in sides if s)
    metrics = _changes(a.metrics, b.metrics) if a.metrics and b.metrics else {}  # a plan has none
    speed = {name: change for name, change in metrics.items() if _is_speed(name)}
    return Difference(
        _changes(a.settings, b.settings),
        _changes(a.versions, b.versions),
        {name: change for name, change in metrics.items() if name not in speed},
        speed,
    )


def _is_speed(name: str) -> bool:
    return name.startswith(("time/", "memory/", "gpu/")) or name.endswith(("_s", "_gb"))  # waits and rates too


def _changes(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Change]:
    pairs = {k: (a.get(k, ABSENT), b.get(k, ABSENT)) for k in (*a, *(k for k in b if k not in a))}
    return {k: (x, y) for k, (x, y) in pairs.items() if x != y and not (_is_nan(x) and _is_nan(y))}


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


# -- reading -------------------------------------------------------------------------------------------------


def _read(where: str, path: str, problems: list[Problem]) -> Side | None:
    hint = "give a run directory (it holds plan.json), or a file made by: python run.py mode=plan plan.format=json"
    given = Path(path).expanduser()
    file = given / "plan.json" if given.is_dir() else given
    if not path:
        problems.append(Problem(where=where, what="must be given for mode=diff", hint=hint))
    elif not file.is_file():
        near_by = sorted(f"{f.parent}" for f in given.glob("**/plan.json")) if given.is_dir() else []
        runs = f"; runs below it: {listed(near_by[-3:])}" if near_by else ""
        problems.append(Problem(where=where, what=f"there is no plan at '{path}'", hint=hint + runs))
    else:
        try:
            plan = json.loads(file.read_text("utf-8"))
            return Side(dict(_settings(plan)), dict(plan["versions"]), _last_metrics(file.parent, given.is_dir()))
        except (ValueError, TypeError, KeyError) as e:
            what = f"'{file}' is no plan: {type(e).__name__}: {e}"
            problems.append(Problem(where=where, what=what, hint=hint))
    return None


def _settings(plan: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The choices of backends and all settings, by config path."""
    for section in ("nodes", "components"):
        for key, part in plan[section].items():
            yield key, f"{part['role']}={part['backend']}"
    for key, value in _flat("", plan["settings"]):
        if not key.startswith(_OF_THE_COMMAND):
            yield key, value


def _flat(where: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(f"{where}.{key}" if where else key, inner)
    else:
        yield where, value


def _last_metrics(folder: Path, is_run: bool) -> dict[str, Any]:
    """The last value of each metric, for not every step has all; {} of a plan, and of a run that made no step."""
    return {name: value for step in steps_of(folder) for name, value in step.items()} if is_run else {}


# -- showing -------------------------------------------------------------------------------------------------


def render(difference: Difference, a: str, b: str) -> str:
    """Sections of `name: in a -> in b`; numbers also with what b is above a."""
    blocks = [f"a: {a}\nb: {b}"]
    for name, changes in (
        ("settings", difference.settings),
        ("versions", difference.versions),
        ("final metrics", difference.metrics),
        ("speed and memory (not counted as a difference)", difference.speed),
    ):
        if changes:
            blocks.append("\n".join([name, *(f"  {key}: {_change(*change)}" for key, change in changes.items())]))
    if not difference:
        blocks.append("no difference in settings, versions and final metrics")
    return "\n\n".join(blocks)


def _change(a: Any, b: Any) -> str:
    both = all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in (a, b))
    more = f"  ({b - a:+.4g})" if both else ""
    return f"{_shown(a)} -> {_shown(b)}{more}"


def _shown(value: Any) -> str:
    return (
        f"{value:.6g}"
        if isinstance(value, float)
        else json.dumps(value, ensure_ascii=False)
        if value != ABSENT
        else value
    )
