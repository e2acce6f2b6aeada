"""Child processes: what crosses, how they end, and that nothing is left of them."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.process import Child, ChildDied, RemoteError
from tests.processes import shm_left, shm_names, wait_gone

ROOT = Path(__file__).resolve().parents[2]


class Odd(Exception):
    """Cannot be pickled: its constructor takes two arguments, and its args are one."""

    def __init__(self, a: int, b: int):
        super().__init__(a + b)


class Worker:
    """What the children of these tests serve."""

    def __init__(self, factor: int = 2, fail: bool = False):
        if fail:
            raise ValueError("cannot be built")
        self.factor = factor

    def double(self, value: Any) -> Any:
        return value * self.factor

    def echo(self, value: Any) -> Any:
        return value

    def flags(self, arrays: list[np.ndarray]) -> list[tuple[bool, str, tuple[int, ...]]]:
        return [(a.flags.writeable, str(a.dtype), a.shape) for a in arrays]

    def total(self, array: np.ndarray) -> float:
        return float(array.sum(dtype=np.float64))

    def fail(self, kind: str) -> None:
        if kind == "odd":
            raise Odd(1, 2)
        raise {"value": ValueError, "eof": EOFError, "pipe": BrokenPipeError}[kind]("seven is not allowed")

    def unpicklable(self) -> Any:
        return lambda: 1

    def count(self, n: int, fail_at: int = -1) -> Iterator[int]:
        for i in range(n):
            if i == fail_at:
                raise ValueError(f"no {i}")
            yield i

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def close_late(self) -> None:
        time.sleep(60)

    def close_badly(self) -> None:
        raise ValueError("cannot close")

    def leave(self, how: str) -> None:
        if how == "exit":
            os._exit(3)
        os.kill(os.getpid(), getattr(signal, how))

    def hold(self) -> None:
        """A loop in C that never gives the interpreter back."""
        sum(range(10**12))

    def grandchild(self) -> int:
        return subprocess.Popen(["sleep", "600"]).pid

    def pid(self) -> int:
        return os.getpid()

    def chatter(self) -> None:
        print("said aloud")
        print("said in error", file=sys.stderr)


@pytest.fixture
def child() -> Iterator[Child]:
    made = Child(Worker, 3, name="worker")
    made.wait_ready(60)
    yield made
    made.kill()
    assert not wait_gone([made.pid], 5)


# -- what crosses --------------------------------------------------------------------------------------------


def test_values_cross(child: Child) -> None:
    value = {"a": [1, None, "ü", 2.5, True], "b": (b"x", {3})}
    assert child.call("echo", value) == value
    assert child.call("double", 14) == 42
    assert child.pid == child.call("pid") != os.getpid()


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "int16", "int32", "int64", "float16", "float32", "float64"])
def test_arrays_cross_with_their_dtype(child: Child, dtype: str) -> None:
    rng = np.random.default_rng(0)
    for shape in ((7,), (0,), (3, 0), (2, 3, 5), ()):
        array = (rng.random(shape) * 100).astype(dtype)
        back = child.call("echo", array)
        assert (back.dtype, back.shape, back.tobytes()) == (array.dtype, array.shape, array.tobytes())


def test_arrays_arrive_read_only_and_without_a_copy(child: Child) -> None:
    assert child.call("flags", [np.zeros(3), np.zeros((2, 2), np.int32)]) == [
        (False, "float64", (3,)),
        (False, "int32", (2, 2)),
    ]
    back = child.call("echo", np.arange(5))
    assert not back.flags.writeable
    assert not back.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        back[0] = 1


def test_many_arrays_and_odd_layouts(child: Child) -> None:
    base = np.arange(60).reshape(6, 10)
    arrays = [base, base.T, base[::2], base[:, ::3], np.asfortranarray(base), *(np.arange(i) for i in range(200))]
    for sent, back in zip(arrays, child.call("echo", arrays), strict=True):
        np.testing.assert_array_equal(sent, back)


def test_more_than_100_mb(child: Child) -> None:
    array = np.arange(15_000_000, dtype=np.float64)
    assert array.nbytes > 100e6
    assert child.call("total", array) == 14_999_999 * 15_000_000 / 2
    assert child.call("echo", array)[-1] == 14_999_999


def test_an_array_outlives_its_message(child: Child) -> None:
    first = child.call("echo", np.full(1000, 7))
    for _ in range(20):
        child.call("echo", np.zeros(1000))
    assert np.all(first == 7)


def test_a_stream_crosses_item_by_item(child: Child) -> None:
    assert list(child.stream("count", 5)) == [0, 1, 2, 3, 4]
    assert list(child.stream("count", 0)) == []
    broken = child.stream("count", 5, 2)
    assert [next(broken), next(broken)] == [0, 1]
    with pytest.raises(ValueError, match="no 2"):
        next(broken)
    assert child.call("echo", 1) == 1, "after an error in a stream it serves on"


def test_threads_take_turns(child: Child) -> None:
    out: dict[int, list[Any]] = {}

    def ask(k: int) -> None:
        out[k] = [child.call("double", np.full(k + 1, k)).tolist() for _ in range(20)]

    threads = [threading.Thread(target=ask, args=(k,)) for k in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(30)
    assert out == {k: [[3 * k] * (k + 1)] * 20 for k in range(6)}


def test_what_a_child_prints_goes_to_its_log(tmp_path: Path) -> None:
    made = Child(Worker, name="worker", log=tmp_path / "run.log")
    made.wait_ready(60)
    made.call("chatter")
    made.kill()
    assert (tmp_path / "run.log").read_text().split("\n")[:2] == ["said aloud", "said in error"]


# -- errors --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "type_"), [("value", ValueError), ("eof", EOFError), ("pipe", BrokenPipeError)])
def test_an_exception_crosses_with_its_traceback(child: Child, kind: str, type_: type[Exception]) -> None:
    with pytest.raises(type_, match="seven is not allowed") as caught:
        child.call("fail", kind)
    assert "in fail" in "".join(caught.value.__notes__)
    assert child.call("echo", 1) == 1, "an exception of a method does not end the process"


def test_an_exception_that_cannot_be_pickled_crosses_as_text(child: Child) -> None:
    with pytest.raises(TypeError):
        pickle.loads(pickle.dumps(Odd(1, 2)))
    with pytest.raises(RemoteError, match="Odd: 3"):
        child.call("fail", "odd")


def test_a_result_that_cannot_be_pickled_is_an_error(child: Child) -> None:
    with pytest.raises((pickle.PicklingError, AttributeError, RemoteError), match="lambda"):
        child.call("unpicklable")
    assert child.call("echo", 1) == 1


def test_an_unknown_method_is_an_error(child: Child) -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        child.call("nonsense")
    assert child.call("echo", 1) == 1


def test_an_error_while_building() -> None:
    made = Child(Worker, 2, True, name="worker")
    with pytest.raises(ValueError, match="cannot be built"):
        made.wait_ready(60)
    made.kill()


@pytest.mark.parametrize(
    ("how", "words"), [("exit", "with exit code 3"), ("SIGKILL", "by signal SIGKILL"), ("SIGSEGV", "by signal SIGSEGV")]
)
def test_a_death_is_told_with_its_cause(child: Child, how: str, words: str) -> None:
    with pytest.raises(ChildDied, match=f"process 'worker' ended {words}"):
        child.call("leave", how)
    with pytest.raises(ChildDied, match=words):
        child.call("echo", 1)


def test_a_timeout_leaves_only_the_end(child: Child) -> None:
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        child.call("sleep", 30.0, timeout=0.2)
    with pytest.raises(RuntimeError, match="still owes an answer"):
        child.call("echo", 1)
    child.close("pid", 10)
    assert time.monotonic() - started < 5
    assert not wait_gone([child.pid], 5)


def test_a_stream_that_is_left_leaves_only_the_end(child: Child) -> None:
    stream = child.stream("count", 1000)
    assert next(stream) == 0
    stream.close()  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="still owes an answer"):
        child.call("echo", 1)
    child.close("pid", 10)
    assert not wait_gone([child.pid], 5)


# -- the end -------------------------------------------------------------------------------------------------


def test_close_while_a_call_is_under_way_does_not_wait(child: Child) -> None:
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            child.call("sleep", 60.0)
        except ChildDied as e:
            errors.append(e)

    caller = threading.Thread(target=ask)
    caller.start()
    time.sleep(0.3)
    started = time.monotonic()
    child.close("pid", 30)
    caller.join(10)
    assert time.monotonic() - started < 5
    assert not caller.is_alive()
    assert "SIGKILL" in str(errors[0])


def test_close_is_bounded_and_tells_errors(child: Child) -> None:
    with pytest.raises(ValueError, match="cannot close"):
        child.close("close_badly", 10)
    assert not wait_gone([child.pid], 5)
    slow = Child(Worker, name="slow")
    slow.wait_ready(60)
    started = time.monotonic()
    slow.close("close_late", 0.3)
    assert time.monotonic() - started < 5
    assert not wait_gone([slow.pid], 5)
    slow.kill()  # again


def test_grandchildren_go_with_the_child(child: Child) -> None:
    grandchild = child.call("grandchild")
    assert wait_gone([grandchild], 0) == [grandchild]
    child.kill()
    assert not wait_gone([grandchild], 5)


def test_grandchildren_go_when_the_child_dies_by_itself(child: Child) -> None:
    grandchild = child.call("grandchild")
    with pytest.raises(ChildDied):
        child.call("leave", "SIGKILL")
    assert not wait_gone([grandchild], 5)


def test_a_child_outlives_the_thread_that_started_it() -> None:
    made: list[Child] = []
    starter = threading.Thread(target=lambda: made.append(Child(Worker, name="worker")))
    starter.start()
    starter.join()
    made[0].wait_ready(60)
    time.sleep(0.5)
    assert made[0].call("echo", 5) == 5
    made[0].kill()


SCRIPT = """
    import os, signal, sys, threading, time
    import numpy as np
    from tests.pipeline.test_process import Child, Worker
    child = Child(Worker, name="worker")
    child.wait_ready(60)
    child.call("echo", np.zeros(1000000))
    print(child.pid, child.call("grandchild"), flush=True)
"""
ENDS = {
    "normal": ("child.close('pid', 10)", None, 0),
    "without closing": ("", None, 0),
    "exception": ("raise RuntimeError('broken')", None, 1),
    "exit at once": ("os._exit(7)", None, 7),
    "SIGTERM": ("time.sleep(60)", signal.SIGTERM, -signal.SIGTERM),
    "SIGKILL": ("time.sleep(60)", signal.SIGKILL, -signal.SIGKILL),
    "SIGKILL while the child holds its interpreter": (
        "threading.Thread(target=lambda: child.call('hold')).start(); time.sleep(60)",
        signal.SIGKILL,
        -signal.SIGKILL,
    ),
}


@pytest.mark.parametrize("end", ENDS)
def test_nothing_is_left(end: str) -> None:
    """No process and no shared memory, however the parent ends."""
    action, sent, code = ENDS[end]
    before = shm_names()
    script = textwrap.dedent(SCRIPT) + action + "\n"
    parent = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert parent.stdout is not None
    pids = [int(p) for p in parent.stdout.readline().split()]
    assert len(pids) == 2
    if sent:
        time.sleep(0.5)
        assert wait_gone(pids, 0) == pids, "they live as long as the parent does"
        parent.send_signal(sent)
    parent.communicate(timeout=30)
    assert parent.returncode == code
    assert not wait_gone(pids, 5)
    assert not shm_left(before)


def test_a_parent_killed_while_children_start_leaves_nothing() -> None:
    """At any moment of the start: the group of each child is empty soon after."""
    script = textwrap.dedent("""
        from tests.pipeline.test_process import Child, Worker
        while True:
            print(Child(Worker, name="worker").pid, flush=True)
    """)
    for wait in (0.0, 0.05, 0.2):
        parent = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE)
        assert parent.stdout is not None
        first = int(parent.stdout.readline())
        time.sleep(wait)
        parent.kill()
        rest, _ = parent.communicate(timeout=30)
        assert not wait_gone([first, *(int(p) for p in rest.split())], 10)
