"""How a run is stopped from outside: Ctrl-C, SIGTERM, and the watchdog's word that a node is stuck.

The first signal lets what is under way be finished, if there is something worth it: the step, with its metrics, then
the export. The second ends the run at once: the controlling thread is taken out of what it does by an exception, and
every stage is closed on its way out. SIGTERM comes with a time after which a cluster kills, so it has a limit
(`run.grace_s`); a person who pressed Ctrl-C can press again.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from queue import Empty, SimpleQueue
from typing import Any

from pipeline import progress
from pipeline.errors import StageError
from pipeline.progress import ECHO_S, SIGNALS, Phase

AGAIN_S = 2.0
"""An exception that is raised where it cannot get out, as in a destructor, is raised again after so many seconds."""


class Stopped(KeyboardInterrupt):
    """Takes the controlling thread out of what it does. No error of a stage, so none may catch it as one."""


class Stopping:
    """Used as it is, it never stops anything; within `listening`, signals and `stall` do."""

    def __init__(self, grace_s: float = 0.0):
        self.signals: list[int] = []
        self.error: StageError | None = None
        """What the watchdog found."""
        self._grace_s = grace_s
        self._phase, self._under_way = Phase.at_once, ""
        self._raising = self._nudged = False
        self._last = -math.inf
        """When the last signal came, in seconds of the monotonic clock."""
        self._main = threading.main_thread().ident or 0
        self._news: SimpleQueue[tuple[str, float] | None] = SimpleQueue()  # its put is safe in a handler

    @property
    def asked(self) -> bool:
        """Whether the run shall end after what is under way."""
        return bool(self.signals)

    @property
    def status(self) -> int:
        """The exit status that says by which signal the run ended."""
        return 128 + self.signals[0]

    def finishing(self, what: str) -> None:
        """From now on a first signal lets `what` be finished."""
        self._phase, self._under_way = Phase.finishing, what
        progress.set_phase(self._phase)

    def closing(self) -> None:
        """The run is ending anyway: signals wait, but the third ends the process."""
        self._phase = Phase.closing
        progress.set_phase(self._phase)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Handle SIGINT and SIGTERM; to be called in the main thread."""
        before = {number: signal.signal(number, self._came) for number in SIGNALS}
        attendant = threading.Thread(target=self._attend, name="stopping", daemon=True)
        attendant.start()
        try:
            yield
        finally:
            self.closing()
            self._news.put(None)
            attendant.join()
            for number, handler in before.items():
                signal.signal(number, handler)

    def stall(self, error: StageError) -> None:
        """From any thread: end the run with this error."""
        self.error = error
        self._news.put(("", 0.0))

    # -- in the main thread, between two of its instructions ---------------------------------------------------

    def _came(self, number: int, _: Any) -> None:
        nudged, self._nudged = self._nudged, False
        if not nudged:
            before, self._last = self._last, time.monotonic()
            if self._last - before < ECHO_S and number == self.signals[-1]:
                return
            self.signals.append(number)
            if len(self.signals) > 2:
                os._exit(self.status)
            if self._phase is Phase.closing:
                return
            if self._phase is Phase.finishing and len(self.signals) == 1:
                self._defer(signal.Signals(number))
                return
            self._news.put((f"{signal.Signals(number).name}: stops at once", AGAIN_S))
        self._raising = True
        raise Stopped

    def _defer(self, number: signal.Signals) -> None:
        limit = self._grace_s if number is signal.SIGTERM else 0.0
        within = f", or in {limit:g} s (run.grace_s)" if limit else ""
        text = f"{number.name}: stops after {self._under_way}{within}; once more stops at once"
        self._news.put((text, limit or math.inf))

    # -- in a thread of its own: a handler must not print, for the main thread may be printing -------------------

    def _attend(self) -> None:
        """Tell the news, and when the time that came with the last is over, interrupt the main thread, until it is on
        its way out. A time of 0 comes with the watchdog's word, which counts there too."""
        at = math.inf
        while True:
            try:
                news = self._news.get(timeout=None if at == math.inf else max(0.0, at - time.monotonic()))
            except Empty:
                if self._phase is Phase.closing:
                    at = math.inf
                    continue
                if not self._raising:
                    print(f"{self._under_way} did not end within run.grace_s={self._grace_s:g}", file=sys.stderr)
                news = ("", 0.0)
            if news is None:
                return
            text, seconds = news
            if text:
                print(f"\n{text}", file=sys.stderr, flush=True)
            if not seconds:
                self._nudged = True
                signal.pthread_kill(self._main, SIGNALS[0])
            at = time.monotonic() + (seconds or AGAIN_S)
