"""Locks that a fork, a killed process or a stopped one cannot leave shut."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
import weakref
from collections.abc import Iterator
from threading import Lock
from typing import Protocol


class Forks(Protocol):
    def after_fork(self) -> None:
        """Called in the child, which has one thread only."""


_all: weakref.WeakSet[Forks] = weakref.WeakSet()


def tell_of_forks(who: Forks) -> None:
    """Have `who.after_fork` called in every forked child."""
    _all.add(who)


class ThreadLock:
    """A lock between threads that is free in a forked child, where the thread that held it does not exist."""

    def __init__(self) -> None:
        self._lock = Lock()
        tell_of_forks(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def after_fork(self) -> None:
        self._lock = Lock()


class FileLock:
    """`flock` on an open file description of its own, and a lock between the threads of this process.

    The kernel lets go of it when its process ends, however it ends. A process that was stopped (SIGSTOP) keeps it:
    so whoever waits gives up after `patience` seconds, and asks only once each time until it was free again.
    A forked child gets a description of its own: with the parent's, both would hold the lock at the same time, and
    it would stay locked if the parent died. OSError if the file cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str], flags: int = os.O_RDWR, *, patience: float = 0.25):
        self._path, self._flags, self._patience = path, flags | os.O_CLOEXEC, patience
        self._fd = os.open(path, self._flags, 0o600)
        self._threads = Lock()
        self._wait = patience
        tell_of_forks(self)

    @contextlib.contextmanager
    def held(self) -> Iterator[bool]:
        """Whether the lock was got; it is held until the end of the block."""
        deadline = time.monotonic() + self._wait
        if not self._threads.acquire(timeout=self._wait):
            yield False
            return
        try:
            got = self._flock(deadline)
            self._wait = self._patience if got else 0.0
            yield got
        finally:
            if self._fd >= 0:
                with contextlib.suppress(OSError):  # ENOLCK of a network file system
                    fcntl.flock(self._fd, fcntl.LOCK_UN)
            self._threads.release()

    def _flock(self, deadline: float) -> bool:
        pause = 0.0
        while self._fd >= 0:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    return False
            except OSError:  # the file system has no locks
                return False
            time.sleep(pause)
            pause = min(pause + 20e-6, 2e-3)
        return False

    def close(self) -> None:
        """Safe to call twice."""
        with self._threads:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)

    def after_fork(self) -> None:
        self._threads, self._wait = Lock(), self._patience
        if self._fd >= 0:
            os.close(self._fd)
            try:
                self._fd = os.open(self._path, self._flags, 0o600)
            except OSError:
                self._fd = -1  # never locked again, so nothing is written


def _after_fork() -> None:
    for who in list(_all):
        who.after_fork()


os.register_at_fork(after_in_child=_after_fork)
