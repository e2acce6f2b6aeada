"""A stage that breaks: wherever it does, in whatever way, placement and order of work, the run ends the same way."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from pipeline.errors import StageError
from pipeline.program import Program
from tests.pipeline.conftest import toy
from tests.pipeline.test_placement import children, placed
from tests.processes import wait_gone

AWKWARD = "plugins=[tests.pipeline.stages_for_tests,tests.pipeline.stages_of_ends]"
ROWS = (6, 7, 8, 9, 10, 11)
"""Of step 2."""
PLACES = {
    # method of a node: step, and rows by runner
    ("double", "open"): (0, {"sync": (), "overlap": ()}),
    ("double", "eval"): (0, {"sync": (0, 1, 2, 3), "overlap": (0, 1, 2, 3)}),
    ("double", "run"): (2, {"sync": ROWS, "overlap": ROWS}),
    ("double", "stream"): (2, {"overlap": ROWS[1:]}),  # the first was finished
    ("double", "receive"): (2, {"sync": (), "overlap": ()}),
    ("learner", "open"): (0, {"sync": (), "overlap": ()}),
    ("learner", "run"): (2, {"sync": ROWS, "overlap": None}),  # of the part it was fed
    ("learner", "learn"): (2, {"sync": ROWS, "overlap": ROWS}),
    ("learner", "publish"): (2, {"sync": (), "overlap": ()}),
    ("learner", "export"): (3, {"sync": (), "overlap": ()}),
    ("learner", "advice"): (3, {"sync": (), "overlap": ()}),
    ("learner", "close"): (3, {"sync": (), "overlap": ()}),
}
EVERY = [
    pytest.param(node, method, runner, placement, id=f"{node}.{method}-{runner}-{placement}")
    for (node, method), (_, rows) in PLACES.items()
    for runner in rows
    for placement in ("local", "process")
]


def execute(run_dir: Path, *overrides: str) -> None:
    with Program(toy(AWKWARD, "double=awkward", "learner=awkward", *overrides), run_dir) as program:
        program.execute()


def broken(run_dir: Path, node: str, method: str, runner: str, placement: str, *more: str) -> StageError:
    """The error of a run in which that happens; nothing is left of its processes, whose memory has no names."""
    before = children()
    places = placed("double", "learner") if placement == "process" else "placement={}"
    with pytest.raises(StageError) as caught:
        execute(run_dir, f"{node}.where={method}", *more, f"runner={runner}", places)
    assert not wait_gone(sorted(children() - before), 5)
    return caught.value


@pytest.mark.parametrize(("node", "method", "runner", "placement"), EVERY)
def test_an_exception_names_node_step_rows_and_place(
    tmp_path: Path, node: str, method: str, runner: str, placement: str
) -> None:
    error = broken(tmp_path, node, method, runner, placement)
    step, rows = PLACES[node, method]
    assert (error.node, error.step) == (node, step)
    if rows[runner] is None:
        assert set(error.rows) <= set(ROWS)
        assert error.rows
    else:
        assert error.rows == rows[runner]
    assert error.what.startswith("ArithmeticError: told to")
    assert "stages_of_ends.py" in error.detail
    assert "in fail\n    raise ArithmeticError(text)" in error.detail
    closed = (tmp_path / "closed").read_text().split()
    assert sorted(closed) == (["double"] if method == "open" and node == "double" else ["double", "learner"])
    assert not (tmp_path / "final.part").exists()
    assert (tmp_path / "final").exists() == (method in ("advice", "close"))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("leave", "ended with exit code 7"),
        ("kill", "ended by signal SIGKILL"),
        ("crash", "ended by signal SIGSEGV; where it crashed stands in its log"),
    ],
)
@pytest.mark.parametrize(("node", "method", "runner"), [("double", "run", "overlap"), ("learner", "learn", "sync")])
def test_a_process_that_dies_is_no_different(
    tmp_path: Path, node: str, method: str, runner: str, how: str, words: str
) -> None:
    error = broken(tmp_path, node, method, runner, "process", f"{node}.how={how}")
    assert (error.node, error.step, error.rows) == (node, 2, ROWS)
    assert error.what == f"ChildDied: process '{node}' {words}"
    assert (tmp_path / "closed").read_text().split() == [{"double": "learner", "learner": "double"}[node]]
    if how == "crash":
        log = (tmp_path / "run.log").read_text()
        assert "Fatal Python error: Segmentation fault" in log
        assert "in crash" in log


def test_a_process_that_dies_when_it_shall_close_is_closed(tmp_path: Path) -> None:
    """All was done: that is no error."""
    execute(tmp_path, "learner.where=close", "learner.how=leave", placed("learner"))
    assert (tmp_path / "final").exists()


@pytest.mark.parametrize("placement", ["local", "process"])
@pytest.mark.parametrize(
    ("how", "what"),
    [("exit", "SystemExit: 3"), ("silent", "Silent, whose message cannot be shown (ValueError)")],
)
def test_exceptions_that_are_none(tmp_path: Path, placement: str, how: str, what: str) -> None:
    """One that asks the interpreter to leave, and one that says nothing and does not pickle."""
    error = broken(tmp_path, "double", "run", "sync", placement, f"double.how={how}")
    assert (error.node, error.step, error.what) == ("double", 2, what)
    assert "in now" in error.detail


@pytest.mark.parametrize("placement", ["local", "process"])
def test_an_error_in_close_does_not_hide_the_first(
    tmp_path: Path, placement: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        error = broken(tmp_path, "double", "run", "sync", placement, "learner.where=close")
    assert error.node == "double"
    assert "closing stage 'learner' failed: ArithmeticError: told to" in caplog.text
    assert sorted((tmp_path / "closed").read_text().split()) == ["double", "learner"]


@pytest.mark.parametrize("placement", ["local", "process"])
def test_an_export_on_a_full_disk_says_so_and_leaves_nothing_half_written(tmp_path: Path, placement: str) -> None:
    error = broken(tmp_path, "learner", "export", "sync", placement, "learner.how=full")
    assert error.what.startswith("OSError: [Errno 28] No space left on device (")
    assert f"GB are free in '{tmp_path}'" in error.what
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith("final")) == []


def test_a_run_that_broke_can_be_started_again_at_once(tmp_path: Path) -> None:
    """Bug bank 138: three times broken at step 1; nothing that those held is in the way of the next."""
    for attempt in ("1", "2", "3", "4"):
        (tmp_path / attempt).mkdir()
        if attempt == "4":
            execute(tmp_path / attempt, placed("double", "learner", "scorer"))
            assert (tmp_path / attempt / "final" / "weight.txt").exists()
        else:
            error = broken(tmp_path / attempt, "learner", "learn", "sync", "process", "learner.at_step=1")
            assert (error.node, error.step) == ("learner", 1)


def test_a_tracker_is_named_like_a_stage(tmp_path: Path) -> None:
    with pytest.raises(StageError, match="stage 'tracker' failed in step 0: RuntimeError: no screen"):
        execute(tmp_path, "tracker.break_at_start=true")


def test_a_long_call_elsewhere_does_not_hold_up_an_error(tmp_path: Path) -> None:
    """overlap: one node breaks while another has a minute's work before it."""
    started = os.times().elapsed
    with pytest.raises(StageError, match="stage 'second' failed in step 1"):
        execute(
            tmp_path,
            "runner=overlap",
            "second.fail_at=3",
            "double.where=run",
            "double.at_step=1",
            "double.how=busy",
            "double.text='60'",
        )
    assert os.times().elapsed - started < 20
