"""The pool of scoring processes: whatever a row does, only that row is lost, and nothing stays behind."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from stages.reward.workers import ScorerPool
from tests.processes import wait_gone
from tests.stages.reward.support import Tricky, children, group, sample

TIMEOUT_S = 0.7


@contextmanager
def opened(workers: int = 1, args: tuple[str, ...] = (), log: Path | None = None) -> Iterator[ScorerPool]:
    pool = ScorerPool(Tricky, args, name="judge", workers=workers, timeout_s=TIMEOUT_S, log_file=log)
    pool.open()
    try:
        yield pool
    finally:
        left = [p for leader in pool.pids() for p in group(leader)]
        pool.close()
        assert wait_gone(left, 3) == []


@pytest.fixture(scope="module", params=[1, 3])
def pool(request: pytest.FixtureRequest) -> Iterator[ScorerPool]:
    with opened(workers=request.param) as pool:
        yield pool


def test_outcomes_come_in_the_order_of_the_samples(pool: ScorerPool) -> None:
    numbers = np.random.default_rng(0).normal(size=97)
    outcomes = pool.score([sample("fine", float(x)) for x in numbers])
    assert [o.score for o in outcomes] == numbers.tolist()
    assert {o.reason for o in outcomes} == {""}
    assert [o.parts for o in outcomes] == [{"part": x} for x in numbers]


def test_no_samples_no_outcomes(pool: ScorerPool) -> None:
    assert pool.score([]) == []


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("spin", "timed out after 0.7 s"),
        ("tower", "timed out after 0.7 s"),
        ("stubborn", "timed out after 0.7 s"),
        ("leave", "worker died (process 'judge' ended with exit code 3)"),
        ("crash", "worker died (process 'judge' ended by signal SIGSEGV; where it crashed stands in its log)"),
        ("abstain", "has no opinion"),
        ("error boom", "raised KeyError: 'boom'"),
        ("quit", "raised SystemExit: 5"),
    ],
)
def test_only_the_row_that_fails_is_lost_and_the_pool_goes_on(pool: ScorerPool, what: str, reason: str) -> None:
    rows = [sample("fine", 1.0), sample("fine", 2.0), sample(what, 3.0), sample("fine", 4.0), sample("fine", 5.0)]
    outcomes = pool.score(rows)
    assert [o.reason for o in outcomes] == ["", "", reason, "", ""]
    assert np.isnan(outcomes[2].score)
    assert [o.score for o in outcomes if not o.reason] == [1.0, 2.0, 4.0, 5.0]
    assert [o.score for o in pool.score([sample("fine", 6.0)])] == [6.0]


def test_every_row_may_fail(pool: ScorerPool) -> None:
    outcomes = pool.score([sample("leave")] * 4)
    assert [o.reason for o in outcomes] == ["worker died (process 'judge' ended with exit code 3)"] * 4


def test_a_fork_that_comes_back_from_the_scorer_answers_nothing(pool: ScorerPool) -> None:
    outcomes = pool.score([sample("fork", 1.0), sample("fine", 2.0), sample("fork", 3.0), sample("fine", 4.0)])
    assert [o.score for o in outcomes] == [1.0, 2.0, 3.0, 4.0]


def test_workers_work_at_the_same_time() -> None:
    with opened(workers=4) as pool:
        started = time.monotonic()
        outcomes = pool.score([sample("slow 0.5")] * 4)
        assert time.monotonic() - started < 1.6  # one after the other: 2 s
        assert [o.reason for o in outcomes] == [""] * 4


def test_the_limit_is_for_one_row_not_for_the_batch(pool: ScorerPool) -> None:
    outcomes = pool.score([sample("slow 0.2", float(i)) for i in range(8)])
    assert [o.score for o in outcomes] == list(map(float, range(8)))


def test_what_a_scorer_starts_dies_with_its_worker(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    with opened() as pool:
        assert pool.score([sample(f"child {note}")])[0].reason == f"timed out after {TIMEOUT_S:g} s"
        assert wait_gone([int(note.read_text())], 3) == []


def test_workers_are_warm_after_open_and_gone_after_close(tmp_path: Path) -> None:
    before = children()
    with opened(workers=2, args=(str(tmp_path),)) as pool:
        assert {int(p.name) for p in tmp_path.iterdir()} == set(pool.pids())
        assert children() - before == set(pool.pids())
    assert children() == before
    pool.close()  # once more
    with pytest.raises(RuntimeError, match="judge is closed"):
        pool.score([sample("fine")])


def test_a_worker_that_ended_between_two_steps_is_replaced_and_no_row_blamed() -> None:
    with opened(workers=2) as pool:
        pool.score([sample("fine")] * 4)
        victim = pool.pids()[0]
        os.kill(victim, signal.SIGKILL)
        assert wait_gone([victim], 3) == []
        assert [o.reason for o in pool.score([sample("fine")] * 4)] == [""] * 4
        assert victim not in pool.pids()


def test_close_in_the_middle_of_a_step_leaves_no_process() -> None:
    before = children()
    pool = ScorerPool(Tricky, (), name="judge", workers=2, timeout_s=60)
    pool.open()
    raised: list[BaseException] = []

    def work() -> None:
        try:
            pool.score([sample("spin")] * 4)
        except BaseException as e:
            raised.append(e)

    thread = threading.Thread(target=work)
    thread.start()
    time.sleep(0.3)
    left = [p for leader in pool.pids() for p in group(leader)]
    pool.close()
    thread.join(5)
    assert not thread.is_alive()
    assert [type(e) for e in raised] == [RuntimeError]
    assert "closed" in str(raised[0])
    assert wait_gone(left, 3) == []
    assert children() == before


def test_after_an_interrupt_no_old_answer_is_taken_for_a_new_one() -> None:
    with opened() as pool:
        timer = threading.Timer(0.25, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            pool.score([sample("slow 0.5", 1.0), sample("fine", 2.0)])
        assert [o.score for o in pool.score([sample("fine", 3.0)])] == [3.0]


@pytest.mark.parametrize(
    ("how", "error", "says"),
    [("raise", ValueError, "cannot be built"), ("exit", RuntimeError, "could not be started.*exit code 7")],
)
def test_a_worker_that_cannot_start_is_an_error_of_open(how: str, error: type[Exception], says: str) -> None:
    before = children()
    pool = ScorerPool(Tricky, ("", how), name="judge", workers=2, timeout_s=TIMEOUT_S)
    with pytest.raises(error, match=says):
        pool.open()
    assert children() == before


def test_each_error_is_logged_once_with_its_traceback_and_row(caplog: pytest.LogCaptureFixture) -> None:
    with opened() as pool, caplog.at_level(logging.WARNING, "headrace"):
        pool.score([sample("fine", row_id=4), sample("error one", row_id=5), sample("error two", row_id=6)])
        pool.score([sample("error three", row_id=7), sample("leave", row_id=8), sample("leave", row_id=9)])
    assert len(caplog.messages) == 2
    assert "judge, row 5: raised KeyError: 'one'" in caplog.messages[0]
    assert "in error\n    raise KeyError(rest)" in caplog.messages[0]
    assert "judge, row 8: worker died" in caplog.messages[1]


def test_what_a_scorer_prints_goes_to_the_log(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    with opened(log=log) as pool:
        assert pool.score([sample("say hello"), sample("spin")])[0].reason == ""
    assert "it says hello\n" in log.read_text()


_PARENT = """
import sys, time
from pathlib import Path
from stages.reward.workers import ScorerPool
from tests.stages.reward.support import Tricky, group, sample
note, how = sys.argv[1:]
pool = ScorerPool(Tricky, (), name="judge", workers=2, timeout_s=60)
pool.open()
print(*[p for leader in pool.pids() for p in group(leader)], flush=True)
if how == "raise":
    raise SystemExit(3)
pool.score([sample(f"child {note}"), sample("spin")])
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, "raise"])
def test_no_process_outlives_a_parent_that_ends_without_close(
    tmp_path: Path, root: Path, how: signal.Signals | str
) -> None:
    note = tmp_path / "pid"
    command = [sys.executable, "-c", _PARENT, str(note), str(how)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(root)}
    ) as parent:
        assert parent.stdout
        left = [int(p) for p in parent.stdout.readline().split()]
        assert len(left) == 4  # two workers, each with its guard
        if isinstance(how, signal.Signals):
            _wait_for(lambda: note.exists() and note.read_text() != "")
            left.append(int(note.read_text()))
            assert wait_gone(left, 0) == left
            parent.send_signal(how)
        assert parent.wait(10) == (-how if isinstance(how, signal.Signals) else 3)
    assert wait_gone(left, 5) == []


def _wait_for(what: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.02)
