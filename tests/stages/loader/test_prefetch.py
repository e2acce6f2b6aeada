"""A thread that works ahead: bounded, in order, its errors told where they are waited for."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable

import pytest

from stages.loader.prefetch import Prefetch


def until(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    give_up = time.monotonic() + seconds
    while not condition() and time.monotonic() < give_up:
        time.sleep(0.005)
    return condition()


def test_results_come_in_order_and_no_more_than_asked_for() -> None:
    made: list[int] = []
    numbers = itertools.count()

    def make() -> int:
        made.append(next(numbers))
        return made[-1]

    ahead = Prefetch(make, 3, "test")
    try:
        for i in range(20):
            assert until(lambda i=i: len(made) == i + 3)
            assert ahead.take() == i
        time.sleep(0.05)
        assert len(made) == 23
    finally:
        ahead.close()


def test_what_is_slow_is_waited_for() -> None:
    go = threading.Event()

    def make() -> int:
        go.wait(20)
        return 7

    ahead = Prefetch(make, 2, "test")
    threading.Timer(0.1, go.set).start()
    started = time.monotonic()
    assert ahead.take() == 7
    assert time.monotonic() - started >= 0.09
    ahead.close()


def test_an_error_comes_in_its_turn_and_again() -> None:
    numbers = itertools.count()

    def make() -> int:
        if (n := next(numbers)) == 2:
            raise ValueError("row 2")
        return n

    ahead = Prefetch(make, 5, "test")
    assert [ahead.take(), ahead.take()] == [0, 1]
    for _ in range(2):
        with pytest.raises(ValueError, match="row 2"):
            ahead.take()
    ahead.close()


def test_closing_ends_the_thread_whatever_it_does() -> None:
    full = Prefetch(lambda: 1, 1, "test")
    full.close()
    full.close()
    assert not full._thread.is_alive()
    with pytest.raises(RuntimeError, match="closed"):
        full.take()
    busy = Prefetch(lambda: time.sleep(0.1), 1, "test")
    busy.close()
    assert not busy._thread.is_alive()


def test_closing_wakes_who_waits() -> None:
    go = threading.Event()
    ahead = Prefetch(lambda: go.wait(20), 1, "test")
    told: list[str] = []

    def wait() -> None:
        try:
            ahead.take()
        except RuntimeError as e:
            told.append(str(e))

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.05)
    threading.Timer(0.1, go.set).start()
    ahead.close()
    waiting.join(20)
    assert told == ["no batch is taken from a loader that is closed"]
