"""Scoring in worker processes that can be killed.

A reward runs code that this project does not control: a user's function, a symbolic maths library. Such code
may loop without ever giving the interpreter back, leave by `os._exit`, or crash. So rows are scored in
processes of their own, each answers row by row, and the parent knows at any time which row is under way: the
one that costs too long, or takes its process along, is the only row that is lost.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.process import Child, ChildDied

log = logging.getLogger("headrace")

START_S = 300.0
"""Seconds a worker may take to import what it needs; a user's file may bring torch along."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What is scored: one row of a rollout. `answer` and `extra` are the JSON values of the data file."""

    row_id: int
    response: str
    tokens: int
    answer: Any
    data_source: str
    extra: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The score of one row and its parts, or, if `reason` is not empty, why there is none."""

    score: float = float("nan")
    accuracy: float = float("nan")
    parts: dict[str, float] = field(default_factory=dict)
    reason: str = ""
    where: str = ""
    """For what should not happen: its kind (of an exception, the type and line), logged once a run."""
    trace: str = ""


class Unscorable(Exception):
    """Raised by a scorer that gives no score for a row; the message is the row's reason."""


Scorer = Callable[[Sample], Outcome]


class _Host:
    """In the worker: the scorer, fed with rows."""

    def __init__(self, build: Callable[..., Scorer], args: tuple[Any, ...]):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the GPU belongs to the policy
        self._scorer = build(*args)
        self._pid = os.getpid()

    def score(self, samples: list[Sample]) -> Iterator[Outcome]:
        for sample in samples:
            outcome = self._outcome(sample)
            if os.getpid() != self._pid:  # a fork that came back from the user's code has no say here
                os._exit(1)
            yield outcome

    def _outcome(self, sample: Sample) -> Outcome:
        try:
            return self._scorer(sample)
        except Unscorable as e:
            return Outcome(reason=str(e))
        except BaseException as e:  # also SystemExit: a function that leaves must not take the worker along
            return _raised(e)


def _raised(error: BaseException) -> Outcome:
    last = traceback.extract_tb(error.__traceback__)[-1]
    try:
        message = f"{type(error).__name__}: {error}"
    except Exception:
        message = f"{type(error).__name__}, whose message cannot be shown"
    return Outcome(
        reason=_encodable(f"raised {without_gpu(message)}"),
        where=f"{type(error).__name__} at {last.filename}:{last.lineno}",
        trace=_encodable("".join(traceback.format_exception(error))),
    )


def without_gpu(message: str) -> str:
    """The message, and if it is about a GPU, that there is none and what to do (verl issue 2058)."""
    if not any(word in message.lower() for word in ("cuda", "nvidia", "gpu")):
        return message
    return f"{message} (reward workers are CPU only: the GPU is the policy's; a model that scores is reward=model)"


def _encodable(text: str) -> str:
    """Without the lone surrogates that a message may hold, which no log file can."""
    return text.encode(errors="replace").decode()


class _Worker:
    """A process, and the rows it was given and has not answered; the first of them is under way."""

    def __init__(self, child: Child):
        self.child = child
        self.ready = False
        self.rows: deque[int] = deque()
        self.deadline = time.monotonic() + START_S

    @property
    def busy(self) -> bool:
        return not self.ready or bool(self.rows)


class ScorerPool:
    """`workers` processes that each hold the scorer `build(*args)`, which must pickle.

    `name` says in messages what scores. What the scorer prints goes to `log_file`.
    """

    def __init__(
        self,
        build: Callable[..., Scorer],
        args: tuple[Any, ...],
        *,
        name: str,
        workers: int,
        timeout_s: float,
        log_file: Path | None = None,
    ):
        self._build, self._args, self._name = build, args, name
        self._timeout_s, self._log_file, self._size = timeout_s, log_file, workers
        self._workers: list[_Worker] = []
        self._closed = threading.Event()
        self._lock = threading.Lock()  # between a close and the start of a worker
        self._seen: set[str] = set()

    def open(self) -> None:
        """Start the workers. Raises what the scorer's construction raised, or RuntimeError if it died or hung."""
        with self._closing_on_error():
            self._fill()
            while starting := [w for w in self._workers if not w.ready]:
                self._advance(starting, [], [], deque())

    def pids(self) -> list[int]:
        return [w.child.pid for w in self._workers]

    def close(self) -> None:
        """Kill all workers, also in the middle of `score`, which then raises RuntimeError. Safe to call twice."""
        with self._lock:
            self._closed.set()
            for w in self._workers:
                w.child.kill()

    def score(self, samples: Sequence[Sample]) -> list[Outcome]:
        """One outcome a sample, in order, whatever the workers do.

        RuntimeError if a worker cannot be started anew, or the pool is closed.
        """
        outcomes: list[Outcome | None] = [None] * len(samples)
        waiting = deque(range(len(samples)))
        with self._closing_on_error():
            self._fill()
            while waiting or any(w.rows for w in self._workers):
                for w in self._workers:
                    if waiting and not w.busy:
                        self._give(w, samples, waiting)
                self._advance([w for w in self._workers if w.busy], samples, outcomes, waiting)
        self._log_new_errors(samples, outcomes)
        return [o for o in outcomes if o is not None]

    @contextlib.contextmanager
    def _closing_on_error(self) -> Iterator[None]:
        """After any error, a Ctrl-C too, no worker is left that could answer an old question."""
        try:
            if self._closed.is_set():
                raise RuntimeError(f"{self._name} is closed")
            yield
        except BaseException as e:
            if self._closed.is_set() and isinstance(e, (OSError, ValueError, ChildDied)):
                raise RuntimeError(f"{self._name} was closed while it scored") from e
            for w in self._workers:
                w.child.kill()
            self._workers = []
            raise

    def _fill(self) -> None:
        """As many live workers as wanted: one that ended between two calls is replaced, and blamed on no row."""
        for w in list(self._workers):
            if not w.child.alive():
                self._drop(w)
        while len(self._workers) < self._size:
            self._start()

    def _start(self) -> None:
        with self._lock:
            if self._closed.is_set():
                raise RuntimeError(f"{self._name} was closed while it scored")
            child = Child(_Host, self._build, self._args, name=self._name, log=self._log_file)
            self._workers.append(_Worker(child))

    def _drop(self, worker: _Worker) -> None:
        worker.child.kill()
        self._workers.remove(worker)

    def _give(self, worker: _Worker, samples: Sequence[Sample], waiting: deque[int]) -> None:
        """Half of an equal share at a time, so that a slow row does not hold up many others."""
        for _ in range(max(1, len(waiting) // (2 * self._size))):
            worker.rows.append(waiting.popleft())
        worker.deadline = time.monotonic() + self._timeout_s
        with contextlib.suppress(ChildDied):  # found, and told, by the wait for its answer
            worker.child.post("score", [samples[i] for i in worker.rows])

    def _advance(
        self, busy: list[_Worker], samples: Sequence[Sample], outcomes: list[Outcome | None], waiting: deque[int]
    ) -> None:
        """Wait for the next answers or deadlines, and take them in."""
        for w in _wait(busy):
            try:
                kind, value = w.child.take(0)
            except ChildDied as e:
                self._lost(w, f"worker died ({e})", outcomes, waiting)
                continue
            if not w.ready:
                w.ready = True
            elif kind == "item":
                outcomes[w.rows.popleft()] = value
                w.deadline = time.monotonic() + self._timeout_s
        for w in busy:
            if w in self._workers and w.busy and time.monotonic() > w.deadline and not _wait([w], 0):
                limit = self._timeout_s if w.ready else START_S
                self._lost(w, f"timed out after {limit:g} s", outcomes, waiting)

    def _lost(self, worker: _Worker, why: str, outcomes: list[Outcome | None], waiting: deque[int]) -> None:
        """Kill a worker and start another; the row under way is unscored, those behind it wait again."""
        self._drop(worker)
        if not worker.ready:
            raise RuntimeError(f"{self._name}: a worker could not be started: {why} (see {self._log_file or 'above'})")
        first, *rest = worker.rows
        outcomes[first] = Outcome(reason=why, where=why)
        waiting.extendleft(reversed(rest))
        self._start()

    def _log_new_errors(self, samples: Sequence[Sample], outcomes: list[Outcome | None]) -> None:
        """Each kind of error once a run, with its traceback; not by message, which may hold values of the row."""
        for sample, outcome in zip(samples, outcomes, strict=True):
            if outcome and outcome.where and outcome.where not in self._seen:
                self._seen.add(outcome.where)
                log.warning("%s, row %d: %s\n%s", self._name, sample.row_id, outcome.reason, outcome.trace)


def _wait(workers: list[_Worker], timeout: float | None = None) -> list[_Worker]:
    """Those that have something to say, waiting for it until the first deadline."""
    if timeout is None:
        timeout = max(0.0, min((w.deadline for w in workers), default=0.0) - time.monotonic())
    with selectors.PollSelector() as selector:
        for w in workers:
            selector.register(w.child, selectors.EVENT_READ, w)
        return [key.data for key, _ in selector.select(timeout)]
