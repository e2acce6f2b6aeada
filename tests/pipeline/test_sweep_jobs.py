"""Jobs as processes, how they are stopped, and what the board makes of their directories."""

from __future__ import annotations

import csv
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.progress import ECHO_S
from pipeline.sweep.board import Board
from pipeline.sweep.jobs import LOG, RECORD, Job, last_metrics, run_all
from pipeline.sweep.stop import Owner, Stop
from tests.pipeline.conftest import PLUGINS, TOY

# Hydra's flag that prints and ends, and one that it does not have: the quickest runs there are.
WELL, BAD = ("--version",), ("--bogus",)


def job(folder: Path, number: int, *arguments: str) -> Job:
    return Job(number=number, folder=folder / str(number), overrides=(), arguments=arguments, cwd=folder)


def record(folder: Path, number: int) -> dict[str, Any]:
    return json.loads((folder / str(number) / RECORD).read_text())


def test_jobs_run_some_at_a_time_and_a_failed_one_stops_no_other(tmp_path: Path) -> None:
    jobs = [job(tmp_path, n, *arguments) for n, arguments in enumerate((WELL, BAD, WELL, WELL))]
    lanes = [{"PLACE": "a"}, {"PLACE": "b"}]
    assert run_all(jobs, Stop(tmp_path), lanes) == dict.fromkeys(range(4))
    records = [record(tmp_path, n) for n in range(4)]
    assert [(r["state"], r["exit"]) for r in records] == [("done", 0), ("failed", 2), ("done", 0), ("done", 0)]
    assert [r["directory"] for r in records] == ["0", "1", "2", "3"]
    assert {r["environment"]["PLACE"] for r in records} == {"a", "b"}
    assert "Hydra" in (tmp_path / "0" / LOG).read_text()
    assert "unrecognized arguments: --bogus" in (tmp_path / "1" / LOG).read_text()
    spans = [(r["started"], r["started"] + r["seconds"]) for r in records]
    assert max(sum(a <= start < b for a, b in spans) for start, _ in spans) == 2


def test_a_directory_is_not_used_twice(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / LOG).write_text("of another")
    with pytest.raises(FileExistsError):
        run_all([job(tmp_path, 0, *WELL)], Stop(tmp_path), [{}])
    assert (tmp_path / "0" / LOG).read_text() == "of another"


def test_a_second_signal_kills(tmp_path: Path) -> None:
    """A job that cannot end well, for it has not yet started to listen."""
    stop = Stop(tmp_path)
    endless = (*TOY, PLUGINS, "run.steps=1000000", f"hydra.run.dir={tmp_path}/0", "hydra.job.num=0")

    def press_twice() -> None:
        while not (tmp_path / "0" / RECORD).exists():
            time.sleep(0.01)
        stop.note(signal.SIGINT)
        stop.note(signal.SIGTERM)

    thread = threading.Thread(target=press_twice)
    thread.start()
    assert run_all([job(tmp_path, 0, *endless), job(tmp_path, 1, *WELL)], stop, [{}]) == {0: None}
    thread.join()
    assert (record(tmp_path, 0)["state"], record(tmp_path, 0)["exit"]) == ("stopped", -signal.SIGKILL)
    assert not (tmp_path / "1").exists()


def test_a_stop_reaches_other_processes(tmp_path: Path) -> None:
    ours = Stop(tmp_path)
    theirs: Stop = pickle.loads(pickle.dumps(ours))
    assert theirs.signals == []
    ours.note(signal.SIGTERM)
    assert ours.signals == theirs.signals == [signal.SIGTERM]
    ours.note(signal.SIGINT)
    assert theirs.signals == [signal.SIGTERM, signal.SIGINT]


def test_one_wish_may_come_as_two_signals(tmp_path: Path) -> None:
    """timeout(1) sends its signal to the program, and then to its whole group."""
    stop = Stop(tmp_path)
    stop.note(signal.SIGTERM)
    stop.note(signal.SIGTERM)
    assert stop.signals == [signal.SIGTERM]
    time.sleep(2 * ECHO_S)
    stop.note(signal.SIGTERM)
    assert stop.signals == [signal.SIGTERM, signal.SIGTERM]


def test_a_stop_works_where_nothing_can_be_written(tmp_path: Path) -> None:
    stop = Stop(tmp_path / "nowhere")
    stop.note(signal.SIGINT)
    assert stop.signals == [signal.SIGINT]


def test_jobs_are_stopped_when_the_controlling_process_is_gone(tmp_path: Path) -> None:
    script = (
        "import pickle, sys; from pathlib import Path; from pipeline.sweep.stop import Stop;"
        "sys.stdout.buffer.write(pickle.dumps(Stop(Path(sys.argv[1])))); sys.stdout.flush(); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path.cwd()) as owner:
        assert owner.stdout
        stop: Stop = pickle.load(owner.stdout)
        assert not stop.owner.gone()
        assert stop.signals == []
    assert stop.owner.gone()
    assert stop.signals == [signal.SIGTERM, signal.SIGKILL]
    assert not Owner(pid=stop.owner.pid, started="", place="another machine").gone()


def test_signals_are_kept_from_this_process_while_a_sweep_listens(tmp_path: Path) -> None:
    stop = Stop(tmp_path)
    before = signal.getsignal(signal.SIGINT)
    with stop.listening():
        os.kill(os.getpid(), signal.SIGINT)
        deadline = time.monotonic() + 10
        while not stop.signals and time.monotonic() < deadline:
            time.sleep(0.01)
        assert stop.signals == [signal.SIGINT]
        assert (tmp_path / "stop").exists()
    assert signal.getsignal(signal.SIGINT) is before
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    assert not (tmp_path / "stop").exists()


# -- the board ---------------------------------------------------------------------------------------------------


def leave(
    folder: Path, number: int, state: str, overrides: list[str], metrics: list[dict[str, Any]], **more: Any
) -> None:
    """The directory of a job as it would be left."""
    own = folder / f"job-{number}"
    own.mkdir()
    kept = {"job": number, "directory": own.name, "overrides": overrides, "state": state, "started": time.time()}
    (own / RECORD).write_text(json.dumps(kept | {"exit": 0, "seconds": 1.5} | more))
    (own / LOG).write_text(f"hello\n\nthe reason of {number}\n")
    if metrics:
        (own / "metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in metrics))


AWKWARD = "source.path='a,b=c\n\"d\" ü'"


def test_everything_of_each_job_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = [{"step": 0, "eval/accuracy": 0.25}, {"step": 1, "reward/mean": 0.5, "eval/accuracy": None, "loss": 1e-9}]
    leave(tmp_path, 10, "done", ["name=x", AWKWARD], steps)
    leave(tmp_path, 9, "failed", ["name=x", "seed=3"], steps[:1], exit=1, seconds=2.5)
    leave(tmp_path, 11, "failed", ["name=x", "seed=4"], [], exit=-9)
    with Board(tmp_path, 4, common={"name=x"}) as board:
        pass
    assert not board.well
    rows = [json.loads(line) for line in (tmp_path / "sweep.jsonl").read_text().splitlines()]
    assert [row["job"] for row in rows] == [9, 10, 11]
    assert rows[1] == {
        "job": 10,
        "directory": "job-10",
        "state": "done",
        "exit": 0,
        "seconds": 1.5,
        "overrides": {"name": "x", "source.path": AWKWARD.partition("=")[2]},
        "metrics": steps[1],
    }
    with (tmp_path / "sweep.csv").open(newline="") as f:
        table = list(csv.DictReader(f))
    assert table[0] == {
        "job": "9",
        "directory": "job-9",
        "state": "failed",
        "exit": "1",
        "seconds": "2.5",
        "name": "x",
        "seed": "3",
        "step": "0",
        "eval/accuracy": "0.25",
        "source.path": "",
        "reward/mean": "",
        "loss": "",
    }
    assert table[1]["source.path"] == AWKWARD.partition("=")[2]
    assert float(table[1]["loss"]) == 1e-9
    told = capsys.readouterr().out
    assert "job 9 failed with exit status 1 after 2.5 s: seed=3\n    hello\n    the reason of 9\n" in told
    assert "job 11 failed by SIGKILL" in told
    assert "1 done, 2 failed, 1 not started; with all metrics: " in told
    assert "name=x" not in told


@pytest.mark.parametrize(("states", "jobs", "well"), [("dd", 2, True), ("dd", None, True), ("d", 2, False)])
def test_well_is_when_all_jobs_are_done(tmp_path: Path, states: str, jobs: int | None, well: bool) -> None:
    for number, _ in enumerate(states):
        leave(tmp_path, number, "done", [], [])
    with Board(tmp_path, jobs) as board:
        pass
    assert board.well is well


def test_the_last_whole_line_counts(tmp_path: Path) -> None:
    assert last_metrics(tmp_path) is None
    file = tmp_path / "metrics.jsonl"
    file.write_text("")
    assert last_metrics(tmp_path) is None
    file.write_text('{"step": 0}')
    assert last_metrics(tmp_path) is None
    file.write_text('{"step": 0}\n{"step": 1}\n{"ste')
    assert last_metrics(tmp_path) == {"step": 1}
    file.write_text("".join(json.dumps({"step": n, "text": "x" * 1000}) + "\n" for n in range(200)))
    assert (last_metrics(tmp_path) or {})["step"] == 199
