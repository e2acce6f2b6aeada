"""The board: what one process writes, another reads."""

from __future__ import annotations

import importlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pipeline import progress
from pipeline.metrics import Meter
from pipeline.process import Child
from pipeline.progress import Board, Line, Phase, alive, working


@pytest.fixture
def board() -> Iterator[Board]:
    made, finders = Board(["loader", "a" * 80, "trainer"]), sys.meta_path.copy()
    with progress.shown(made):
        yield made
    made.close()
    assert sys.meta_path == finders


def line(board: Board, name: str) -> Line:
    return next(line for line in board.lines() if line.name == name)


def test_another_reader_sees_what_is_at_work(board: Board) -> None:
    other = Board(fds=(os.dup(board.fds[0]), os.dup(board.fds[1])))
    assert [x.name for x in other.lines()] == ["loader", "a" * 64, "trainer"]
    before = time.monotonic()
    with working("trainer", "learn", 3, [5, 7]):
        seen = line(other, "trainer")
        assert (seen.method, seen.call, seen.active, seen.step, seen.total, seen.rows) == (
            "learn",
            1,
            True,
            3,
            2,
            (5, 7),
        )
        assert before <= seen.began <= time.monotonic()
        assert not line(other, "loader").active
    seen = line(other, "trainer")
    assert (seen.call, seen.active) == (1, False)
    with pytest.raises(ValueError, match="out"), working("trainer", "run", 4):
        raise ValueError("out")
    seen = line(other, "trainer")
    assert (seen.call, seen.active, seen.rows) == (2, False, ())
    board.phase = Phase.closing
    assert (other.phase, other.doomed) == (Phase.closing, False)
    other.doom()
    assert board.doomed
    other.close()


def test_of_many_rows_the_first_are_shown_and_their_number(board: Board) -> None:
    rows = list(range(10_000, 12_048))
    with working("trainer", "run", 1, rows):
        seen = line(board, "trainer")
    assert seen.total == 2048
    assert len(seen.rows) > 400
    assert list(seen.rows) == rows[: len(seen.rows)]
    assert line(board, "loader").rows == ()


def test_beats_are_of_the_node_that_the_thread_works_for(board: Board) -> None:
    def beats() -> list[int]:
        return [sum(line(board, n).beats) for n in ("loader", "trainer")]

    alive()
    assert beats() == [0, 0]
    with working("trainer", "learn", 1):
        alive()
        with working("loader", "run", 1):
            Meter().add("x", np.ones(3))
        alive()
        thread = threading.Thread(target=alive)  # of no node
        thread.start()
        thread.join()
    alive()
    assert beats() == [1, 2]
    with working("nobody", "run", 1):
        alive()
    assert beats() == [1, 2]


class Served:
    def __init__(self, node: str):
        progress.serve(node)

    def work(self, times: int) -> Iterator[int]:
        for i in range(times):
            Meter().add("x", 1.0)
            yield i


def test_a_child_beats_for_the_node_it_serves(board: Board) -> None:
    """Twice: there where it works, and here where its answers come."""
    child = Child(Served, "trainer", name="trainer")
    try:
        with working("trainer", "stream", 1):
            child.wait_ready(60)
            assert list(child.stream("work", 5)) == [0, 1, 2, 3, 4]
        assert line(board, "trainer").beats == (1 + 5 + 1, 5)
    finally:
        child.kill()


def test_a_module_that_is_new_is_progress(board: Board, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch and vLLM take long to import. One that is asked for again and again is none."""
    (tmp_path / "module_of_a_test.py").write_text("import module_of_a_test_that_is_missing")
    monkeypatch.syspath_prepend(tmp_path)
    with working("trainer", "open", 0):
        for _ in range(3):
            with pytest.raises(ModuleNotFoundError, match="is_missing"):
                importlib.import_module("module_of_a_test")
    assert sum(line(board, "trainer").beats) == 2


def test_without_a_board_nothing_is_shown() -> None:
    with working("trainer", "run", 1):
        alive()
    progress.set_phase(Phase.closing)
    assert progress.descriptors() == ()


def test_a_beat_costs_little(board: Board) -> None:
    """It is called for each token of a batch."""
    with working("trainer", "run", 1):
        started = time.process_time()
        for _ in range(10_000):
            alive()
        assert time.process_time() - started < 0.5
