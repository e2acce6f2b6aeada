"""Ctrl-C and SIGTERM in a sweep: the first ends each job in its own good time, the second kills them all.

Jobs and the programs that start them (workers of a launcher) must not be hit by a Ctrl-C in the terminal, which goes to
every process of the foreground: they would die before they could end well. So the controlling process blocks both
signals before it starts anything (a mask is inherited), takes them in a thread, and says so in a file that whoever
waits for a job looks at. If the controlling process is gone, the jobs end too.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.process import die_with_parent, started
from pipeline.progress import ECHO_S

SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM})


@dataclass(frozen=True, slots=True)
class Owner:
    """The controlling process. `place` names its machine and its table of processes."""

    pid: int = field(default_factory=os.getpid)
    started: int | None = field(default_factory=lambda: started(os.getpid()))
    place: str = field(default_factory=lambda: _place())

    def gone(self) -> bool:
        """Whether it has ended. On another machine nobody knows: False."""
        return self.place == _place() and started(self.pid) != self.started


def _place() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")


class Stop:
    """Whether a sweep shall stop. Also works where it was unpickled, in another process or on another machine."""

    def __init__(self, folder: Path):
        self.file = folder / "stop"
        self.owner = Owner()
        self._signals: list[int] = []
        self._last = -math.inf

    @property
    def signals(self) -> list[int]:
        """What came, in order; empty: go on. A SIGKILL at the end: at once."""
        if self._signals:
            return list(self._signals)
        with contextlib.suppress(OSError, ValueError):
            return [int(number) for number in self.file.read_text().split()]
        return [signal.SIGTERM, signal.SIGKILL] if self.owner.gone() else []

    @property
    def at_once(self) -> bool:
        return len(self.signals) > 1

    def note(self, number: int) -> None:
        """A signal came. The third ends this process itself: something here hangs."""
        before, self._last = self._last, time.monotonic()
        if self._last - before < ECHO_S and number == self._signals[-1]:
            return
        self._signals.append(number)
        if len(self._signals) > 2:
            os._exit(128 + number)
        with contextlib.suppress(OSError):  # the disk may be full; the jobs of this process see it anyway
            beside = self.file.with_suffix(".new")
            beside.write_text(" ".join(str(int(n)) for n in self._signals))
            beside.replace(self.file)

    def leave_to_owner(self) -> None:
        """In a worker of a launcher: Ctrl-C is for the controlling process, and the worker shall not outlive it."""
        if os.getpid() != self.owner.pid:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            if os.getppid() == self.owner.pid:
                die_with_parent(self.owner.pid)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Take SIGINT and SIGTERM in a thread, and keep them from this one and from all processes it starts."""
        over = threading.Event()

        def listen() -> None:
            while not over.is_set():
                if came := signal.sigtimedwait(SIGNALS, 0.1):
                    self.note(came.si_signo)

        # A library may have threads that do not block them: then Python's handlers are called.
        before = {number: signal.signal(number, lambda n, _: self.note(n)) for number in SIGNALS}
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        listener = threading.Thread(target=listen, name="signals", daemon=True)
        listener.start()
        try:
            yield
        finally:
            over.set()
            listener.join()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            for number, handler in before.items():
                signal.signal(number, handler)
            self.file.unlink(missing_ok=True)
