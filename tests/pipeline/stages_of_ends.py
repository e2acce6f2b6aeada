"""Toy stages that misbehave where and how they are told, for the tests of how a run ends."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeline.context import Context
from pipeline.progress import alive
from pipeline.records import Snapshot
from pipeline.registry import backend
from pipeline.stage import setting
from tests.pipeline.stages_for_tests import (
    MeanLearner,
    MeanLearnerConfig,
    Numbers,
    Scale,
    Scores,
    WholeDouble,
    WholeDoubleConfig,
)


class Silent(Exception):
    """Cannot be pickled, and cannot say what it is."""

    def __init__(self, one: int, other: int):
        super().__init__()

    def __str__(self) -> str:
        raise ValueError("no words")


def busy(seconds: float) -> None:
    """Works in small pieces and says so."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(0.05)
        alive()


def fail(text: str) -> None:
    raise ArithmeticError(text)


def silent(text: str) -> None:
    raise Silent(1, 2)


def fill(file: str) -> None:
    """Leave no room on the disk that the file is on."""
    with contextlib.suppress(OSError), open(file, "wb", buffering=0) as f:
        while True:
            f.write(bytes(4096))


def linger(file: str) -> None:
    """Let the process take some time to end."""

    def wait() -> None:
        Path(file).touch()
        time.sleep(1.5)

    atexit.register(wait)


def crash(number: int) -> None:
    signal.raise_signal(number)


HOW = {
    "raise": fail,
    "silent": silent,
    "exit": lambda text: sys.exit(3),
    "leave": lambda text: os._exit(7),
    "kill": lambda text: crash(signal.SIGKILL),
    "crash": lambda text: crash(signal.SIGSEGV),
    "sleep": lambda text: time.sleep(1e6),
    "hold": lambda text: sum(itertools.repeat(0)),  # a loop in C that keeps the interpreter's lock
    "stop": lambda text: os.kill(os.getpid(), signal.SIGSTOP),
    "busy": lambda text: busy(float(text)),
    "full": lambda text: open("/dev/full", "w").write("x" * 2**20),  # noqa: SIM115
    "fill": fill,
    "print": print,
    "linger": linger,
}


@dataclass(slots=True, kw_only=True)
class AwkwardConfig:
    where: str = setting("", doc="the method in which it misbehaves; eval: run, in an evaluation")
    how: str = setting("raise", doc="a key of HOW")
    text: str = setting("told to", doc="what HOW is given")
    at_step: int = setting(2, min=0, doc="the step, for methods that know it")


class Awkward:
    awkward: AwkwardConfig
    ctx: Context

    def now(self, where: str, step: int | None = None) -> None:
        if self.awkward.where == where and step in (None, self.awkward.at_step):
            (self.ctx.run_dir / "misbehaves").touch()
            HOW[self.awkward.how](self.awkward.text)

    def close(self) -> None:
        with (self.ctx.run_dir / "closed").open("a") as f:
            f.write(f"{self.ctx.node}\n")
        self.now("close")

    def advice(self) -> list[str]:
        self.now("advice")
        return [f"seen by {self.ctx.node}"]


@dataclass(slots=True, kw_only=True)
class AwkwardDoubleConfig(AwkwardConfig):
    pass


@backend("double", "awkward")
class AwkwardDouble(Awkward, WholeDouble):
    """Streams its rows one by one. Open, run, eval, stream (at its second part), receive, export, advice, close."""

    provides = frozenset({"streaming"})

    def __init__(self, cfg: AwkwardDoubleConfig, scale: Scale):
        super().__init__(WholeDoubleConfig(), scale)
        self.awkward = cfg

    def open(self, ctx: Context) -> None:
        super().open(ctx)
        self.now("open")

    def run(self, numbers: Numbers) -> Numbers:
        if numbers.purpose == "train":
            self.now("run", numbers.step)
        else:
            self.now("eval")
        return super().run(numbers)

    def stream(self, numbers: Numbers) -> Iterator[Numbers]:
        for i in range(len(numbers)):
            if i:
                self.now("stream", numbers.step)
            yield self.run(numbers.take([i]))

    def receive(self, snapshot: Snapshot) -> None:
        self.now("receive", snapshot.version)
        super().receive(snapshot)

    def export(self, folder: str) -> None:
        self.now("export")


@dataclass(slots=True, kw_only=True)
class AwkwardLearnerConfig(AwkwardConfig):
    pass


@backend("learner", "awkward")
class AwkwardLearner(Awkward, MeanLearner):
    """Open, run, learn, publish, export, advice, close."""

    def __init__(self, cfg: AwkwardLearnerConfig):
        super().__init__(MeanLearnerConfig())
        self.awkward = cfg

    def open(self, ctx: Context) -> None:
        super().open(ctx)
        self.now("open")

    def run(self, numbers: Numbers) -> Scores:
        self.now("run", numbers.step)
        return super().run(numbers)

    def learn(self, numbers: Numbers, judged: Scores) -> None:
        self.now("learn", numbers.step)
        super().learn(numbers, judged)

    def publish(self) -> Snapshot:
        self.now("publish", self.version)
        return super().publish()

    def export(self, folder: str) -> None:
        super().export(folder)
        self.now("export")
