"""A program: order of the phases, what is written, and how it ends."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest

from pipeline.errors import StageError
from pipeline.program import Program
from tests.pipeline.conftest import toy, toy_plan
from tests.pipeline.stages_for_tests import Log


def execute(tmp_path: Path, *overrides: str) -> tuple[Program, list[dict[str, Any]]]:
    with Program(toy(*overrides), tmp_path) as program:
        program.execute()
    return program, [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]


def test_metrics_of_a_run(tmp_path: Path) -> None:
    _, lines = execute(tmp_path, "run.steps=3", "eval.every=2")
    assert [m["step"] for m in lines] == [0, 1, 2, 3]
    assert [m["policy_version"] for m in lines] == [0, 1, 2, 3]
    assert ["eval/score" in m for m in lines] == [True, False, True, True]
    assert ["double/value" in m for m in lines] == [False, True, True, True], "evaluation is not mixed with training"
    nodes = ["source", "double", "scorer", "second", "judge", "learner", "publish", "step"]
    assert {f"time/{n}_s" for n in nodes} | {"time/wait_s"} <= set(lines[1])
    assert all(lines[1][f"time/{n}_s"] >= 0 for n in nodes)
    assert lines[1]["time/step_s"] >= lines[1]["time/judge_s"]
    for m in lines:
        assert list(m)[:2] == ["step", "policy_version"]
        assert list(m)[2:] == sorted(list(m)[2:])


def test_metrics_are_right(tmp_path: Path) -> None:
    """The mean, the share and the spread of a step, by hand."""
    program, lines = execute(tmp_path, "run.steps=1", "source.groups=9")
    [(_, records, _)] = [call for name, call in program.tracker.calls if name == "stepped"]  # type: ignore[attr-defined]
    value, note = records["source"].value, records["source"].note.lengths
    metrics = lines[1]
    assert metrics["double/value"] == pytest.approx(math.fsum(value) / 18, rel=1e-15)
    assert metrics["double/share"] == pytest.approx(np.mean(value > 50), rel=1e-15)
    ordered = sorted(note.tolist())
    assert metrics["double/note_max"] == ordered[-1]
    assert metrics["double/note_p50"] == (ordered[8] + ordered[9]) / 2
    assert metrics["double/note_mean"] == pytest.approx(sum(ordered) / 18)


def test_order_of_phases(tmp_path: Path, log: list[tuple[str, ...]]) -> None:
    """Weights reach the server before the first evaluation; learn, then publish, then evaluate; once a learner."""
    execute(tmp_path, "run.steps=2", "eval.every=1")
    order = [e[0] for e in log]
    step = ["score", "score", "judge", "learn", "publish", "receive", "score"]
    assert order == ["open", "publish", "receive", "score", *step, *step, "close"]
    assert [e[2] for e in log if e[0] == "receive"] == ["0", "1", "2"]


def test_one_snapshot_for_all_servers_of_a_learner(tmp_path: Path, log: list[tuple[str, ...]]) -> None:
    plan = toy_plan(
        "+double@other=whole", "+graph.forward.other={numbers: source}", "+graph.publish.other=learner", "run.steps=1"
    )
    with Program(plan, tmp_path) as program:
        program.execute()
    phases = [e[0] for e in log if e[0] in ("publish", "receive")]
    assert phases == ["publish", "receive", "receive"] * 2
    assert {e[1] for e in log if e[0] == "receive"} == {"double", "other"}


def test_the_tracker_is_told(tmp_path: Path) -> None:
    program, lines = execute(tmp_path, "run.steps=2", "eval.every=0")
    calls: list[tuple[str, Any]] = program.tracker.calls  # type: ignore[attr-defined]
    assert [name for name, _ in calls] == ["start", "evaluated", "stepped", "evaluated", "stepped", "finish", "close"]
    step, records, metrics = calls[1][1]
    assert step == 0
    assert list(records) == ["eval_source", "double", "scorer"]
    assert metrics == pytest.approx(lines[0])
    assert list(calls[2][1][1]) == ["source", "double", "second", "scorer", "learner", "judge"]
    assert (tmp_path / "final" / "weight.txt").exists()


@pytest.mark.parametrize("placement", ["local", "process"])
def test_advice_is_collected_told_and_written(tmp_path: Path, placement: str) -> None:
    program, _ = execute(tmp_path, "run.steps=3", f"placement={{learner:{placement}}}")
    expected = ["learner: lr 0.01 was used 3 times", "learner: naïve is fine"]
    assert program.tracker.calls[-2:] == [("finish", expected), ("close", None)]  # type: ignore[attr-defined]
    assert (tmp_path / "advice.txt").read_text("utf-8").splitlines() == expected


def test_a_run_without_advice_writes_none(tmp_path: Path) -> None:
    program, _ = execute(tmp_path, "run.steps=2")
    assert program.tracker.calls[-2] == ("finish", [])  # type: ignore[attr-defined]
    assert not (tmp_path / "advice.txt").exists()


@pytest.mark.parametrize("every", [0, 1, 2])
def test_evaluations_see_the_same_rows_with_the_same_seeds(tmp_path: Path, every: int) -> None:
    """However often it is evaluated: only the policy makes a difference."""
    program, _ = execute(tmp_path, "run.steps=4", f"eval.every={every}", "learner.lr=1")
    calls: list[tuple[str, Any]] = program.tracker.calls  # type: ignore[attr-defined]
    seen = [call for name, call in calls if name == "evaluated"]
    assert len(seen) == {0: 2, 1: 5, 2: 3}[every]
    first = seen[0][1]["eval_source"]
    assert all(records["eval_source"].same(first) for _, records, _ in seen)
    scores = [records["scorer"].score for _, records, _ in seen]
    assert not np.array_equal(scores[0], scores[-1]), "the last policy scores otherwise"


def test_evaluating_does_not_change_the_training(tmp_path: Path) -> None:
    runs = []
    for every in (0, 1):
        (tmp_path / str(every)).mkdir()
        runs.append(execute(tmp_path / str(every), "run.steps=3", f"eval.every={every}")[1])
    for one, other in zip(*runs, strict=True):
        others = ("time/", "memory/", "eval/")
        left, right = ({n: v for n, v in m.items() if not n.startswith(others)} for m in (one, other))
        assert left == right


def test_no_steps(tmp_path: Path) -> None:
    _, lines = execute(tmp_path, "run.steps=0")
    assert [m["step"] for m in lines] == [0]


# -- errors --------------------------------------------------------------------------------------------------


def closes() -> int:
    return sum(e[0] == "close" for e in Log.events)


@pytest.mark.parametrize(("where", "step"), [("open", 0), ("learn", 1), ("export", 3), ("advice", 3)])
def test_an_error_names_the_stage_and_everything_is_closed(
    tmp_path: Path, log: list[tuple[str, ...]], where: str, step: int
) -> None:
    with pytest.raises(StageError) as caught:
        execute(tmp_path, f"learner.break_at={where}")
    error = caught.value
    assert (error.node, error.step, error.what) == ("learner", step, f"RuntimeError: broken in {where}")
    assert "_perhaps_break" in error.detail
    assert isinstance(error.__cause__, RuntimeError)
    assert error.rows == ((0, 1, 2, 3, 4, 5) if where == "learn" else ())
    assert closes() == 1


def test_stages_opened_before_a_failing_one_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = toy("learner.break_at=open")
    closed: list[str] = []
    for node, spec in plan.nodes.items():
        monkeypatch.setattr(spec.cls, "close", lambda self, cls=spec.cls: closed.append(cls.__name__))
        if node == "learner":
            break
    with pytest.raises(StageError, match="broken in open"):
        Program(plan, tmp_path).__enter__()
    assert closed == ["MeanLearner", "NegateScorer", "NegateScorer", "WholeDouble", "CountingSource"]


def test_an_error_in_close_is_logged_and_does_not_hide_the_first(
    tmp_path: Path, log: list[tuple[str, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR), pytest.raises(StageError, match="stage 'scorer' failed in step 1"):
        execute(tmp_path, "learner.break_at=close", "scorer.fail_at=5")
    assert "closing stage 'learner' failed" in caplog.text
    assert closes() == 1


def test_the_tracker_is_closed_after_an_error(tmp_path: Path) -> None:
    for override, calls in (
        ("scorer.fail_at=5", ["start", "evaluated", "close"]),
        ("tracker.break_at_start=true", ["start", "close"]),
    ):
        program = Program(toy(override), Path(mkdtemp(dir=tmp_path)))
        with pytest.raises(StageError), program:
            program.execute()
        assert [name for name, _ in program.tracker.calls] == calls  # type: ignore[attr-defined]


def test_the_plan_is_shown_before_anything_is_opened(tmp_path: Path, log: list[tuple[str, ...]]) -> None:
    program = Program(toy("learner.break_at=open"), tmp_path)
    with pytest.raises(StageError, match="stage 'learner' failed in step 0"), program:
        pass
    assert [name for name, _ in program.tracker.calls] == ["start", "close"]  # type: ignore[attr-defined]


def test_lines_written_before_an_error_stay(tmp_path: Path) -> None:
    with pytest.raises(StageError, match="rows 6, 7, 8, 9, 10, 11: ValueError: cannot score row 7"):
        execute(tmp_path, "scorer.fail_at=7")
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [m["step"] for m in lines] == [0, 1]


def test_rows_come_in_order_from_every_stage(tmp_path: Path) -> None:
    with Program(toy(), tmp_path) as program:
        numbers = program.forward("source", 1)
        shuffled = numbers.take([3, 1, 0, 2, 5, 4])
        assert program.forward("double", 1, numbers=shuffled).row_id.tolist() == [0, 1, 2, 3, 4, 5]
