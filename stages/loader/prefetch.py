"""Batches prepared ahead by one thread, so that a step does not wait for the disk."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetch(Generic[T]):
    """Calls `make` over and over, and holds up to `depth` results. An exception of `make` ends the thread and is
    raised by `take` when its turn comes, and by every later one."""

    def __init__(self, make: Callable[[], T], depth: int, name: str):
        self._make, self._depth = make, depth
        self._ready: deque[T] = deque()
        self._error: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            while self._has_room():
                item = self._make()
                with self._changed:
                    self._ready.append(item)
                    self._changed.notify_all()
        except BaseException as e:
            with self._changed:
                self._error = e
                self._changed.notify_all()

    def _has_room(self) -> bool:
        """Waits for room; False: it is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._ready) < self._depth)
            return not self._closed

    def take(self) -> T:
        """The next result; waits for it if it is not ready."""
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._error or self._closed)
            if self._ready:
                item = self._ready.popleft()
                self._changed.notify_all()
                return item
            if self._error:
                raise self._error
            raise RuntimeError("no batch is taken from a loader that is closed")

    def close(self) -> None:
        """Ends the thread, after the batch that is under way, and drops what is ready. Safe to call twice."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        self._thread.join()
