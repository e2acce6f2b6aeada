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
