"""Records of a step as files: every column comes back to the last byte."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pipeline.disk import DiskError
from pipeline.kept import keep, kept
from pipeline.program import Program
from pipeline.records import Ragged
from tests.pipeline.conftest import problems, toy
from tests.pipeline.stages_for_tests import Numbers


def numbers(values: list[float]) -> Numbers:
    ids = np.arange(len(values))
    return Numbers(
        step=1,
        purpose="train",
        row_id=ids,
        group_id=ids,
        value=np.array(values),
        note=Ragged.texts("é" * i for i in ids),
    )


def test_columns_come_back(tmp_path: Path) -> None:
    rows = numbers([0.1, np.nan, 3.0])
    keep(tmp_path, 4, {"source": rows, "empty": numbers([])})
    found = kept(tmp_path, 4)
    assert list(found) == ["empty", "source"]
    assert set(found["source"]) == {"row_id", "group_id", "value", "note"}
    value, note = found["source"]["value"], found["source"]["note"]
    assert isinstance(value, np.ndarray)
    assert value.tobytes() == rows.value.tobytes()
    assert isinstance(note, Ragged)
    assert [note.text(i) for i in range(3)] == ["", "é", "éé"]
    assert len(found["empty"]["row_id"]) == 0


def test_a_step_that_was_not_kept_has_none_and_none_is_kept_twice(tmp_path: Path) -> None:
    assert kept(tmp_path, 1) == {}
    keep(tmp_path, 1, {"source": numbers([1.0])})
    with pytest.raises(DiskError, match="File exists"):
        keep(tmp_path, 1, {"source": numbers([2.0])})


def test_a_run_keeps_the_steps_it_is_told_to(tmp_path: Path) -> None:
    plan = toy("run.steps=3", "run.keep_records=[2]")
    with Program(plan, tmp_path) as program:
        program.execute()
    assert [p.name for p in (tmp_path / "records").iterdir()] == ["2"]
    found = kept(tmp_path, 2)
    assert set(found) == {"source", "double", "scorer", "second", "judge", "learner"}
    # the second of two steps of 6 rows, numbered on
    assert list(found["source"]["row_id"]) == [6, 7, 8, 9, 10, 11]
    np.testing.assert_array_equal(found["scorer"]["score"], -np.asarray(found["double"]["value"]))


def test_only_steps_evaluates_and_exports_nothing(tmp_path: Path) -> None:
    whole, bare = tmp_path / "whole", tmp_path / "bare"
    for folder, overrides in ((whole, ()), (bare, ("run.only_steps=true",))):
        folder.mkdir()
        with Program(toy("run.steps=2", *overrides), folder) as program:
            program.execute()
    metrics = {f: [json.loads(x) for x in (f / "metrics.jsonl").read_text().splitlines()] for f in (whole, bare)}
    assert (whole / "final").exists()
    assert not (bare / "final").exists()
    assert ["eval/score" in row for row in metrics[whole]] == [True, False, True]
    assert not any(name.startswith(("eval/", "time/eval")) for row in metrics[bare] for name in row)
    assert [r.get("learner/weight") for r in metrics[bare]] == [r.get("learner/weight") for r in metrics[whole]]


def test_a_step_that_is_never_made_cannot_be_kept() -> None:
    found = problems("run.steps=3", "run.keep_records=[3,4]")
    assert found["run.keep_records"].what == "there is no step 4: this run has 3, counted from 1"
