"""vLLM's engine in a run: rows stream from it while others are generated, and it ends with the run, however that ends.

`overlap`, `sync`: one sweep, two engines. Both nodes of interest are a user's own (mine/my_stages.py): vLLM and the
rule reward, which write down when rows were finished and when they were scored. In `sync` the engine is the child of a
stage in a process of its own. `killed`: kill -9 of the controller while the engine generates; `engine_killed`: of the
engine.
"""

from __future__ import annotations

import importlib.util
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.commands import OWN, SMALL, Ended, Run, differences, lines, numbers, run, steps_done

INSTALLED = importlib.util.find_spec("vllm") is not None

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not INSTALLED, reason="vllm is not installed"),
]

# At this temperature a response ends anywhere between 1 and 96 tokens; with 4 at a time, many wait for a place.
UNEVEN = ("rollout.temperature=4", "rollout.max_new_tokens=96", "rollout.max_num_seqs=4")
POINTS = ("overlap", "apart")


def streams(folder: Path) -> Ended:
    points = f"+case={','.join(POINTS)}"
    return run(
        folder, "-m", *OWN, f"hydra.sweep.dir={folder}/sweep", "rollout=timed", "reward=timed", points, *SMALL, *UNEVEN
    )


def killed(folder: Path) -> Ended:
    endless = ("rollout=vllm_async", "runner=overlap", "run.steps=1000000")
    started = Run(folder, f"hydra.run.dir={folder}/run", *SMALL, *UNEVEN, *endless)
    started.until(lambda: steps_done(folder / "run") >= 1, "the end of step 1")
    (folder / "children").write_text("\n".join(started.commands()))
    (folder / "names").write_text("\n".join(started.names()))
    return started.send(signal.SIGKILL).end(grace_s=15)


def engine_killed(folder: Path) -> Ended:
    """Bug bank 140: kill -9 of vLLM's engine while it generates."""
    endless = ("rollout=vllm_async", "run.steps=1000000", "rollout.max_new_tokens=96", "rollout.temperature=4")
    started = Run(folder, f"hydra.run.dir={folder}/run", *SMALL, *endless)
    started.until(lambda: steps_done(folder / "run") >= 1, "the end of step 1")
    started.send_to("EngineCore", signal.SIGKILL)
    before = time.monotonic()
    ended = started.end(grace_s=15)
    (folder / "seconds").write_text(str(time.monotonic() - before))
    return ended


RUNS = {"streams": streams, "killed": killed, "engine_killed": engine_killed} if INSTALLED else {}


@dataclass(frozen=True)
class Note:
    """A line that a timed stage wrote: seconds of the machine's clock."""

    step: int
    began: float
    ended: float
    rows: int


def notes(file: Path, step: int) -> list[Note]:
    split = (line.split() for line in file.read_text().splitlines())
    found = [Note(int(s), float(b), float(e), int(n)) for s, b, e, n in split]
    return [n for n in found if n.step == step]


def point(runs, name: str) -> Path:
    return runs("streams").folder / "sweep" / str(POINTS.index(name))


def test_both_runners_end_well_and_leave_nothing(runs):
    ended = runs("streams")

    assert (ended.code, ended.left) == (0, {}), ended.err[-3000:]
    assert "Traceback" not in ended.err


def test_the_reward_works_while_generation_goes_on(runs):
    """overlap: in some step, at least half of the rows were scored, to the end, before the last one was generated.
    sync: none, in any step. (Not in every step: where another program holds the cores, the reward may come late.)"""
    early: dict[int, int] = {}
    for step in (1, 2):
        finished, scored = (notes(point(runs, "overlap") / f, step) for f in ("finished.txt", "scored.txt"))
        last = max(n.began for n in finished)
        assert sum(n.rows for n in finished) == sum(n.rows for n in scored) == 16
        assert min(n.began for n in scored) > min(n.began for n in finished)  # of rows that were finished, that is
        early[step] = sum(n.rows for n in scored if n.ended < last)

        finished, scored = (notes(point(runs, "apart") / f, step) for f in ("finished.txt", "scored.txt"))
        assert [n.rows for n in scored] == [16]
        assert min(n.began for n in scored) > max(n.began for n in finished)
    assert max(early.values()) >= 8, early


def test_streaming_changes_no_number(runs):
    """Tokens, rewards and everything learned: rows carry seeds of their own, and the engine computes in float32.

    What vLLM itself adds up in another order when other rows share its batch may differ in the last bits: its own
    log-probs, which nothing learns from here. How often its sampler is called depends on the batches too.
    """
    one, other = (point(runs, name) for name in POINTS)
    rows, others = (lines(run_dir / "rollouts.jsonl") for run_dir in (one, other))

    for a, b in zip(rows, others, strict=True):
        log_probs = [r.pop("engine_log_prob", None) for r in (a, b)]
        assert log_probs[0] == pytest.approx(log_probs[1], abs=1e-3)
    assert rows == others
    assert (
        differences(*(numbers(p, without=("policy/engine_drift", "rollout/sampler_calls")) for p in (one, other))) == []
    )
    assert all(s["policy/engine_drift"] < 1e-5 for p in (one, other) for s in numbers(p)[1:])


def test_rows_are_of_uneven_length(runs):
    """Or the test above would show nothing."""
    rows = [r["tokens"] for r in lines(point(runs, "overlap") / "rollouts.jsonl") if r["purpose"] == "train"]

    assert min(rows) <= 24
    assert max(rows) >= 72


def test_the_engine_is_gone_after_kill_9(runs):
    ended = runs("killed")

    assert ended.code == -signal.SIGKILL
    assert "EngineCore" in (ended.folder / "children").read_text()
    assert (ended.folder / "names").read_text() == ""  # whatever is killed with it, nothing can be left
    assert ended.left == {}
    assert ended.gone_s < 15


def test_a_dead_engine_ends_the_run(runs):
    """Bug bank 140: nobody waits for it."""
    ended = runs("engine_killed")

    assert (ended.code, ended.left) == (1, {}), ended.err[-3000:]
    assert re.search(r"stage 'rollout' failed in step \d+, rows .*EngineError: EngineDeadError", ended.err)
    assert float((ended.folder / "seconds").read_text()) < 20
