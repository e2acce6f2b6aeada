"""Run every cell of a comparison, one run at a time, and tell what was found."""

from __future__ import annotations

import sys
from pathlib import Path

from pipeline import redact
from pipeline.compare import page, report, table
from pipeline.compare.busy import Others
from pipeline.compare.cells import cells, command, jobs
from pipeline.compare.report import Outcome, Report, Run
from pipeline.config import CommandLine, CompareSettings
from pipeline.disk import DiskError, why, write_whole
from pipeline.run_dir import environment
from pipeline.sweep.jobs import Job, run_all
from pipeline.sweep.stop import Stop


def compare(line: CommandLine, settings: CompareSettings, steps: int, folder: Path) -> int:
    """Into `folder`, which exists and is empty. 0 all runs ended well, 1 one did not, 130 or 143 after a signal."""
    stop = Stop(folder)
    order = jobs(line, settings, folder)
    every = [Outcome(cell, command(line, settings, cell), [], settings.warmup) for cell in cells(settings)]
    print(f"{len(order)} runs, one after the other, in {folder}", flush=True)
    try:
        with stop.listening():
            for cell, repeat, job in order:
                if stop.signals:
                    break
                print(f"{job.number + 1}/{len(order)} {cell.name}", end="", flush=True)
                if run := _run(job, repeat + 1, stop):
                    every[cell.number].runs.append(run)
                    print(f": {_told(run, settings.warmup)}", flush=True)
    except OSError as e:
        print(f"\nthe comparison cannot go on: {why(e, folder)}", file=sys.stderr)
        return 1
    for outcome in every:
        outcome.runs.sort(key=lambda run: run.repeat)
    found = Report(settings, steps, every, [job.folder.name for *_, job in order], environment(), bool(stop.signals))
    kept = _keep(found, folder)
    print()
    table.show(found, folder)
    return 128 + stop.signals[0] if stop.signals else 0 if found.well and kept else 1


def _run(job: Job, repeat: int, stop: Stop) -> Run | None:
    """None if it was not started."""
    others = Others()
    with others.during():
        run_all([job], stop, [{}])
    return report.read(repeat, job.folder, others.cpus)


def _told(run: Run, warmup: int) -> str:
    seconds = f"{run.record['seconds']:.1f} s"
    if run.state == "failed":
        return f"failed after {seconds}, {run.failure}"
    of_steps = run.values(warmup).get("time/step_s")
    return f"{run.state} in {seconds}" + (f", {sum(of_steps) / len(of_steps):.3f} s a step" if of_steps else "")


def _keep(found: Report, folder: Path) -> bool:
    """False, after saying why, if it cannot be written."""
    try:
        report.write(found, folder)
        write_whole(folder / "compare.html", redact.text(page.html(found)))
    except DiskError as e:
        print(f"what was compared could not be kept: {e}", file=sys.stderr)
        return False
    return True
