"""Locks that nobody waits for without end."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from stages.locks import FileLock, ThreadLock

HOLD = """
import sys, time
from stages.locks import FileLock
with FileLock(sys.argv[1]).held() as got:
    print(got, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "lock").touch()
    return tmp_path / "lock"


def test_one_holds_it_at_a_time(file: Path, root: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(file)], cwd=root, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "True\n"
        lock = FileLock(file, patience=0.1)
        began = time.monotonic()
        with lock.held() as got:
            assert not got
        waited = time.monotonic() - began
        for _ in range(100):  # it was not free the last time, so nobody waits again
            with lock.held() as got:
                assert not got
        assert 0.1 <= waited < 5
        assert time.monotonic() - began < waited + 0.5
    finally:
        holder.kill()
        holder.wait()
    with lock.held() as got:  # the kernel gave it back
        assert got
    lock.close()
    lock.close()
    with lock.held() as got:
        assert not got


def test_threads_of_a_process_exclude_each_other(file: Path) -> None:
    lock, inside, most = FileLock(file, patience=30), list[int](), list[int]()

    def work() -> None:
        for _ in range(50):
            with lock.held() as got:
                assert got
                inside.append(1)
                most.append(len(inside))
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert max(most) == 1
    assert len(most) == 400


def test_an_error_in_the_block_gives_it_back(file: Path) -> None:
    lock = FileLock(file)
    with pytest.raises(KeyError), lock.held():
        raise KeyError
    other = FileLock(file, patience=0.0)
    with other.held() as got:
        assert got


def test_a_lock_of_threads_is_free_in_a_forked_child() -> None:
    lock = ThreadLock()
    with lock:
        child = os.fork()
        if not child:
            free = lock._lock.acquire(blocking=False)
            os._exit(0 if free else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert not lock._lock.acquire(blocking=False)
