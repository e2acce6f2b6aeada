"""From a command line to an exit status: plan, explain what is wrong, or hand over to Hydra and execute."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig

from pipeline import config, diff, disk, importing, plan, redact, running
from pipeline.compare import cells, work
from pipeline.config import CommandLine, Composed, Mode, PlanFormat, parse
from pipeline.disk import DiskError
from pipeline.errors import PlanError, Problem
from pipeline.importing import asked as asks_for_import
from pipeline.plan import Plan
from pipeline.run_dir import claim
from pipeline.show import as_json, show
from pipeline.sweep.board import Board
from pipeline.sweep.jobs import LOG, RECORD, end_with_parent
from pipeline.sweep.points import Points, common, distinct, expand, is_grid, launch, same_directory
from pipeline.sweep.stop import Stop

__all__ = ["asks_for_import", "begin", "bring", "compare", "hydra_run", "is_comparison", "is_execution"]
__all__ += ["parse_or_explain", "plan_or_explain", "sweep", "tell"]

# No stage downloads anything or tells anybody anything; set before the libraries are imported.
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "DO_NOT_TRACK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TOKENIZERS_PARALLELISM": "false",
}


def begin() -> None:
    """To be called first in a process of `run.py`."""
    end_with_parent()
    redact.guard_streams()


def parse_or_explain(argv: Sequence[str]) -> CommandLine | None:
    """The command line; None after telling on standard error which flags cannot be used."""
    try:
        return parse(argv)
    except PlanError as e:
        explain(e)
        return None


def plan_or_explain(line: CommandLine) -> list[Plan] | None:
    """The plan of each point of a sweep or cell of a comparison, or the only one; None after printing every problem on
    standard error."""
    gc.disable()  # a plan makes many objects and hardly any garbage: looking for it takes a tenth of the time
    try:
        return _plan_or_explain(line)
    finally:
        gc.enable()
        gc.freeze()  # nor is there any later in what was imported and planned, in a run or at the end of the process


def _plan_or_explain(line: CommandLine) -> list[Plan] | None:
    try:
        compares = cells.is_asked(line) and not line.multirun
        lines, problems = cells.expand(line) if compares else expand(line)
    except PlanError as e:
        lines, problems = [], list(e.problems)
    plans: list[Plan] = []
    found: dict[Problem, list[CommandLine]] = {}
    for point in lines:
        try:
            plans.append(made := plan.make(point))
            bad = [*cells.check(point, made.root), *diff.unread(point, made.root)]
            bad += _taken(made) if is_execution(made) else ()
        except PlanError as e:
            bad = [*e.problems, *cells.unread(point)]
        for problem in bad:
            found.setdefault(problem, []).append(point)
    problems += [_of_points(problem, points, lines) for problem, points in found.items()]
    problems += same_directory(plans) if line.multirun else []
    if problems:
        explain(PlanError(dict.fromkeys(problems)))
        return None
    return plans


def _of_points(problem: Problem, points: Sequence[CommandLine], every: Sequence[CommandLine]) -> Problem:
    """The problem, with the points of a sweep that have it, unless all have."""
    if len(points) == len(every):
        return problem
    own = " ".join(distinct(points[0].overrides, common(line.overrides for line in every)))
    where = f"at the point {own}" + (f" and {len(points) - 1} more" if len(points) > 1 else "")
    return replace(problem, hint=f"{problem.hint}\n    {where}" if problem.hint else where)


def _taken(made: Plan) -> Iterator[Problem]:
    """Whether the directory that Hydra will write into holds something."""
    of_sweep = made.configured.master
    kind, folder = ("sweep", of_sweep.folder) if of_sweep else ("run", made.configured.run_dir)
    where, hint = f"hydra.{kind}.dir", "choose a new directory, or leave it out"
    if any(len(os.fsencode(part)) > 255 for part in folder.parts):
        yield Problem(where=where, what=f"'{folder}' has a name of more than 255 bytes", hint=hint)
        return
    if bad := disk.unfit(folder):
        yield Problem(where=where, what=bad, hint="make it writable and make room, or choose another place")
        return
    just_made = (folder / RECORD).exists()  # for a job, by its sweep; `claim` looks at what lies there
    if folder.is_dir() and any(folder.iterdir()) and not just_made:
        what = f"'{folder}' exists and is not empty; a run never writes into the files of another"
        yield Problem(where=where, what=what, hint=hint)


def explain(
    error: PlanError,
    last: str = "Nothing was started and nothing was written.",
    first: str = "The configuration cannot run",
) -> None:
    """Every problem on standard error, between a line that says what failed and one that says what became of it."""
    errors = [p for p in error.problems if p.level == "error"]
    print(f"{first}: {len(errors)} problem{'s' if len(errors) != 1 else ''}.", file=sys.stderr)
    for p in error.problems:
        print(f"  {'warning: ' if p.level == 'warning' else ''}{p}", file=sys.stderr)
    print(last, file=sys.stderr)


def bring(argv: Sequence[str]) -> int:
    """Another framework's configuration as a recipe, as `import.FROM=PATH` asks for."""
    try:
        print(importing.bring(argv))
    except PlanError as e:
        explain(e, "Nothing was written.", "Nothing can be imported")
        return 2
    return 0


def tell(plans: Sequence[Plan]) -> int:
    """Print what was asked for instead of a run, and its exit status: of mode=diff, 1 if the two differ."""
    first = plans[0].root
    as_is = first.plan.format is PlanFormat.json
    if first.mode is Mode.diff:
        try:
            found = diff.compare(first.plan)
        except PlanError as e:
            explain(e)
            return 2
        print(json.dumps(found.plain(), indent=1) if as_is else diff.render(found, first.plan.a, first.plan.b))
        return int(bool(found))
    if as_is and len(plans) > 1:
        print("[" + ",\n".join(map(as_json, plans)) + "]")
    else:
        print(*map(show, plans), sep="\n\n")
    return 0


def is_execution(made: Plan) -> bool:
    return made.root.mode in (Mode.run, Mode.compare)


def is_comparison(made: Plan) -> bool:
    return made.root.mode is Mode.compare


def compare(line: CommandLine, plans: Sequence[Plan]) -> int:
    """Every cell of a comparison, in processes of their own. 1 if one failed; 130 or 143 after a signal."""
    first = plans[0]
    folder = first.configured.run_dir.absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        explain(PlanError([Problem(where="hydra.run.dir", what=f"'{folder}' cannot be made: {e.strerror}")]))
        return 2
    return work.compare(line, first.root.compare, first.root.run.steps, folder)


def sweep(line: CommandLine, plans: Sequence[Plan]) -> int:
    """Every point of a sweep, each in a process of its own. 1 if a job failed; 130 or 143 after a signal."""
    master = plans[0].configured.master
    assert master is not None
    try:
        master.folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        explain(PlanError([Problem(where="hydra.sweep.dir", what=f"'{master.folder}' cannot be made: {e.strerror}")]))
        return 2
    jobs = len(plans) if is_grid(master) else None
    print(f"{'a search' if jobs is None else f'{jobs} jobs'} in {master.folder}", flush=True)
    stop = Stop(master.folder)
    # Workers of a launcher import the framework and the user's plug-ins.
    os.environ["PYTHONPATH"] = os.pathsep.join(p or os.getcwd() for p in sys.path)
    with stop.listening(), Board(master.folder, jobs, common(p.configured.overrides for p in plans)) as board:
        try:
            launch(line, Points(line.config_dir, master.folder, stop))
        except (Exception, KeyboardInterrupt):
            if not stop.signals:  # else it is that its jobs did not end well
                raise
    return 128 + stop.signals[0] if stop.signals else 0 if board.well else 1


def hydra_run(line: CommandLine) -> int:
    """Hydra makes the run directory and calls `execute`, or prints what it is asked for."""
    status = 0

    def job(cfg: Composed) -> int:
        nonlocal status
        status = max(status, execute(cfg))
        return status

    try:
        if problems := config.prepare(line):
            raise PlanError(problems)
    except PlanError as e:
        explain(e)
        return 2
    hydra.main(version_base="1.3", config_path=str(config.CONF), config_name="config")(job)()
    return status


def execute(cfg: Composed) -> int:
    """One job, in the run directory that Hydra made."""
    runtime = HydraConfig.get()
    run_dir = Path(runtime.runtime.output_dir)
    try:
        made = plan.check(*config.read(cfg, overrides=config.written(runtime.overrides.task)))
        if not is_execution(made):  # a job of a sweep over modes
            return tell([made])
        claim(run_dir, made, hydras={f"{runtime.job.name}.log", str(runtime.output_subdir), RECORD, LOG})
    except PlanError as e:
        explain(e, f"No stage was started. The run directory is {run_dir}")
        return 2
    except DiskError as e:
        print(f"{e}\nNo stage was started.", file=sys.stderr)
        return 2
    os.environ.update(OFFLINE | {"OMP_NUM_THREADS": str(made.root.run.cores)})
    return running.run(made, run_dir)
