"""`placement.<node>=process`: the same numbers as `local`, and nothing left behind."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.context import Context
from pipeline.errors import StageError
from pipeline.metrics import Meter, summarise
from pipeline.placement import Placement, ProcessStage, place
from pipeline.program import Program
from pipeline.records import Unresolved
from pipeline.registry import PartSpec
from tests.pipeline.conftest import toy
from tests.pipeline.stages_for_tests import LosingScorer, NegateScorerConfig
from tests.pipeline.test_process import ROOT
from tests.pipeline.test_runners import assert_same, steps, untimed
from tests.processes import shm_left, shm_names, wait_gone


def test_a_context_crosses_with_an_empty_meter(tmp_path: Path) -> None:
    ctx = Context(node="n", run_seed=3, run_dir=tmp_path, threads=2, device="cpu")
    ctx.meter.add("x", 1)
    back = pickle.loads(pickle.dumps(ctx))
    assert (back.node, back.run_seed, back.run_dir, back.threads, back.device) == ("n", 3, tmp_path, 2, "cpu")
    assert back.meter.drain() == {}
    assert back.seed("n", 1, np.arange(3)).tolist() == ctx.seed("n", 1, np.arange(3)).tolist()


def test_local_is_the_stage_itself() -> None:
    spec = toy().nodes["judge"]
    assert type(place(spec, Placement.local)) is spec.cls
    assert type(place(spec, Placement.process)) is ProcessStage


@pytest.mark.parametrize("runner", ["sync", "overlap"])
def test_every_node_in_a_process_gives_the_same_records_and_metrics(tmp_path: Path, runner: str) -> None:
    common = ["double=streaming", "run.steps=2"]
    assert_same(steps(tmp_path, *common, f"runner={runner}", EVERY), steps(tmp_path, *common))


# -- records that name columns instead of sending them ----------------------------------------------------------

NAMED_METRICS = ("/by_reference", "/sent_again")
APART = ("double", "scorer", "second", "judge", "learner")
"""The nodes that take numbers."""


def in_run_dir(run_dir: Path, *overrides: str) -> tuple[list[Any], dict[str, float]]:
    """As `steps`, in a given run directory; what was named or sent again is apart, added up over the steps."""
    run_dir.mkdir(exist_ok=True)
    out, named = [], dict[str, float]()
    with Program(toy(*overrides), run_dir) as program:
        for _, records in program.runner.steps(program, first=1, count=program.plan.root.run.steps):
            metrics = untimed(program.meter.drain())
            for name in [n for n in metrics if n.endswith(NAMED_METRICS)]:
                named[name] = named.get(name, 0) + metrics.pop(name)
            out.append((records, metrics))
    return out, named


@pytest.mark.parametrize("runner", ["sync", "overlap"])
def test_what_both_processes_can_find_is_named_and_not_sent(tmp_path: Path, runner: str) -> None:
    common = ["double=streaming", "double.most=2", "run.steps=3"]
    plain, none = in_run_dir(tmp_path / "local", *common)
    (tmp_path / "apart" / "notes").mkdir(parents=True)
    apart, named = in_run_dir(tmp_path / "apart", *common, f"runner={runner}", placed(*APART))
    assert_same(apart, plain)
    assert none == {}
    assert named.keys() == {f"{n}/by_reference" for n in APART}
    assert named["double/by_reference"] == named["judge/by_reference"] == 3 * 6
    assert named["learner/by_reference"] == 3 * 6 * 2, "run and learn"


@pytest.mark.parametrize("runner", ["sync", "overlap"])
def test_what_is_not_found_is_sent_whole(tmp_path: Path, runner: str) -> None:
    """The stage is called once all the same: a learner that learned twice would have another weight."""
    common = ["double=streaming", "double.most=2", "run.steps=2"]
    plain, _ = in_run_dir(tmp_path / "local", *common)
    (tmp_path / "apart" / "notes").mkdir(parents=True)
    (tmp_path / "apart" / "notes" / "full").touch()
    apart, named = in_run_dir(tmp_path / "apart", *common, f"runner={runner}", placed(*APART))
    assert_same(apart, plain)
    assert named.keys() == {f"{n}/sent_again" for n in APART}
    assert named["double/sent_again"] == 2 * 6


def test_a_name_that_gets_lost_between_two_steps(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    numbers, _ = opened(tmp_path, "source")
    double, ctx = opened(tmp_path, "double")
    try:
        first, second = numbers.run(), numbers.run()
        made = [double.run(numbers=first)]
        (tmp_path / "notes" / "full").touch()
        made.append(double.run(numbers=second))
        assert [m.same(replace(n, value=n.value * 2)) for m, n in zip(made, (first, second), strict=True)] == [True] * 2  # type: ignore[attr-defined]
        kept = {n: v for n, v in summarise(ctx.meter.drain()).items() if n.endswith(NAMED_METRICS)}
        assert kept == {"double/by_reference": 6, "double/sent_again": 6}
    finally:
        double.close()
        numbers.close()


def test_an_error_of_the_stage_itself_is_not_taken_for_a_lost_name(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    numbers, ctx = opened(tmp_path, "source")
    scorer = ProcessStage(PartSpec("scorer", LosingScorer, NegateScorerConfig(), {}))
    try:
        scorer.open(ctx)
        with pytest.raises(Unresolved, match="the stage's own"):
            scorer.run(numbers=numbers.run())
        assert (tmp_path / "calls").read_text() == "."
    finally:
        scorer.close()
        numbers.close()


# -- the process -------------------------------------------------------------------------------------------------


def placed(*nodes: str) -> str:
    """One choice for the composed plan: a dot in the key would make it a value that is set afterwards."""
    return "placement={" + ",".join(f"{n}:process" for n in nodes) + "}"


EVERY = placed("source", "double", "scorer", "second", "judge", "learner", "eval_source")


def opened(tmp_path: Path, node: str, *overrides: str) -> tuple[ProcessStage, Context]:
    stage = ProcessStage(toy(*overrides).nodes[node])
    ctx = Context(node=node, run_seed=0, run_dir=tmp_path, meter=Meter())
    stage.open(ctx)
    return stage, ctx


def test_state_weights_and_export_cross(tmp_path: Path) -> None:
    stage, _ = opened(tmp_path, "learner")
    try:
        assert stage.state_dict() == {"weight": 1.0, "version": 0}
        stage.load_state_dict({"weight": 2.5, "version": 7})
        snapshot = stage.publish()
        assert (snapshot.version, snapshot.data.view("<f8")[0]) == (7, 2.5)
        stage.export(str(tmp_path / "final"))
        assert (tmp_path / "final" / "weight.txt").read_text() == "2.5"
        with pytest.raises(TypeError, match="takes no weights"):
            stage.receive(snapshot)
    finally:
        stage.close()
    with pytest.raises(RuntimeError, match="stage 'learner' is not open"):
        stage.publish()
    stage.close()  # again


def test_metrics_come_with_each_part_of_a_stream(tmp_path: Path) -> None:
    numbers, _ = opened(tmp_path, "source")
    double, ctx = opened(tmp_path, "double", "double=streaming", "double.most=2")
    try:
        batch = numbers.run()
        seen = 0
        for part in double.stream(numbers=batch):
            seen += len(part)
            assert len(ctx.meter.drain().get("double/value", ("mean", []))[1]) == len(part)
        assert seen == len(batch)
        assert summarise(ctx.meter.drain()) == {}
    finally:
        double.close()
        numbers.close()


def test_an_error_in_a_process_names_node_step_rows_and_its_traceback(tmp_path: Path) -> None:
    with Program(toy("scorer.fail_at=4", placed("double", "scorer")), tmp_path) as program:
        with pytest.raises(StageError) as caught:
            next(program.runner.steps(program, first=1, count=1))
        pids = pids_of(program)
    error = caught.value
    assert (error.node, error.step, error.rows) == ("scorer", 1, (0, 1, 2, 3, 4, 5))
    assert error.what == "ValueError: cannot score row 4"
    assert "stages_for_tests.py" in error.detail
    assert str(error) == "stage 'scorer' failed in step 1, rows 0, 1, 2, 3, 4, 5: ValueError: cannot score row 4"
    assert not wait_gone(pids, 5)


def pids_of(program: Program) -> list[int]:
    children = [s._child for s in program.stages.values() if isinstance(s, ProcessStage)]
    return [c.pid for c in children if c]


def test_a_process_that_dies_is_a_stage_error(tmp_path: Path) -> None:
    with Program(toy("scorer.die_at=4", placed("scorer")), tmp_path) as program:
        with pytest.raises(StageError, match="ChildDied: process 'scorer' ended by signal SIGKILL"):
            next(program.runner.steps(program, first=1, count=1))
        pids = pids_of(program)
    assert not wait_gone(pids, 5)


@pytest.mark.parametrize("where", ["open", "close"])
def test_errors_in_open_and_close(tmp_path: Path, where: str, caplog: pytest.LogCaptureFixture) -> None:
    before = children()
    plan = toy(f"learner.break_at={where}", placed("learner"))
    words = f"stage 'learner' failed in step 0: RuntimeError: broken in {where}"
    with caplog.at_level(logging.ERROR), pytest.raises(StageError, match=words), Program(plan, tmp_path):
        assert where == "close", "it is open"
    assert ("closing stage 'learner' failed" in caplog.text) is (where == "close")
    assert not wait_gone(sorted(children() - before), 5)


def children() -> set[int]:
    out = subprocess.run(["ps", "-o", "pid=", "--ppid", str(os.getpid())], capture_output=True, text=True, check=True)
    return {int(p) for p in out.stdout.split()}


SCRIPT = """
    import sys
    from pathlib import Path
    from pipeline.program import Program
    from tests.pipeline.conftest import toy
    from tests.pipeline.test_placement import pids_of, placed
    plan = toy("double=streaming", "runner={runner}", "run.steps=1", "{setting}", placed("double", "scorer", "learner"))
    with Program(plan, Path(sys.argv[1])) as program:
        print(*pids_of(program), flush=True)
        program.execute()
"""


@pytest.mark.parametrize(
    ("runner", "setting", "sent", "code"),
    [
        ("sync", "run.steps=2", None, 0),
        ("sync", "scorer.fail_at=2", None, 1),
        ("overlap", "double.delay_s=60", signal.SIGINT, -signal.SIGINT),
        ("overlap", "scorer.delay_s=60", signal.SIGTERM, -signal.SIGTERM),
        ("sync", "scorer.delay_s=60", signal.SIGKILL, -signal.SIGKILL),
    ],
)
def test_nothing_is_left_of_a_run(tmp_path: Path, runner: str, setting: str, sent: int | None, code: int) -> None:
    """A whole run of four processes: ended well, by an error, and by signals while a stage is at work."""
    before = shm_names()
    script = textwrap.dedent(SCRIPT).format(runner=runner, setting=setting)
    run = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert run.stdout is not None
    pids = [int(p) for p in run.stdout.readline().split()]
    assert len(pids) == 3
    if sent:
        time.sleep(1)
        assert len(wait_gone(pids, 0)) == 3
        run.send_signal(sent)
    started = time.monotonic()
    _, errors = run.communicate(timeout=60)
    assert run.returncode == code, errors.decode()
    assert time.monotonic() - started < 25, "closing waited for a call under way"
    assert not wait_gone(pids, 5)
    assert not shm_left(before)
