"""The cells of a comparison: every option of the first axis with every option of the second, and how each is run."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import product
from pathlib import Path
from typing import get_origin

from pipeline import config, quoting
from pipeline.config import AxisSettings, CommandLine, CompareSettings, Mode, RootConfig, assignment
from pipeline.errors import Problem, closest, listed, near
from pipeline.slots import Slot
from pipeline.sweep.jobs import Job

SHARED_STEP = 1
"""The step whose rows are compared: every cell makes it with the same weights, for none has learned anything yet."""

Groups = Mapping[str, Sequence[str]]
SlotOf = Callable[[str], Slot | None]


@dataclass(frozen=True, slots=True)
class Cell:
    """One choice on each axis. `number` 0 is the baseline."""

    number: int
    choices: tuple[tuple[str, str], ...]

    @property
    def name(self) -> str:
        """`hf`, or `hf, overlap` of two axes."""
        return ", ".join(option or "''" for _, option in self.choices)

    @property
    def overrides(self) -> tuple[str, ...]:
        return tuple(_override(axis, option) for axis, option in self.choices)


def _override(axis: str, option: str) -> str:
    """Words and numbers as they are, so that they can be read; any other text in quotes."""
    return f"{axis}={option}" if re.fullmatch(r"[\w./+-]+", option, re.ASCII) else assignment(axis, option)


def axes(settings: CompareSettings) -> dict[str, AxisSettings]:
    """The axes that were given, by where they stand in the configuration."""
    first = AxisSettings(axis=settings.axis, options=settings.options)
    second = {"compare.second": settings.second} if settings.second.axis or settings.second.options else {}
    return {"compare": first} | second


def cells(settings: CompareSettings) -> list[Cell]:
    given = [[(a.axis, option) for option in a.options] for a in axes(settings).values()]
    return [Cell(number, choices) for number, choices in enumerate(product(*given))]


# -- planning ----------------------------------------------------------------------------------------------------


def is_asked(line: CommandLine) -> bool:
    """Whether the command line says `mode=compare`."""
    modes = [text.partition("=")[2].strip() for text in line.overrides if quoting.key_of(text) == "mode"]
    return bool(modes) and modes[-1] == "compare"


def expand(line: CommandLine) -> tuple[list[CommandLine], list[Problem]]:
    """A command line for each cell, in order, and what is wrong with the comparison as a whole.

    Options that do not exist make no cell. Without any cell `line` itself, so that the rest of it is checked. PlanError
    if nothing can be composed.
    """
    root = config.load(line)[0].root
    groups, slot_of = config.changeable(line)
    bad: dict[str, list[Problem]] = {
        where: [*_axis_problems(where, axis, line, groups, slot_of), *_options_problems(where, axis, groups)]
        for where, axis in axes(root.compare).items()
    }
    problems = [*(p for found in bad.values() for p in found), *_second_problems(root.compare)]
    if any(p.where.endswith("axis") for p in problems) or not root.compare.axis:
        return [line], problems
    settings, more = _possible(root.compare, groups), _additions(line, root.compare)
    if not root.run.steps:  # there is none to keep; that none is counted is what is wrong
        more = [text for text in more if quoting.key_of(text) != "run.keep_records"]
    lines = [replace(line, overrides=(*line.overrides, *more, *cell.overrides)) for cell in cells(settings)]
    return lines or [line], problems


def _possible(settings: CompareSettings, groups: Groups) -> CompareSettings:
    """Without options that do not exist, and with each once."""

    def those(axis: str, options: Sequence[str]) -> list[str]:
        return [option for option in dict.fromkeys(options) if _exists(axis, option, groups)]

    second = replace(settings.second, options=those(settings.second.axis, settings.second.options))
    return replace(settings, options=those(settings.axis, settings.options), second=second)


def check(line: CommandLine, root: RootConfig) -> Iterator[Problem]:
    """Of one command line, planned: what its own steps leave to count, and whether it asks for a comparison where there
    is none, in a sweep, in a run or by a recipe."""
    if root.mode is Mode.compare:
        yield from _steps_problems(root)
        if line.master:
            hint = "leave -m out, and give what varies as compare.axis and compare.options"
            yield Problem(where="mode", what="compare starts its own runs, which a sweep cannot sweep over", hint=hint)
        elif not is_asked(line):
            yield Problem(where="mode", what="compare is asked for by a recipe", hint="give mode=compare in words")
        return
    yield from unread(line)


def unread(line: CommandLine) -> Iterator[Problem]:
    """Settings of a comparison where none is asked for: whoever forgot the mode would start a run."""
    for text in () if is_asked(line) else line.overrides:
        if (key := quoting.key_of(text)) == "compare" or key.startswith("compare."):
            hint = "add mode=compare, or leave it out"
            yield Problem(where=key, what="only mode=compare reads it, and this is none", hint=hint)


def _additions(line: CommandLine, settings: CompareSettings) -> list[str]:
    """What a compared run has apart from the user's settings and its options."""
    given = {quoting.key_of(text) for text in line.overrides}
    added = {"run.keep_records": f"[{SHARED_STEP}]"} | ({} if settings.whole_runs else {"run.only_steps": "true"})
    return [f"{key}={value}" for key, value in added.items() if key not in given]


_OF_THE_PROGRAM = ("mode", "compare", "plan", "hydra")


def _axis_problems(
    where: str, axis: AxisSettings, line: CommandLine, groups: Groups, slot_of: SlotOf
) -> Iterator[Problem]:
    name, at = axis.axis, f"{where}.axis"
    allowed = sorted(groups)
    if not name:
        hint = f"a group ({listed(allowed)}) or a setting, such as loader.batch_size"
        yield Problem(where=at, what="must be given", hint=hint)
        return
    if re.split(r"[./]", name)[0] in _OF_THE_PROGRAM:
        yield Problem(where=at, what=f"'{name}' says what is done and not what is run", hint=near(name, allowed))
        return
    slot = slot_of(name)
    if name not in groups and (slot is None or is_dataclass(slot.type)):
        what = f"there is no group and no setting '{name}'"
        yield Problem(where=at, what=what, hint=_near_setting(name, slot_of) or _near_group(name, allowed))
    elif name not in groups and slot and get_origin(slot.type) in (dict, list):
        yield Problem(where=at, what=f"'{name}' holds several values", hint="choose a setting of one value")
    if any(quoting.key_of(text) == name for text in line.overrides):
        hint = f"leave it out, or put it first in {where}.options, which makes it the baseline"
        yield Problem(where=name, what=f"is given, and {at} compares it", hint=hint)


def _near_group(name: str, groups: Sequence[str]) -> str:
    return f"{near(name, groups, 'groups')}; a setting is NODE.NAME"


def _near_setting(name: str, slot_of: SlotOf) -> str:
    """What stands in the section that a name points into; nothing if there is none."""
    path, _, leaf = name.rpartition(".")
    section = slot_of(path) if path else None
    if section is None or not is_dataclass(section.type):
        return ""
    known = [f.name for f in fields(section.type)]
    match = closest(leaf, known)
    return (f"did you mean '{path}.{match}'? " if match else "") + f"in '{path}' there are: {listed(known)}"


def _options_problems(where: str, axis: AxisSettings, groups: Groups) -> Iterator[Problem]:
    at, known = f"{where}.options", groups.get(axis.axis)
    if len(axis.options) < 2:
        what = (
            f"{len(axis.options) or 'no'} option{'s' if not axis.options else ''}, and a comparison needs two or more"
        )
        hint = f"of the group '{axis.axis}': {listed(known)}" if known else f"such as {at}=[a,b]"
        yield Problem(where=at, what=what, hint=hint)
    for option, count in Counter(axis.options).items():
        if count > 1:
            hint = "give each once; compare.repeats says how often each is run"
            yield Problem(where=at, what=f"'{option}' stands there {count} times", hint=hint)
        if not _exists(axis.axis, option, groups):
            what = f"there is no '{option}' in the group '{axis.axis}'"
            yield Problem(where=at, what=what, hint=near(option, known or ()))


def _exists(axis: str, option: str, groups: Groups) -> bool:
    return axis not in groups or option in groups[axis]


def _second_problems(settings: CompareSettings) -> Iterator[Problem]:
    if settings.axis and settings.axis == settings.second.axis:
        what = f"'{settings.axis}' is the first axis too"
        yield Problem(where="compare.second.axis", what=what, hint="choose another")


def _steps_problems(root: RootConfig) -> Iterator[Problem]:
    steps, warmup = root.run.steps, root.compare.warmup
    if steps <= warmup:
        what = f"{steps}, and the first {warmup} (compare.warmup) are not counted: none would be"
        yield Problem(where="run.steps", what=what, hint=f"more than {warmup}; or a smaller compare.warmup")


# -- running -----------------------------------------------------------------------------------------------------


def command(line: CommandLine, settings: CompareSettings, cell: Cell) -> tuple[str, ...]:
    """The arguments of run.py that repeat a run of the cell, in a directory of its own."""
    flags = ["--config-dir", str(line.config_dir)] if line.config_dir else []
    kept = [text for text in line.overrides if not _of_the_comparison(quoting.key_of(text))]
    return (*flags, *kept, *_additions(line, settings), *cell.overrides)


def _of_the_comparison(key: str) -> bool:
    return key in ("mode", "compare", "hydra.run.dir") or key.startswith("compare.")


def jobs(line: CommandLine, settings: CompareSettings, folder: Path) -> list[tuple[Cell, int, Job]]:
    """Every run, as (cell, round, job), in the order in which they are started.

    Each round has every cell once. Every second round goes backwards, so that a machine that grows slower and slower
    hits all cells alike: of the rounds 1 2 3 and 3 2 1 each cell has the same mean place.
    """
    every = cells(settings)
    order = [(cell, r) for r in range(settings.repeats) for cell in (every if r % 2 == 0 else every[::-1])]
    made: list[tuple[Cell, int, Job]] = []
    for number, (cell, repeat) in enumerate(order):
        place = folder / "runs" / f"{cell.number}-{_plain(cell.name)}-{repeat + 1}"
        arguments = (*command(line, settings, cell), assignment("hydra.run.dir", place))
        job = Job(number=number, folder=place, overrides=cell.overrides, arguments=arguments, cwd=Path.cwd())
        made.append((cell, repeat, job))
    return made


def _plain(name: str) -> str:
    """As a part of a folder's name; what makes it unique stands before it."""
    return re.sub(r"[^\w.+-]+", "-", name, flags=re.ASCII).strip("-.")[:60]
