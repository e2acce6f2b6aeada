"""Sweeps as a user starts them: each job in a process of its own, under every launcher, and nothing left at the end.

All but one are of the toy pipeline of tests/pipeline, whose jobs take as long as a start of Python.
"""

from __future__ import annotations

import csv
import json
import os
import pty
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.commands import SMALL, Ended, Run, lines, numbers, run, steps_done
from tests.pipeline.conftest import TOY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PLUGINS = "plugins=[tests.pipeline.stages_for_tests,tests.pipeline.stages_of_sweeps]"
SEEDS = ("seed=3,4", "tracker=telling")
ENDLESS = ("run.steps=1000000", "scorer.delay_s=0.01", "placement.scorer=process", "hydra.launcher.at_once=2")


def sweep(folder: Path, *args: str) -> tuple[str, ...]:
    return ("-m", *TOY, PLUGINS, f"hydra.sweep.dir={folder}/sweep", *args)


def tiny(folder: Path) -> Ended:
    """The search of `conf/sweep`, of two jobs of two steps with the default models, in Hydra's default directory."""
    return run(folder, "-m", "sweep=optuna", "hydra.sweeper.trials=2", "pipeline=grpo", *SMALL)


def fails(folder: Path) -> Ended:
    """The first and the last of three break. Two at a time, a GPU for each."""
    at_once = ("hydra.launcher.at_once=2", "hydra.launcher.gpus_per_job=1")
    args = sweep(folder, *at_once, "tracker=telling", "learner.break_at=open,'',learn")
    return Run(folder, *args, more={"CUDA_VISIBLE_DEVICES": "6,7"}).end()


def stopped_by(folder: Path, number: int) -> Ended:
    """The signal comes to the controlling process while two jobs are in their steps and a third waits."""
    started = Run(folder, *sweep(folder, *ENDLESS, "seed=3,4,5"))
    started.until(lambda: in_steps(folder), "steps of both jobs")
    (folder / "children").write_text("\n".join(started.commands()))
    return started.send(number).end()


def in_steps(folder: Path) -> bool:
    return all(steps_done(folder / "sweep" / job) >= 1 for job in ("0", "1"))


def at_a_terminal(folder: Path) -> Ended:
    """Ctrl-C is typed; it goes to every process of the terminal's foreground."""
    ours, theirs = pty.openpty()
    started = Run(folder, *sweep(folder, *ENDLESS, "seed=3,4,5"), terminal=theirs)
    os.close(theirs)
    shown = bytearray()

    def read() -> bool:
        os.set_blocking(ours, False)
        try:
            while piece := os.read(ours, 65536):
                shown.extend(piece)
        except OSError:  # nothing there, or the end
            pass
        return in_steps(folder) and shown.count(b"running") >= 4

    started.until(read, "a table that was drawn twice")
    os.write(ours, b"\x03")
    while started.alive():
        read()
        time.sleep(0.05)
    read()
    os.close(ours)
    (folder / "shown.txt").write_bytes(shown)
    return started.end()


RUNS = {
    "tiny": tiny,
    "fails": fails,
    "joblib": lambda folder: run(folder, *sweep(folder, *SEEDS, "hydra/launcher=joblib", "hydra.launcher.n_jobs=1")),
    "submitit": lambda folder: run(folder, *sweep(folder, *SEEDS, "hydra/launcher=submitit_local")),
    "terminated": lambda folder: stopped_by(folder, signal.SIGTERM),
    "killed": lambda folder: stopped_by(folder, signal.SIGKILL),
    "typed": at_a_terminal,
}


def record(folder: Path, job: str) -> dict[str, Any]:
    return json.loads((folder / job / "job.json").read_text())


def told(folder: Path, job: str) -> list[str]:
    """`process PID run N gpus X in FOLDER`, as the tracker `telling` says."""
    [line] = [x for x in (folder / job / "job.log").read_text().splitlines() if x.startswith("process")]
    return line.split()


@pytest.mark.parametrize("name", RUNS)
def test_nothing_is_left_of_a_sweep(runs, name: str):
    ended = runs(name)

    codes = {"fails": 1, "terminated": 143, "killed": -signal.SIGKILL, "typed": 130}
    assert (ended.code, ended.left) == (codes.get(name, 0), {}), ended.out[-3000:] + ended.err[-3000:]
    assert "Traceback" not in ended.out + ended.err


def test_a_search_of_the_real_pipeline(runs):
    ended = runs("tiny")
    [folder] = (ended.folder / "outputs").glob("*/*-grpo-sweep")

    assert ended.out.startswith(f"a search in {folder}\n")
    rows = lines(folder / "sweep.jsonl")
    assert [(row["job"], row["state"], row["metrics"]["step"]) for row in rows] == [(0, "done", 2), (1, "done", 2)]
    for row in rows:
        job = folder / row["directory"]
        assert row["metrics"] == lines(job / "metrics.jsonl")[-1]
        assert 5e-5 <= float(row["overrides"]["trainer.lr"]) <= 2e-3
        assert "held-out accuracy" in (job / "job.log").read_text()
        assert (job / "final" / "model.safetensors").is_file()
    assert rows[0]["overrides"]["trainer.lr"] != rows[1]["overrides"]["trainer.lr"]
    with (folder / "sweep.csv").open(newline="") as f:
        table = list(csv.DictReader(f))
    assert [float(row["reward/mean"]) for row in table] == [row["metrics"]["reward/mean"] for row in rows]
    accuracies = [row["metrics"]["eval/accuracy"] for row in rows]
    best = json.loads((folder / "best.json").read_text())
    assert (best["job"], best["value"]) == (accuracies.index(max(accuracies)), max(accuracies))
    assert best["overrides"]["trainer.lr"] == float(rows[best["job"]]["overrides"]["trainer.lr"])
    assert f"best of 2: job {best['job']}, eval/accuracy" in ended.out


def test_a_failed_job_stops_no_other_and_says_why_at_once(runs):
    """Bug bank 133."""
    ended, folder = runs("fails"), runs("fails").folder / "sweep"

    assert [record(folder, job)["state"] for job in "012"] == ["failed", "done", "failed"]
    assert steps_done(folder / "1") == 3
    for job, where in (("0", "failed in step 0: RuntimeError: broken in open"), ("2", "broken in learn")):
        assert where in (folder / job / "job.log").read_text()
        assert "raise RuntimeError" in (folder / job / "run.log").read_text()
        assert f"its log is {folder}/{job}/job.log" in ended.out
    assert ended.out.index("broken in open") < ended.out.index("job 2 running")
    assert "1 done, 2 failed; with all metrics" in ended.out


def test_each_job_has_a_process_and_gpus_of_its_own(runs):
    folder = runs("fails").folder / "sweep"

    one, other = told(folder, "1"), told(folder, "2")
    assert one[1] != other[1]
    assert (one[3], other[3]) == ("1", "1"), "a process ran two jobs"
    assert {record(folder, job)["environment"]["CUDA_VISIBLE_DEVICES"] for job in "012"} == {"6", "7"}
    assert one[5] == record(folder, "1")["environment"]["CUDA_VISIBLE_DEVICES"]


@pytest.mark.parametrize("launcher", ["joblib", "submitit"])
def test_other_launchers_make_the_same_jobs(runs, launcher: str):
    """Each in a fresh process, also where one worker runs them all; the numbers do not depend on who starts them."""
    ended, folder = runs(launcher), runs(launcher).folder / "sweep"

    assert ended.out.startswith(f"2 jobs in {folder}\n")
    assert "2 done; with all metrics" in ended.out
    first, second = told(folder, "0"), told(folder, "1")
    assert first[1] != second[1]
    assert (first[3], second[3]) == ("1", "1")
    assert first[-1] == str(ended.folder)
    assert [row["overrides"]["seed"] for row in lines(folder / "sweep.jsonl")] == ["3", "4"]
    for job in "01":
        assert numbers(folder / job) == numbers(runs("joblib").folder / "sweep" / job)
    assert numbers(folder / "0") != numbers(folder / "1")


@pytest.mark.parametrize(("name", "code"), [("terminated", 143), ("typed", 130)])
def test_a_signal_lets_every_job_end_well(runs, name: str, code: int):
    folder = runs(name).folder / "sweep"

    assert [(record(folder, job)["state"], record(folder, job)["exit"]) for job in "01"] == [("stopped", code)] * 2
    assert not (folder / "2").exists(), "a job was started after the signal"
    assert not (folder / "stop").exists()
    for job in "01":
        assert f"stopped; what was written lies in {folder}/{job}" in (folder / job / "job.log").read_text()
    assert [row["state"] for row in lines(folder / "sweep.jsonl")] == ["stopped", "stopped"]


def test_the_children_of_jobs_were_there(runs):
    """Else it would say nothing that they are gone."""
    for name in ("terminated", "killed"):
        assert (runs(name).folder / "children").read_text().count("pipeline.process") >= 2, name


def test_a_terminal_shows_one_table_that_lives(runs):
    shown = (runs("typed").folder / "shown.txt").read_text()

    assert "settings" in shown
    assert "seed=3" in shown
    assert "1 not running yet, 2 running" in shown
    assert "\x1b[" in shown
    assert "2 stopped" in shown
    assert "job 0 running: " not in shown, "lines are for files"


def test_a_sweep_of_a_user_with_a_broken_point_starts_nothing(tmp_path: Path):
    ended = run(tmp_path / "r", *sweep(tmp_path, "seed=1,2", "learner.lr=-1,1"))

    assert ended.code == 2
    assert "learner.lr: -1" in ended.err
    assert "Nothing was started and nothing was written." in ended.err
    assert not (tmp_path / "sweep").exists()
