"""The points of a sweep: the command lines that Hydra's sweeper will make of one, known before the first starts.

Hydra parses (`a,b`, `range`, `choice`, `glob`, `${...}`), multiplies, names the directories and starts the jobs; this
module asks it beforehand. What can only be known later, the next point of a search, is checked at its corners.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper, BasicSweeperConf
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from hydra.errors import HydraException

from pipeline import redact
from pipeline.config import CommandLine, Composed, assignment, composing, prepare, sweep_launching, written
from pipeline.disk import write_whole
from pipeline.errors import Problem
from pipeline.launching import Launching
from pipeline.plan import Plan
from pipeline.sweep.jobs import Job, Metrics, run_all
from pipeline.sweep.stop import Stop


def expand(line: CommandLine) -> tuple[list[CommandLine], list[Problem]]:
    """A command line for each point, each with its number, and what is wrong with the sweep as a whole.

    Only `line` itself where it is no sweep. PlanError if a plug-in does not import.
    """
    if not line.multirun:
        return [line], []
    prepare(line)
    with composing(line) as hydra:
        parser = OverridesParser.create(config_loader=hydra.config_loader)
        parsed, unreadable = _parse(parser, line.overrides)
        master = sweep_launching([str(o.input_line) for o in parsed if not o.is_sweep_override()])
        searched = master.settings["sweeper"].get("params") or {}
        params, bad_params = _parse(parser, [f"{key}={values}" for key, values in searched.items()])
        given = [*params, *(o for o in parsed if not o.is_hydra_override())]
        without = {id(o): what for o in given if (what := _without_values(o, is_grid(master)))}
        points = (_grid if is_grid(master) else _corners)([o for o in given if id(o) not in without])
    problems = [*_of_hydra(parsed), *master.problems]
    problems += [Problem(where="hydra.sweeper.params", what=f"'{text}' is no override") for text in bad_params]
    problems += [Problem(where=o.key_or_group, what=without[id(o)], hint=_VALUES) for o in given if id(o) in without]
    rest = (*(str(o.input_line) for o in parsed if o.is_hydra_override()), *unreadable)
    lines = [
        replace(line, overrides=(*point, *rest, *_numbered(number)), master=master)
        for number, point in enumerate(points)
    ]
    return lines, problems


def is_grid(master: Launching) -> bool:
    """Whether the points are known beforehand; else a search makes each from the results of others."""
    return master.settings["sweeper"]["_target_"] == BasicSweeperConf._target_


def common(every: Iterable[Sequence[str]]) -> set[str]:
    """The overrides that all points have."""
    return set.intersection(*map(set, every))


def distinct(overrides: Sequence[str], common: Collection[str]) -> list[str]:
    """The overrides that distinguish a point from others."""
    return [text for text in overrides if text not in common and not text.startswith("hydra.")]


def same_directory(plans: Sequence[Plan]) -> list[Problem]:
    """Whether each job has a directory of its own, just below that of the sweep."""
    names = [plan.configured.job_dir for plan in plans]
    what = {name: "two jobs or more would write there" for name, count in Counter(names).items() if count > 1}
    what |= {name: "is longer than 255 bytes" for name in names if len(name.encode()) > 255}
    what |= {name: "is no plain name" for name in names if "/" in name or name in {"", ".", ".."}}
    hint = "leave it out: jobs are numbered, and sweep.csv says which is which"
    return [Problem(where="hydra.sweep.subdir", what=f"'{n}': {w}", hint=hint) for n, w in what.items()]


def _numbered(number: int, identity: object = None) -> list[str]:
    return [f"hydra.job.num={number}", assignment("hydra.job.id", number if identity is None else identity)]


_VALUES = "a grid takes lists (1,2,3), ranges (range(1,4)) and globs; intervals are for a search, such as sweep=optuna"


def _parse(parser: OverridesParser, texts: Sequence[str]) -> tuple[list[Override], list[str]]:
    """Parsed overrides, and those that cannot be: composing a point with them tells what is wrong."""
    parsed, unreadable = list[Override](), list[str]()
    for text in texts:
        try:
            parsed += parser.parse_overrides([text])
        except HydraException:
            unreadable.append(text)
    return parsed, unreadable


def _of_hydra(parsed: Sequence[Override]) -> Iterator[Problem]:
    for o in parsed:
        if o.is_hydra_override() and o.is_sweep_override():
            what = "Hydra reads its own settings once, before the first point"
            yield Problem(where=o.key_or_group, what=what, hint="give one value, and sweep over other settings")
        if o.key_or_group == "hydra.mode":
            yield Problem(where="hydra.mode", what="-m says it already", hint="leave one of them out")


def _grid(overrides: Sequence[Override]) -> list[list[str]]:
    """What Hydra's basic sweeper makes."""
    return [point for batch in BasicSweeper.split_arguments(list(overrides), None) for point in batch]


def _corners(overrides: Sequence[Override]) -> list[list[str]]:
    """Of a search: the first value of each setting, then each other value alone. Of intervals and ranges the ends."""
    ends = {o.get_key_element(): _ends(o) for o in overrides}
    first = {key: values[0] for key, values in ends.items()}
    others = [first | {key: value} for key, values in ends.items() for value in values[1:]]
    return [[f"{key}={value}" for key, value in point.items()] for point in (first, *others)]


def _ends(override: Override) -> list[str]:
    value = override.value()
    if isinstance(value, IntervalSweep):
        return [str(value.start), str(value.end)]
    if not override.is_sweep_override():
        return [str(override.get_value_element_as_str())]
    values = list(override.sweep_string_iterator())
    return [values[0], values[-1]] if isinstance(value, RangeSweep) else values


def _without_values(override: Override, grid: bool) -> str | None:
    if override.is_interval_sweep():
        return "an interval holds no list of values, which a grid needs" if grid else None
    if override.is_sweep_override() and not list(override.sweep_string_iterator()):
        return f"'{override.input_line}' stands for no value, so there would be no job"
    return None


# -- running them ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Points:
    """What Hydra's launchers call for each point, in whatever process: the job runs in a process of its own.

    Its value, for sweepers that search: the metrics of the last step; None if the job failed.
    """

    config_dir: Path | None
    folder: Path
    stop: Stop

    def __call__(self, cfg: Composed) -> Metrics | None:
        self.stop.leave_to_owner()
        job = self.job(HydraConfig.get())
        return run_all([job], self.stop, [{}]).get(job.number)

    def job(self, hydra: Any) -> Job:
        """`hydra`: that section of the composed configuration of a point."""
        _hide_secrets(self.folder / "multirun.yaml")
        folder, task = self.folder / str(hydra.sweep.subdir), written(hydra.overrides.task)
        flags = ["--config-dir", str(self.config_dir)] if self.config_dir else []
        kept = [text for text in written(hydra.overrides.hydra) if not text.startswith(_SET_ANEW)]
        anew = [assignment("hydra.sweep.dir", self.folder), assignment("hydra.run.dir", folder)]
        arguments = (*flags, *task, *kept, *anew, *_numbered(hydra.job.num, hydra.job.id))
        return Job(
            number=hydra.job.num, folder=folder, overrides=task, arguments=arguments, cwd=Path(hydra.runtime.cwd)
        )


def _hide_secrets(saved: Path) -> None:
    """In what Hydra has written of the sweep, before any job starts."""
    try:
        found = saved.read_text("utf-8")
    except OSError:
        return  # another sweeper may write none
    if (kept := redact.text(found)) != found:
        write_whole(saved, kept)


_SET_ANEW = (
    *("hydra/launcher", "hydra/sweeper", "hydra.launcher.", "hydra.sweeper."),
    *("hydra.sweep.dir=", "hydra.run.dir=", "hydra.mode="),
)
"""What a job is not given: how the sweep was started."""


def launch(line: CommandLine, points: Points) -> None:
    """Have Hydra start every point of a sweep."""
    overrides = [*line.overrides, assignment("hydra.sweep.dir", points.folder), "hydra.mode=MULTIRUN"]
    with composing(line) as hydra:
        hydra.multirun("config", points, overrides)
