"""What is kept in memory, what is dropped, and what it costs."""

from __future__ import annotations

import os
import threading
import time
import tracemalloc
from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.tokenizer_cache.keys import key
from stages.tokenizer_cache.lru import ENTRY_BYTES, LeastRecentlyUsed, frozen

operations = st.lists(st.tuples(st.sampled_from("gp"), st.integers(0, 9), st.integers(0, 100)), max_size=60)


@given(operations, st.integers(0, 3 * (ENTRY_BYTES + 400)))
def test_it_is_a_least_recently_used_list_within_its_bytes(steps: list[tuple[str, int, int]], limit: int) -> None:
    store, model, evictions = LeastRecentlyUsed(limit), OrderedDict[bytes, int](), 0
    for what, name, size in steps:
        k = bytes([name])
        if what == "g":
            [found] = store.get([k])
            assert (None if found is None else len(found)) == model.get(k)
            if k in model:
                model[k] = model.pop(k)
        else:
            store.put([(k, np.zeros(size, np.int32))])
            model.pop(k, None)
            if 4 * size + ENTRY_BYTES <= limit:
                model[k] = size
            while sum(4 * s + ENTRY_BYTES for s in model.values()) > limit:
                del model[next(iter(model))]
                evictions += 1
        assert store.bytes == sum(4 * s + ENTRY_BYTES for s in model.values()) <= limit
        assert (len(store), store.evictions) == (len(model), evictions)


def test_what_is_kept_cannot_be_changed_by_who_put_or_got_it() -> None:
    store, mine = LeastRecentlyUsed(2**20), np.arange(5, dtype=np.int32)
    store.put([(b"k", mine)])
    mine[:] = 9
    [found] = store.get([b"k"])
    assert found is not None
    assert found.tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="read-only"):
        found[0] = 1


def test_bytes_are_counted_as_python_takes_them() -> None:
    """What the store says it holds is what the process pays, within a quarter."""
    entries, length = 4096, 100
    tracemalloc.start()
    try:
        store, before = LeastRecentlyUsed(2**30), tracemalloc.get_traced_memory()[0]
        for i in range(entries):
            store.put([(key(b"f", str(i).encode()), frozen([i] * length))])
        paid = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 0.75 < store.bytes / paid < 1.25


def test_the_room_that_is_advised_is_enough() -> None:
    store = LeastRecentlyUsed(LeastRecentlyUsed(0).room(50, sum(range(50))))
    for i in range(50):
        store.put([(bytes([i]), frozen(range(i)))])
    assert (len(store), store.evictions, store.bytes) == (50, 0, store.max_bytes)


def test_an_operation_does_not_slow_down_with_the_number_of_entries() -> None:
    def seconds(entries: int) -> float:
        store, ids = LeastRecentlyUsed(entries * (ENTRY_BYTES + 4)), frozen([0])
        store.put([(i.to_bytes(8), ids) for i in range(entries)])
        best = float("inf")
        for repeat in range(5):
            started = time.perf_counter()
            for i in range(500):  # each put drops the oldest
                store.put([((entries * (repeat + 1) + i).to_bytes(9), ids)])
                store.get([(entries * (repeat + 1) + i).to_bytes(9)])
            best = min(best, time.perf_counter() - started)
        return best

    assert seconds(50_000) < 10 * seconds(500)  # a linear search would take a hundred times as long


def test_a_child_that_is_forked_in_the_middle_can_use_it() -> None:
    """The thread that was in the store does not exist in the child, so nobody would open its lock."""
    store = LeastRecentlyUsed(2**20)
    store.put([(b"k", frozen([1]))])
    inside, done = threading.Event(), threading.Event()

    def hold() -> None:
        with store._lock:
            inside.set()
            done.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait(20)
    child = os.fork()
    if not child:
        os._exit(0 if store.get([b"k"])[0] is not None else 1)
    ended = 0
    deadline = time.monotonic() + 10
    while not ended and time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        time.sleep(0.01)
    done.set()
    thread.join()
    if not ended:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert ended
    assert os.waitstatus_to_exitcode(status) == 0
