"""Comparisons as a user starts them: every run in a process of its own, a broken cell, signals, nothing left."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.compare.drift import rollouts
from tests.e2e.commands import SMALL, Ended, Run, lines, run, steps_done
from tests.pipeline.conftest import TOY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PLUGINS = "plugins=[tests.pipeline.stages_for_tests,tests.pipeline.stages_of_sweeps]"


def compare(folder: Path, *args: str) -> tuple[str, ...]:
    return ("mode=compare", f"hydra.run.dir={folder}/c", *args)


def engines(folder: Path) -> Ended:
    """Two engines, two runs of each, of two steps with the default models; the second step counts."""
    axis = ("compare.axis=rollout", "compare.options=[hf,torch]", "compare.repeats=2")
    return run(folder, *compare(folder, "pipeline=grpo", *SMALL, *axis))


def fails(folder: Path) -> Ended:
    """Two axes; every cell of the second option breaks, and the first option is an empty text."""
    axis = ("compare.axis=learner.break_at", "compare.options=['',learn]", "compare.repeats=1")
    second = ("compare.second.axis=runner", "compare.second.options=[sync,overlap]")
    return run(folder, *TOY, PLUGINS, *compare(folder, "tracker=telling", *axis, *second))


def stopped_by(folder: Path, number: int, *, group: bool) -> Ended:
    """The signal comes while the first run, which has a child of its own, is in its steps."""
    endless = ("run.steps=1000000", "scorer.delay_s=0.01", "placement.scorer=process", "tracker=telling")
    axis = ("compare.axis=runner", "compare.options=[sync,overlap]")
    started = Run(folder, *TOY, PLUGINS, *compare(folder, *endless, *axis))
    started.until(lambda: steps_done(folder / "c" / "runs" / "0-sync-1") >= 2, "two steps of the first run")
    (folder / "children").write_text("\n".join(started.commands()))
    return started.send(number, group=group).end()


RUNS = {
    "engines": engines,
    "fails": fails,
    "terminated": lambda folder: stopped_by(folder, signal.SIGTERM, group=False),
    "interrupted": lambda folder: stopped_by(folder, signal.SIGINT, group=True),
    "killed": lambda folder: stopped_by(folder, signal.SIGKILL, group=False),
}


def found(ended: Ended) -> dict[str, Any]:
    return json.loads((ended.folder / "c" / "compare.json").read_text())


@pytest.mark.parametrize("name", RUNS)
def test_nothing_is_left_of_a_comparison(runs, name: str):
    ended = runs(name)

    codes = {"fails": 1, "terminated": 143, "interrupted": 130, "killed": -signal.SIGKILL}
    assert (ended.code, ended.left) == (codes.get(name, 0), {}), ended.out[-3000:] + ended.err[-3000:]
    assert "Traceback" not in ended.out + ended.err
    assert not (ended.folder / "c" / "stop").exists()


def test_every_run_has_a_process_and_the_same_prompts_and_seeds(runs):
    ended, folder = runs("engines"), runs("engines").folder / "c"
    made = found(ended)

    assert made["order"] == ["0-hf-1", "1-torch-1", "1-torch-2", "0-hf-2"]
    started = {run["directory"]: run["started"] for cell in made["cells"] for run in cell["runs"]}
    assert sorted(started, key=lambda name: started[name]) == made["order"]
    plans = [json.loads((folder / "runs" / name / "plan.json").read_text()) for name in made["order"]]
    assert [plan["nodes"]["rollout"]["backend"] for plan in plans] == ["hf", "torch", "torch", "hf"]
    records = [rollouts(folder / "runs" / name, 1) for name in made["order"]]
    for column in ("row_id", "prompt_ids"):
        values = {np.asarray(getattr(r[column], "values", r[column])).tobytes() for r in records if r}
        assert len(values) == 1, column
    assert not list(folder.glob("runs/*/final")), "an export was paid for"
    assert not [k for k in lines(folder / "runs" / "0-hf-1" / "metrics.jsonl")[0] if k.startswith("eval/")]


def test_engines_agree_and_the_table_says_so(runs):
    ended = runs("engines")
    hf, torch = found(ended)["cells"]

    assert torch["drift"]["rows"] == torch["drift"]["equal"] == 16
    assert torch["drift"]["tokens"] == torch["drift"]["all_tokens"] > 16
    assert 0 <= torch["drift"]["mean"] <= torch["drift"]["most"] < 1e-4
    assert hf["drift"]["most"] == 0.0, "two runs of one engine with one seed"
    for cell in (hf, torch):
        assert cell["state"] == "done"
        assert len(cell["measures"]["time/step_s"]["values"]) == 2
        # the second step alone counts
        steps = [run["metrics"][2]["time/step_s"] for run in cell["runs"]]
        assert cell["measures"]["time/step_s"]["values"] == [[s] for s in steps]
        assert cell["measures"]["time/step_s"]["median"] == pytest.approx(sum(steps) / 2)
        # torch, transformers and verl are loaded: more than one small process, less than a machine
        assert 0.2 < cell["measures"]["memory/peak_gb"]["median"] < 4
    assert hf["measures"]["reward/mean"]["values"] == torch["measures"]["reward/mean"]["values"]
    for shown in (
        "time of a step, s ↓",
        "time of rollout, s ↓",
        "tokens generated",
        "cache hits",
        "512 of",
        "16 of 16",
    ):
        assert (shown in ended.out) == (shown != "512 of"), shown
    assert "4 runs, one after the other, in " in ended.out
    assert (ended.folder / "c" / "compare.html").read_text().startswith("<!DOCTYPE html>")


def test_the_command_of_a_cell_repeats_it(runs):
    command = found(runs("engines"))["cells"][1]["command"]

    assert command.startswith("python run.py pipeline=grpo ")
    assert "rollout=torch" in command
    assert "hydra.run.dir" not in command
    assert "compare" not in command


def test_a_broken_cell_stops_no_other_and_is_shown_with_its_reason(runs):
    ended = runs("fails")
    first, second, broken, last = found(ended)["cells"]

    assert [cell["state"] for cell in (first, second, broken, last)] == ["done", "done", "failed", "failed"]
    assert first["choices"] == {"learner.break_at": "", "runner": "sync"}
    assert [row["step"] for row in second["runs"][0]["metrics"]] == [0, 1, 2, 3]
    [failure] = broken["failures"]
    assert re.fullmatch(
        r"ended with exit status 1: stage 'learner' failed in step 1.*: RuntimeError: broken in learn",
        failure["reason"],
    )
    assert (ended.folder / "c" / "runs" / failure["log"]).is_file()
    assert f"learn, sync: run 1 of 1 failed, {failure['reason']}" in ended.out
    assert f"its log is {ended.folder}/c/runs/{failure['log']}" in ended.out
    assert "failed" in (ended.folder / "c" / "compare.html").read_text()
    assert first["drift"] is second["drift"] is None, "these rows have no tokens"


@pytest.mark.parametrize(("name", "code"), [("terminated", 143), ("interrupted", 130)])
def test_a_signal_lets_the_run_end_well_and_starts_no_other(runs, name: str, code: int):
    ended, folder = runs(name), runs(name).folder / "c"

    assert [p.name for p in (folder / "runs").iterdir()] == ["0-sync-1"]
    made = found(ended)
    assert made["stopped"]
    assert [(r["state"], r["exit"]) for r in made["cells"][0]["runs"]] == [("stopped", code)]
    assert made["cells"][1]["state"] == "not started"
    assert "stopped; what was written lies in" in (folder / "runs" / "0-sync-1" / "job.log").read_text()
    assert "no run ended well: there is nothing to compare" in ended.out


def test_the_children_were_there(runs):
    """Else it would say nothing that they are gone."""
    for name in ("terminated", "interrupted", "killed"):
        assert "pipeline.process" in (runs(name).folder / "children").read_text(), name
