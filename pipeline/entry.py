"""From a command line to an exit status: plan, explain what is wrong, or hand over to Hydra and execute."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import hydra
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from pipeline import config, plan
from pipeline.config import CommandLine, Composed, Mode, parse
from pipeline.errors import PlanError, Problem, StageError
from pipeline.plan import Plan
from pipeline.program import Program
from pipeline.run_dir import claim
from pipeline.show import render

__all__ = ["hydra_run", "is_execution", "parse_or_explain", "plan_or_explain", "render"]
log = logging.getLogger("headrace")

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


def parse_or_explain(argv: Sequence[str]) -> CommandLine | None:
    """The command line; None after telling on standard error which flags cannot be used."""
    try:
        return parse(argv)
    except PlanError as e:
        explain(e)
        return None


def plan_or_explain(line: CommandLine) -> list[Plan] | None:
    """The plan of each point of a sweep, or the only one; None after printing every problem on standard error."""
    plans: list[Plan] = []
    problems: list[Problem] = []
    for point in points(line):
        try:
            plans.append(made := plan.make(point))
            if is_execution(made):
                problems += _taken("sweep" if line.multirun else "run", made)
        except PlanError as e:
            problems += e.problems
    if problems:
        explain(PlanError(dict.fromkeys(problems)))
        return None
    return plans


def points(line: CommandLine) -> list[CommandLine]:
    """A command line for each point of a sweep, as Hydra's basic sweeper makes them."""
    if not line.multirun:
        return [line]
    try:
        parsed = OverridesParser.create().parse_overrides(list(line.overrides))
    except HydraException:
        return [line]  # composing it tells what is wrong
    batches = BasicSweeper.split_arguments(parsed, None)
    return [replace(line, overrides=tuple(point)) for batch in batches for point in batch]


def _taken(kind: Literal["run", "sweep"], made: Plan) -> Iterator[Problem]:
    """Whether the directory that Hydra will write into, `hydra.<kind>.dir`, holds something."""
    folder = made.configured.sweep_dir if kind == "sweep" else made.configured.run_dir
    if folder.is_dir() and any(folder.iterdir()):
        what = f"'{folder}' exists and is not empty; a run never writes into the files of another"
        yield Problem(where=f"hydra.{kind}.dir", what=what, hint="choose a new directory, or leave it out")


def explain(error: PlanError, last: str = "Nothing was started and nothing was written.") -> None:
    """Every problem on standard error, and a `last` line that says what became of the run."""
    errors = [p for p in error.problems if p.level == "error"]
    print(f"The configuration cannot run: {len(errors)} problem{'s' if len(errors) != 1 else ''}.", file=sys.stderr)
    for p in error.problems:
        print(f"  {'warning: ' if p.level == 'warning' else ''}{p}", file=sys.stderr)
    print(last, file=sys.stderr)


def is_execution(made: Plan) -> bool:
    return made.root.mode is Mode.run


def hydra_run(line: CommandLine) -> int:
    """Hydra makes the run directory (or those of a sweep) and calls `execute` for each job."""
    status = 0

    def job(cfg: Composed) -> int:
        nonlocal status
        status = max(status, execute(cfg))
        return status

    try:
        config.prepare(line)
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
        made = plan.check(*config.read(cfg, overrides=tuple(runtime.overrides.task)))
        if not is_execution(made):  # one point of a sweep over modes
            print(render(made))
            return 0
        claim(run_dir, made, hydras={f"{runtime.job.name}.log", str(runtime.output_subdir)})
    except PlanError as e:
        explain(e, f"No stage was started. The run directory is {run_dir}")
        return 2
    os.environ.update(OFFLINE | {"OMP_NUM_THREADS": str(made.root.run.cores)})
    previous = signal.signal(signal.SIGTERM, _terminate)
    try:
        with Program(made, run_dir) as program:
            program.execute()
        return 0
    except StageError as e:
        log.error("%s\n%s", e, e.detail)
        print(f"\n{e}\nThe traceback is in {run_dir / 'run.log'}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, SystemExit) as e:  # Ctrl-C, SIGTERM: the end of a whole sweep
        print(f"\nstopped; what was written lies in {run_dir}", file=sys.stderr)
        raise SystemExit(130 if isinstance(e, KeyboardInterrupt) else e.code) from None
    finally:
        signal.signal(signal.SIGTERM, previous)


def _terminate(*_: Any) -> None:
    raise SystemExit(143)
