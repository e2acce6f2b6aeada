"""For the tests of rewards: a scorer that misbehaves on demand, a user file that does, and a look at processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from stages.reward.workers import Outcome, Sample, Unscorable


class Tricky:
    """Does what the response says; otherwise the score is the answer."""

    def __init__(self, note: str = "", fail: str = ""):
        if note:
            (Path(note) / str(os.getpid())).touch()
        if fail == "raise":
            raise ValueError("this scorer cannot be built")
        if fail == "exit":
            os._exit(7)

    def __call__(self, sample: Sample) -> Outcome:
        word, _, rest = sample.response.partition(" ")
        getattr(self, word, self.score)(rest)
        return Outcome(score=float(sample.answer), accuracy=1.0, parts={"part": float(sample.answer)})

    def score(self, rest: str) -> None: ...

    def spin(self, rest: str) -> None:
        while True:
            pass

    def tower(self, rest: str) -> None:
        print(9**9**9)

    def stubborn(self, rest: str) -> None:
        for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(sig, signal.SIG_IGN)
        time.sleep(1000)

    def leave(self, rest: str) -> None:
        os._exit(3)

    def crash(self, rest: str) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)

    def abstain(self, rest: str) -> None:
        raise Unscorable("has no opinion")

    def error(self, rest: str) -> None:
        raise KeyError(rest)

    def quit(self, rest: str) -> None:
        sys.exit(5)

    def fork(self, rest: str) -> None:
        """The forked process comes back too."""
        os.fork()

    def child(self, rest: str) -> None:
        """Starts a program that outlives the call, says its number, and hangs."""
        program = subprocess.Popen(["sleep", "1000"])
        Path(rest).write_text(str(program.pid))
        while True:
            pass

    def slow(self, rest: str) -> None:
        time.sleep(float(rest))

    def say(self, rest: str) -> None:
        print(f"it says {rest}")


def sample(response: str, answer: Any = 1.0, row_id: int = 0, tokens: int = 1) -> Sample:
    return Sample(row_id=row_id, response=response, tokens=tokens, answer=answer, data_source="test", extra={})


def children(pid: int | None = None) -> set[int]:
    """Processes whose parent is `pid` (this one), zombies left out (proc(5))."""
    out = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(parent) == (pid or os.getpid()) and state != "Z":
                out.add(int(entry.name))
    return out


def group(leader: int) -> list[int]:
    """Processes of a process group, zombies left out."""
    out = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, pgrp = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(pgrp) == leader and state != "Z":
                out.append(int(entry.name))
    return out
