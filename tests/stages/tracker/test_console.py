"""The terminal at the end of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from stages.tracker.console import ConsoleTracker, ConsoleTrackerConfig
from tests.pipeline.conftest import toy_plan


def shown(tmp_path: Path, capsys: pytest.CaptureFixture[str], advice: list[str]) -> str:
    """What a run of one step prints after the step."""
    tracker = ConsoleTracker(ConsoleTrackerConfig())
    tracker.start(toy_plan("run.steps=1"), tmp_path)
    tracker.stepped(1, {}, {"time/double_s": 1.0, "time/step_s": 2.0})
    capsys.readouterr()
    tracker.finish(advice)
    tracker.close()
    return capsys.readouterr().out


def test_advice_stands_under_the_table_as_it_was_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(tmp_path, capsys, ["double: set double.limit=[7]", "judge: fine"])
    _, table, after = out.partition("time of all steps")
    assert table
    assert "\nadvice, also in advice.txt:\n  double: set double.limit=[7]\n  judge: fine\n" in after


def test_no_advice_no_heading(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "\nadvice" not in shown(tmp_path, capsys, [])


def evaluated(tmp_path: Path, evaluations: list[dict[str, float]]) -> None:
    """A run that was evaluated so often, before training and after each 10 steps."""
    tracker = ConsoleTracker(ConsoleTrackerConfig(rollouts=False))
    tracker.start(toy_plan(), tmp_path)
    for i, metrics in enumerate(evaluations):
        tracker.evaluated(10 * i, {}, metrics)
    tracker.finish([])
    tracker.close()


def test_accuracy_before_and_after(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evaluated(tmp_path, [{"eval/accuracy": 0.25}, {"eval/accuracy": 0.5}])
    assert "held-out accuracy: 0.250 before, 0.500 after 10 steps" in capsys.readouterr().out


def test_a_run_that_was_stopped_before_an_evaluation_claims_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluated(tmp_path, [{"eval/accuracy": 0.25}])
    out = capsys.readouterr().out
    assert "held-out accuracy: 0.250 before; not evaluated since" in out
    assert "after" not in out.partition("held-out accuracy:")[2].partition("\n")[0]


def test_rows_without_a_score_are_told_beside_the_accuracy_that_counts_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluated(tmp_path, [{"eval/accuracy": 0.0, "eval/unscored": 16.0}, {"eval/accuracy": 0.5}])
    out = capsys.readouterr().out
    assert "step 0: held-out accuracy 0.000 (16 rows were not scored)" in out
    assert "held-out accuracy: 0.000 (16 rows were not scored) before, 0.500 after 10 steps" in out
