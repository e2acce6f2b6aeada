"""A point of a sweep as a process of its own: `python run.py ...` in a fresh interpreter, with its own log.

`job.json` in its run directory says what it is and how it stands; `job.log` holds what it printed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline import redact
from pipeline.metrics import METRICS
from pipeline.process import die_with_parent
from pipeline.sweep.stop import SIGNALS, Stop

RECORD, LOG = "job.json", "job.log"
Metrics = dict[str, Any]
_PARENT = "HEADRACE_SWEEP"
_POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """`arguments` are those of run.py; of them, `overrides` are the user's. `cwd`: where it is started."""

    number: int
    folder: Path
    overrides: tuple[str, ...]
    arguments: tuple[str, ...]
    cwd: Path


class Running:
    """A job that was started. It leads a process group, and the kernel kills it if its parent dies."""

    def __init__(self, job: Job, environment: Mapping[str, str]):
        self.job = job
        self.metrics: Metrics | None = None
        self._began = time.monotonic()
        job.folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, str(Path(__file__).resolve().parents[2] / "run.py"), *job.arguments]
        self._record: dict[str, Any] = {
            "job": job.number,
            "directory": job.folder.name,
            "overrides": list(job.overrides),
            "command": ["python", *command[1:]],
            "environment": dict(environment),
            "state": "running",
            "started": time.time(),
        }
        with (job.folder / LOG).open("xb") as out:
            self._process = subprocess.Popen(
                command,
                cwd=job.cwd,
                env=os.environ | environment | {_PARENT: str(os.getpid()), "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        self._write()

    def ended(self, stopping: bool) -> bool:
        """Whether it is over; if so, that is written down. `stopping`: it was asked to."""
        if not self._over():
            return False
        with contextlib.suppress(ProcessLookupError, PermissionError):  # what it has left in its group goes with it
            os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        self.metrics = last_metrics(self.job.folder) if code == 0 else None
        state = "done" if code == 0 else "stopped" if stopping else "failed"
        self._record |= {"state": state, "exit": code, "seconds": round(time.monotonic() - self._began, 3)}
        self._write()
        return True

    def send(self, number: int) -> None:
        """SIGKILL goes to all that the job has started in its group; any other signal to the job alone."""
        (os.killpg if number == signal.SIGKILL else os.kill)(self._process.pid, number)

    def _over(self) -> bool:
        """It is not waited for yet, so that its number names no other process."""
        return bool(os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT))

    def _write(self) -> None:
        new = self.job.folder / f".{RECORD}"
        new.write_text(json.dumps(redact.structure(self._record), indent=1) + "\n", "utf-8")
        new.replace(self.job.folder / RECORD)


def run_all(jobs: Iterable[Job], stop: Stop, lanes: Sequence[Mapping[str, str]]) -> dict[int, Metrics | None]:
    """All jobs, as many at a time as there are lanes, until each has ended or `stop` says so.

    By number: the metrics of its last step, None if it failed; a job that was not started is not there. A lane holds
    what is added to the environment of the job in it. A job that fails stops no other.
    """
    waiting, free = iter(jobs), deque(lanes)
    running: dict[Running, Mapping[str, str]] = {}
    results: dict[int, Metrics | None] = {}
    told, job = False, next(waiting, None)
    try:
        while running or (job and not stop.signals):
            while job and free and not stop.signals:
                lane = free.popleft()
                running[Running(job, lane)] = lane
                job = next(waiting, None)
            signals = stop.signals
            for number in (signals[:1] if not told else []) + ([signal.SIGKILL] if len(signals) > 1 else []):
                for under_way in running:
                    under_way.send(number)
            told = bool(signals)
            for ended in [r for r in running if r.ended(told)]:
                free.append(running.pop(ended))
                results[ended.job.number] = ended.metrics
            time.sleep(_POLL_S)
    finally:
        for under_way in running:  # only after an error here
            under_way.send(signal.SIGKILL)
    return results


def end_with_parent() -> None:
    """To be called first in `run.py`. In a job of a sweep: end if its parent dies, and take signals again."""
    if parent := os.environ.pop(_PARENT, None):
        die_with_parent(int(parent))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def last_metrics(folder: Path) -> Metrics | None:
    """The metrics of the last step that a run has finished; None before the first."""
    try:
        with (folder / METRICS).open("rb") as f:
            f.seek(max(0, f.seek(0, os.SEEK_END) - 2**16))
            whole = f.read().rpartition(b"\n")[0]
    except FileNotFoundError:
        return None
    return json.loads(whole.rpartition(b"\n")[2]) if whole else None
