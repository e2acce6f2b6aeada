"""A run of run.py as a process under watch: what it printed, what it wrote, and what it left behind.

Left behind means: processes it started, names in /dev/shm, files in the folder for temporary files.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MINE = Path(__file__).resolve().parent / "mine"

SMALL = (
    "run.steps=2",
    "loader.batch_size=4",
    "rollout.n=4",
    "trainer.mini_batch=0",
    "eval_loader.limit=16",
)
"""Two steps of 16 rows, 16 held-out prompts before and after."""

OWN = ("--config-dir", str(MINE / "conf"), "plugins=[my_stages]")

LIMIT_S = 300.0
"""For what takes seconds: machines that run tests are busy."""

_AT_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
"""Of a session's leader: from now on this terminal sends its Ctrl-C to us."""

Process = tuple[int, int]
"""Process id and start time in clock ticks: ids come again, pairs do not."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """What is left to look at. `seconds`: wall time. `gone_s`: until the last process was gone after the end."""

    code: int
    out: str
    err: str
    folder: Path
    seconds: float
    gone_s: float
    processes_left: list[str]
    shm_left: list[str]
    temporary_left: list[str]

    @property
    def left(self) -> dict[str, list[str]]:
        """Everything that should not be there; empty is well."""
        found = {"processes": self.processes_left, "shm": self.shm_left, "temporary": self.temporary_left}
        return {kind: names for kind, names in found.items() if names}


class Run:
    """`python run.py *args` in a working directory of its own, with a folder of its own for temporary files.

    It leads a process group, as a program in a terminal does; `terminal`, a descriptor, makes it one. `more` is added
    to the environment.
    """

    def __init__(
        self,
        folder: Path,
        *args: str,
        program: Path = ROOT / "run.py",
        terminal: int | None = None,
        more: Mapping[str, str] | None = None,
    ):
        self.folder = folder
        self._temporary = folder / "tmp"
        self._temporary.mkdir(parents=True)
        self._seen: set[Process] = set()
        self._shm = set(os.listdir("/dev/shm"))
        env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "HYDRA"))}
        env |= {"OMP_NUM_THREADS": "1", "TMPDIR": str(self._temporary), "COLUMNS": "200", "MINE": str(MINE)}
        env |= {"PYTHONFAULTHANDLER": "1", **(more or {})}
        env["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")  # torch makes this empty folder when it is imported
        self._started = time.monotonic()
        with (folder / "out.txt").open("wb") as out, (folder / "err.txt").open("wb") as err:
            self._process = subprocess.Popen(
                [sys.executable, *(("-c", _AT_TERMINAL) if terminal else ()), str(program), *args],
                cwd=folder,
                env=env,
                stdin=terminal or subprocess.DEVNULL,
                stdout=terminal or out,
                stderr=terminal or err,
                start_new_session=True,
            )

    def until(self, condition: Callable[[], bool], what: str) -> Run:
        """Wait for it. AssertionError, with what was printed, if the run ends before."""
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            self._look()
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._kill()
                raise AssertionError(f"never came to: {what}\n{self._printed()}")
            time.sleep(0.05)
        self._look()
        return self

    def alive(self) -> bool:
        self._look()
        return self._process.poll() is None

    def send(self, number: int, *, group: bool = False) -> Run:
        """A signal to the run, or to its process group, as Ctrl-C in a terminal is."""
        (os.killpg if group else os.kill)(self._process.pid, number)
        return self

    def send_to_all(self, number: int) -> Run:
        """A signal to the run and to every process that lives of it, as a cluster sends it to all of a job."""
        self._look()
        for pid in (self._process.pid, *(pid for pid, _ in self._alive())):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return self

    def send_to(self, command: str, number: int) -> Run:
        """A signal to the processes of the run whose command line holds this text. AssertionError if there is none."""
        self._look()
        found = [pid for pid, _ in self._alive() if command in _command(pid)]
        assert found, command
        for pid in found:
            os.kill(pid, number)
        return self

    def end(self, grace_s: float = 5.0) -> Ended:
        """Wait for the end, then up to `grace_s` until nothing is left. A run that hangs is killed, and an error."""
        deadline = time.monotonic() + LIMIT_S
        while self._process.poll() is None:
            self._look()
            if time.monotonic() > deadline:
                self._kill()
                raise AssertionError(f"did not end within {LIMIT_S:g} s\n{self._printed()}")
            time.sleep(0.1)
        ended = time.monotonic()
        while (processes := self._alive()) and time.monotonic() < ended + grace_s:
            time.sleep(0.05)
        gone = time.monotonic()
        while (shm := self._new_shm()) and time.monotonic() < gone + 5:
            time.sleep(0.1)
        left = sorted(str(p.relative_to(self._temporary)) for p in self._temporary.rglob("*"))
        result = Ended(
            code=self._process.returncode,
            out=(self.folder / "out.txt").read_text(),
            err=(self.folder / "err.txt").read_text(),
            folder=self.folder,
            seconds=ended - self._started,
            gone_s=gone - ended,
            processes_left=[f"{pid}: {_command(pid)}" for pid, _ in processes],
            shm_left=shm,
            temporary_left=left,
        )
        for pid, _ in processes:  # the test fails; the machine stays clean
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return result

    def commands(self) -> list[str]:
        """Command lines of the living descendants."""
        self._look()
        return [_command(pid) for pid, _ in self._alive()]

    def names(self) -> list[str]:
        """What bears a name now and would be left if all its processes were killed: temporary files, shared memory."""
        self._look()
        files = [str(p.relative_to(self._temporary)) for p in self._temporary.rglob("*")]
        return sorted(files) + sorted(_mapped_shm([pid for pid, _ in self._alive()]) & set(os.listdir("/dev/shm")))

    def _look(self) -> None:
        """Note the descendants that live now; also of those whose parent is gone."""
        stats = _stats()
        family = {self._process.pid, *(pid for pid, start in self._seen if stats.get(pid, (0, -1))[1] == start)}
        while more := {pid for pid, (parent, _) in stats.items() if parent in family} - family:
            family |= more
        self._seen |= {(pid, stats[pid][1]) for pid in family & set(stats)}

    def _alive(self) -> list[Process]:
        stats = _stats()
        return sorted(p for p in self._seen if p[0] in stats and stats[p[0]][1] == p[1] and p[0] != self._process.pid)

    def _new_shm(self) -> list[str]:
        """Names that were not there before and that no living process holds: other programs use /dev/shm too."""
        new = set(os.listdir("/dev/shm")) - self._shm
        return sorted(new - _mapped_shm(_stats())) if new else []

    def _kill(self) -> None:
        """First by a signal on which Python prints where each thread is: on standard error, or in run.log."""
        for number in (signal.SIGABRT, signal.SIGKILL):
            for pid, _ in [*self._alive(), (self._process.pid, 0)]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            time.sleep(1)
        self._process.wait()

    def _printed(self) -> str:
        files = [self.folder / "out.txt", self.folder / "err.txt", *self.folder.rglob("run.log")]
        return "\n".join(f.read_text()[-6000:] for f in files)


def run(folder: Path, *args: str) -> Ended:
    return Run(folder, *args).end()


def run_each(folder: Path, *lines: Iterable[str]) -> Ended:
    """A run for each command line, all in one process."""
    return Run(
        folder, json.dumps([list(line) for line in lines]), program=Path(__file__).parent / "one_process.py"
    ).end()


def _stats() -> dict[int, Process]:
    """Parent and start time of every process that is not a zombie (proc(5): fields 3, 4 and 22 of stat)."""
    found: dict[int, Process] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
                if fields[0] not in "ZX":
                    found[int(name)] = (int(fields[1]), int(fields[19]))
    return found


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
    return "?"


def _mapped_shm(pids: Iterable[int]) -> set[str]:
    """Names in /dev/shm that these processes have mapped."""
    found: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            found |= {line.partition("/dev/shm/")[2].removesuffix(" (deleted)") for line in lines}
    return found - {""}


# -- what a run wrote --------------------------------------------------------------------------------------------


def lines(file: Path) -> list[dict[str, Any]]:
    """A file of JSON objects, one a line. ValueError for what JSON does not know, such as NaN."""

    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} in {file}")

    return [json.loads(line, parse_constant=refuse) for line in file.read_text().splitlines()]


def steps_done(run_dir: Path) -> int:
    """Whole lines of metrics.jsonl after the one of step 0."""
    file = run_dir / "metrics.jsonl"
    return file.read_text().count("\n") - 1 if file.exists() else -1


def numbers(run_dir: Path, without: Iterable[str] = ()) -> list[dict[str, Any]]:
    """The metrics of each step without clocks and memory, and without names that start with one of `without`."""
    dropped = ("time/", "memory/", *without)
    return [
        {k: v for k, v in step.items() if not k.startswith(dropped) and not k.endswith("_s")}
        for step in lines(run_dir / "metrics.jsonl")
    ]


def differences(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> list[str]:
    """Where two lists of metrics are not the same to the last bit."""
    found = [f"{len(one)} and {len(other)} lines"] if len(one) != len(other) else []
    for a, b in zip(one, other, strict=False):
        names = sorted(k for k in a.keys() | b.keys() if a.get(k) != b.get(k))
        found += [f"step {a['step']} {k}: {a.get(k)} {b.get(k)}" for k in names]
    return found
