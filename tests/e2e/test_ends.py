"""Whatever ends a run, nothing is left of it: no process, nothing in /dev/shm, no temporary file.

Each run has stages in child processes: the reward, which has a scoring process of its own, and the loader or, where it
matters most, the rollout with torch. A normal end is looked at in test_backends.py.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.e2e.commands import MINE, OWN, SMALL, Ended, Run, lines, run, steps_done

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

APART = ("placement.reward=process", "placement.loader=process")
HEAVY = ("placement.rollout=process",)


def raises(folder: Path) -> Ended:
    """A stage of a user's own, in a process of its own, raises in step 2."""
    return run(folder, *OWN, f"hydra.run.dir={folder}/run", *SMALL, *APART, "reward=breaking", "run.steps=9")


def breaks_at_open(folder: Path) -> Ended:
    path = f"reward.path={MINE}/breaks_at_import.py"
    return run(folder, f"hydra.run.dir={folder}/run", *SMALL, *APART, "reward=function", path)


def stopped_by(folder: Path, number: int, *more: str, group: bool = False) -> Ended:
    """The signal comes while steps are worked on."""
    started = Run(folder, f"hydra.run.dir={folder}/run", *SMALL, *APART, "run.steps=1000000", *more)
    started.until(lambda: steps_done(folder / "run") >= 1, "the end of step 1")
    (folder / "children").write_text("\n".join(started.commands()))
    return started.send(number, group=group).end()


RUNS = {
    "raises": raises,
    "breaks_at_open": breaks_at_open,
    "terminated": lambda folder: stopped_by(folder, signal.SIGTERM),
    "interrupted": lambda folder: stopped_by(folder, signal.SIGINT, group=True),
    "killed": lambda folder: stopped_by(folder, signal.SIGKILL, *HEAVY),
}


def test_a_stage_that_raises_ends_the_run_with_its_name(runs):
    ended = runs("raises")
    run_dir = ended.folder / "run"

    assert ended.code == 1, ended.err[-3000:]
    assert ended.left == {}
    assert "stage 'reward' failed in step 2" in ended.err
    assert "ArithmeticError: the judge has left the room" in ended.err
    assert "Traceback" not in ended.err
    log = (run_dir / "run.log").read_text()
    assert "my_stages.py" in log
    assert "raise ArithmeticError" in log
    assert steps_done(run_dir) == 1
    assert not (run_dir / "final").exists()


def test_a_stage_that_does_not_open_ends_the_run_with_its_name(runs):
    ended = runs("breaks_at_open")

    assert ended.code == 1, ended.err[-3000:]
    assert ended.left == {}
    assert "stage 'reward' failed in step 0" in ended.err
    assert "OSError: the answer key is not here" in ended.err
    assert "Traceback" not in ended.err
    assert steps_done(ended.folder / "run") == -1


@pytest.mark.parametrize(
    ("name", "code"), [("terminated", 143), ("interrupted", 130), ("killed", -signal.SIGKILL)], ids=str
)
def test_nothing_is_left_after_a_signal(runs, name: str, code: int):
    """SIGTERM; Ctrl-C, which a terminal sends to the whole group; kill -9, which the program never sees."""
    ended = runs(name)

    assert ended.code == code, ended.err[-3000:]
    assert (ended.folder / "children").read_text().count("pipeline.process") >= 3
    assert ended.left == {}
    assert "Traceback" not in ended.err
    done = lines(ended.folder / "run" / "metrics.jsonl")  # every line is whole
    assert [step["step"] for step in done] == list(range(len(done)))


def test_a_stopped_run_says_where_it_lies(runs):
    for name in ("terminated", "interrupted"):
        ended = runs(name)
        assert f"stopped; what was written lies in {ended.folder}/run" in ended.err, name
