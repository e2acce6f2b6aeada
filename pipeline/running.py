"""One run, from the first stage that opens to an exit status: every way in which it can end is here."""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from pipeline import redact
from pipeline.disk import DiskError
from pipeline.errors import StageError
from pipeline.plan import Plan
from pipeline.program import Program
from pipeline.stopping import Stopping
from pipeline.watchdog import watched

log = logging.getLogger("headrace")


def run(plan: Plan, run_dir: Path) -> int:
    """Exit status: 0 well; 1 a stage failed or stalled, or the disk did; 130 or 143 stopped by SIGINT or SIGTERM."""
    with _logs_that_fail_in_silence():
        return _run(plan, run_dir)


def _run(plan: Plan, run_dir: Path) -> int:
    stop = Stopping(plan.root.run.grace_s)
    program = Program(plan, run_dir, stop)
    try:
        with stop.listening(), watched([*plan.nodes], stop, plan.root.run.stall_s, run_dir), program:
            program.execute()
    except StageError as e:
        return _failed(stop.error or e, run_dir)
    except DiskError as e:
        log.error("%s", e)
        print(f"\n{e}\nThe run ended after step {program.step}; what was written before is whole", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        if stop.error:
            return _failed(stop.error, run_dir)
        return _stopped(stop, "", run_dir)
    if stop.error:
        return _failed(stop.error, run_dir)
    return _stopped(stop, f"stopped after step {program.step}\n", run_dir) if stop.asked else 0


def _failed(error: StageError, run_dir: Path) -> int:
    log.error("%s\n%s", error, error.detail)
    logged = run_dir / "run.log"
    where = f"The traceback is in {logged}" if logged.exists() else error.detail
    print(f"\n{error}\n{where}", file=sys.stderr)
    return 1


def _stopped(stop: Stopping, after: str, run_dir: Path) -> int:
    print(f"\n{after}stopped; what was written lies in {run_dir}", file=sys.stderr)
    return stop.status if stop.asked else 128 + signal.SIGINT


@contextlib.contextmanager
def _logs_that_fail_in_silence() -> Iterator[None]:
    """A log on a full disk does not fill the terminal: what cannot be written ends the run, and is told then."""
    redact.guard_logs()
    before, logging.raiseExceptions = logging.raiseExceptions, False
    try:
        yield
    finally:
        logging.raiseExceptions = before
