"""Signals to a process that listens, and the watchdog beside it: real processes, a script each."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.processes import wait_gone

ROOT = Path(__file__).resolve().parents[2]
HEAD = """
    import itertools, os, signal, sys, time
    from pathlib import Path
    from pipeline import progress
    from pipeline.progress import alive, working
    from pipeline.stopping import Stopping, Stopped
    from pipeline.watchdog import watched
    folder = Path(sys.argv[1])
    stop = Stopping(grace_s=1)

    def ready():
        print("ready", flush=True)
"""


class Script:
    """The head and a body, in a process that has said it is ready."""

    def __init__(self, folder: Path, body: str):
        self.log = folder / "run.log"
        self.log.touch()
        code = textwrap.dedent(HEAD) + textwrap.dedent(body)
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, str(folder)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        self.started, self.children = time.monotonic(), [int(pid) for pid in children]

    def send(self, number: int, after: float = 0.0) -> Script:
        time.sleep(after)
        self.process.send_signal(number)
        return self

    def end(self) -> tuple[int, str, str]:
        """Exit status, and what was printed; nothing that it started is left."""
        out, err = self.process.communicate(timeout=60)
        self.seconds = time.monotonic() - self.started
        assert not wait_gone(self.children, 5)
        return self.process.returncode, out, err


# -- signals -----------------------------------------------------------------------------------------------------


def test_what_is_under_way_is_finished_and_the_rest_is_not_begun(tmp_path: Path) -> None:
    script = Script(
        tmp_path,
        """
        with stop.listening():
            for step in range(3):
                stop.finishing(f"step {step}")
                if step == 1:
                    ready()
                    time.sleep(0.5)  # which goes on after a signal
                if stop.asked:
                    break
            print("after step", step, stop.status)
        """,
    )
    code, out, err = script.send(signal.SIGINT).end()
    assert (code, out) == (0, "after step 1 130\n")
    assert err == "\nSIGINT: stops after step 1; once more stops at once\n"
    assert script.seconds > 0.45


def test_time_runs_out_after_sigterm_and_not_after_ctrl_c(tmp_path: Path) -> None:
    body = """
        try:
            with stop.listening():
                stop.finishing("step 1")
                ready()
                time.sleep(3)
                print("finished")
        except Stopped:
            print("cut")
        """
    terminated = Script(tmp_path, body)
    terminated.send(signal.SIGTERM)
    interrupted = Script(tmp_path, body)
    interrupted.send(signal.SIGINT)
    code, out, err = terminated.end()
    assert (code, out) == (0, "cut\n")
    assert "SIGTERM: stops after step 1, or in 1 s (run.grace_s); once more stops at once" in err
    assert "step 1 did not end within run.grace_s=1" in err
    assert interrupted.end()[:2] == (0, "finished\n")


def test_an_exception_that_was_swallowed_is_raised_again(tmp_path: Path) -> None:
    """As in a destructor, or by a bare `except` of somebody's loop."""
    script = Script(
        tmp_path,
        """
        swallowed = 0
        try:
            with stop.listening():
                ready()
                for attempt in range(2):
                    try:
                        time.sleep(20)
                    except BaseException:
                        swallowed += 1
                time.sleep(20)
        except Stopped:
            print("out after", swallowed)
        """,
    )
    code, out, err = script.send(signal.SIGTERM).end()
    assert (code, out) == (0, "out after 2\n")
    assert script.seconds < 10
    assert err == "\nSIGTERM: stops at once\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_wish_that_comes_as_two_signals(tmp_path: Path, number: signal.Signals) -> None:
    """timeout(1) sends its signal to the program and then to the whole group. The watchdog counts as the run does."""
    script = Script(
        tmp_path,
        """
        stop = Stopping(grace_s=20)
        with stop.listening(), watched(["a"], stop, 0, folder, end_s=0.5):
            stop.finishing("step 1")
            ready()
            deadline = time.monotonic() + 3
            while time.monotonic() < deadline: time.sleep(0.01)
        print(stop.signals)
        """,
    )
    script.send(number, after=0.3).send(number, after=0.01)
    code, out, err = script.end()
    assert (code, out) == (0, f"{[int(number)]}\n"), err
    assert err.startswith(f"\n{number.name}: stops after step 1")


def test_signals_that_ask_for_no_end_are_not_counted(tmp_path: Path) -> None:
    """A library may use alarms."""
    script = Script(
        tmp_path,
        """
        signal.signal(signal.SIGALRM, lambda *_: None)
        with stop.listening(), watched(["a"], stop, 0, folder, end_s=0.5):
            ready()
            for _ in range(10):
                signal.setitimer(signal.ITIMER_REAL, 0.15)
                time.sleep(0.3)
        print("well", stop.signals)
        """,
    )
    assert script.end() == (0, "well []\n", "")


CLOSING = """
    with stop.listening():
        stop.finishing("step 1")
        stop.closing()
        ready()
        time.sleep(2)
        print("closed")
    sys.exit(stop.status)
"""


def test_signals_do_not_disturb_the_closing_but_the_third_ends_the_process(tmp_path: Path) -> None:
    two, three = Script(tmp_path, CLOSING), Script(tmp_path, CLOSING)
    for script, count in ((two, 2), (three, 3)):
        for _ in range(count):
            script.send(signal.SIGTERM, after=0.1)
    assert two.end() == (143, "closed\n", "")
    assert three.end() == (143, "", "")


def test_handlers_are_put_back(tmp_path: Path) -> None:
    script = Script(
        tmp_path,
        """
        before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
        with stop.listening(), watched(["a"], stop, 0, folder):
            ready()
        print(before == [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)])
        print(signal.set_wakeup_fd(-1), progress.descriptors())
        """,
    )
    assert script.end() == (0, "True\n-1 ()\n", "")


# -- the watchdog ------------------------------------------------------------------------------------------------

STALL = """
    try:
        with stop.listening(), watched(["a", "b"], stop, 1, folder, end_s=1):
            {before}
            ready()
            {work}
        print("well")
    except Stopped:
        print(stop.error)
        sys.exit(3)
"""


def stalling(folder: Path, work: str, before: str = "pass") -> Script:
    return Script(folder, STALL.format(work=work, before=before))


def test_a_call_without_progress_is_told_to_the_process(tmp_path: Path) -> None:
    rows = list(range(900))
    code, out, err = stalling(tmp_path, f"with working('a', 'learn', 7, {rows}): time.sleep(60)").end()
    assert (code, err) == (3, "")
    told = "stage 'a' failed in step 7, rows 0, 1, 2, 3, 4, 5, 6, 7 and "
    assert out.startswith(told)
    assert "stalled: no progress for 1." in out
    assert out.endswith("; 900 rows wait for it\n")


def test_last_words_that_nobody_reads_do_not_hold_it_up(tmp_path: Path) -> None:
    """python run.py 2>&1 | (sleep 1000)"""
    script = Script(
        tmp_path,
        """
        try:
            with stop.listening(), watched(["a"], stop, 1, folder, end_s=1):
                ready()
                with working("a", "run", 1): time.sleep(60)
        except Stopped:
            print("x" * 2**20)
            sys.exit(3)
        """,
    )
    assert script.process.wait(30) == 1
    assert script.end()[1].startswith("xxx")


def test_nobody_at_work_is_a_stall_of_the_runner(tmp_path: Path) -> None:
    code, out, _ = stalling(tmp_path, "time.sleep(60)").end()
    assert code == 3
    assert out.startswith("stage 'runner' failed in step 0: stalled: no progress for 1.")
    assert out.endswith(", and no node is at work\n")


def test_progress_of_any_kind_is_enough(tmp_path: Path) -> None:
    work = """
            with working("a", "run", 1, [1]):
                for _ in range(10): time.sleep(0.2); alive()
            for _ in range(10):
                with working("b", "run", 1): time.sleep(0.2)
    """
    assert stalling(tmp_path, work.strip()).end() == (0, "well\n", "")


def test_a_process_that_was_stopped_by_its_user_has_not_waited(tmp_path: Path) -> None:
    """Ctrl-Z, or a cluster that suspends a job."""
    script = stalling(tmp_path, "with working('a', 'run', 1): time.sleep(0.4)")
    script.send(signal.SIGSTOP).send(signal.SIGCONT, after=2.5)
    assert script.end() == (0, "well\n", "")


HANG = "with working('a', 'run', 1, [5]): sum(itertools.repeat(0))"


def test_a_loop_in_c_that_keeps_the_interpreter_is_ended_from_outside(tmp_path: Path) -> None:
    script = stalling(tmp_path, HANG)
    code, out, err = script.end()
    assert (code, out) == (1, "")
    assert "stage 'a' failed in step 1, rows 5: stalled: no progress for 1." in err
    assert f"The stacks are in {script.log}" in err
    assert 'File "<string>", line ' in script.log.read_text()
    assert script.seconds < 15


def test_under_nohup_it_is_killed(tmp_path: Path) -> None:
    """SIGHUP, by which it would end with status 1, has been given a meaning there."""
    script = Script(
        tmp_path,
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        + textwrap.dedent(STALL).format(work=HANG, before="os.kill(os.getpid(), signal.SIGHUP)"),
    )
    assert script.end()[0] == -signal.SIGKILL
    assert "stage 'a' failed in step 1, rows 5" in script.log.read_text()


def test_a_second_signal_ends_what_cannot_hear_it(tmp_path: Path) -> None:
    script = Script(
        tmp_path,
        """
        with stop.listening(), watched(["a"], stop, 0, folder, end_s=1):
            stop.finishing("step 1")
            ready()
            with working("a", "run", 1): sum(itertools.repeat(0))
        """,
    )
    script.send(signal.SIGINT, after=0.3)
    time.sleep(2)
    assert script.process.poll() is None, "the first lets the step be finished"
    code, _, err = script.send(signal.SIGINT).end()
    assert code == 1
    assert "the run was stopped and did not end within 1 s; it is killed" in err
    assert "in <module>" in script.log.read_text()


def test_a_run_whose_watchdog_was_killed_goes_on_and_says_so(tmp_path: Path) -> None:
    script = Script(
        tmp_path,
        """
        with stop.listening(), watched(["a"], stop, 1, folder):
            stop.finishing("step 1")
            ready()
            while not stop.asked: time.sleep(0.1)
        print("well")
        """,
    )
    os.kill(script.children[0], signal.SIGKILL)
    time.sleep(0.5)
    code, out, err = script.send(signal.SIGINT).end()
    assert (code, out) == (0, "well\n")
    told = "the process of the watchdog has ended; the run goes on, but nobody sees it if a node makes no progress"
    assert [line for line in err.splitlines() if line] == [
        told,  # by the log, of which this script has no file
        told,
        "SIGINT: stops after step 1; once more stops at once",
    ]


def test_the_log_that_is_gone_is_told_on_the_terminal(tmp_path: Path) -> None:
    script = stalling(tmp_path, HANG)
    script.log.unlink()
    code, _, err = script.end()
    assert code == 1
    assert 'File "<string>", line ' in err
    assert not script.log.exists()


@pytest.mark.parametrize("how", ["os._exit(5)", "os.kill(os.getpid(), signal.SIGKILL)", "raise RuntimeError"])
def test_the_watchdog_goes_with_its_process(tmp_path: Path, how: str) -> None:
    watch = "with stop.listening(), watched(['a'], stop, 0, folder):"
    script = Script(tmp_path, f"{watch}\n    ready()\n    time.sleep(0.3)\n    {how}")
    assert len(script.children) == 1
    assert script.end()[0] in (5, -9, 1)
