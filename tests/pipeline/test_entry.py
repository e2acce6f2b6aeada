"""From a command line to an exit status: folders that are taken, and what a person is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import run
from pipeline import config, entry
from pipeline.compose import compose_all
from pipeline.errors import PlanError, Problem
from pipeline.run_dir import claim
from tests.pipeline.conftest import toy, toy_line


def test_a_sweep_does_not_write_into_a_folder_with_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = replace(toy_line("seed=1,2", f"hydra.sweep.dir={tmp_path}/sweep"), multirun=True)
    plans = entry.plan_or_explain(sweep)
    assert plans is not None
    assert [p.root.seed for p in plans] == [1, 2]
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "thesis.txt").write_text("two years of work")
    assert entry.plan_or_explain(sweep) is None
    told = capsys.readouterr().err
    assert f"hydra.sweep.dir: '{tmp_path}/sweep' exists and is not empty" in told
    assert "1 problem." in told
    only_planned = replace(sweep, overrides=(*sweep.overrides, "mode=plan"))
    assert entry.plan_or_explain(only_planned) is not None, "a plan writes nothing"


def test_a_run_directory_is_claimed_once_and_empty(tmp_path: Path) -> None:
    (tmp_path / "run.log").touch()
    claim(tmp_path, toy())
    assert {p.name for p in tmp_path.iterdir()} == {"run.log", "plan.json", "config.yaml", "environment.json"}
    with pytest.raises(PlanError, match="is not empty"):
        claim(tmp_path, toy())


def test_files_of_others_in_a_run_directory_are_not_joined(tmp_path: Path) -> None:
    (tmp_path / "rollouts.jsonl").write_text("{}\n")
    with pytest.raises(PlanError, match=r"is not empty \(rollouts.jsonl\)"):
        claim(tmp_path, toy())
    assert [p.name for p in tmp_path.iterdir()] == ["rollouts.jsonl"]
    claim(tmp_path, toy(), hydras={"rollouts.jsonl"})


def test_a_job_that_is_refused_does_not_say_that_nothing_was_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "thesis.txt").touch()
    hydras = {"runtime": {"output_dir": str(tmp_path)}, "overrides": {"task": []}, "job": {"name": "run"}}
    monkeypatch.setattr(entry.HydraConfig, "get", lambda: OmegaConf.create(hydras | {"output_subdir": None}))
    cfg, problems = composed()
    assert not problems
    assert entry.execute(cfg) == 2
    told = capsys.readouterr().err
    assert "is not empty (thesis.txt)" in told
    assert "nothing was written" not in told
    assert f"The run directory is {tmp_path}" in told


def composed() -> tuple[config.Composed, list[Problem]]:
    line = toy_line()
    config.prepare(line)
    with config.composing(line):
        return compose_all(line.overrides, config.slot_of)


def test_a_flag_that_cannot_be_used_ends_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--config-name", "other"]) == 2
    told = capsys.readouterr().err
    assert "--config-name: this flag cannot be used here" in told
    assert "experiment=" in told
