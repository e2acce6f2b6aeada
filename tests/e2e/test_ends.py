"""Whatever ends a run, nothing is left of it: no process, nothing in /dev/shm, no temporary file.

Runs of the real pipeline have stages in child processes: the reward, which has a scoring process of its own, and the
loader or, where it matters most, the rollout with torch. Runs of the toy pipeline (tests/pipeline) have stages that
misbehave where and how they are told; they import no torch. A normal end is looked at in test_backends.py, exceptions
in every method, placement and runner in tests/pipeline/test_failures.py, the end of vLLM's engine in test_vllm.py.
"""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.progress import ECHO_S
from tests.e2e.commands import OWN, ROOT, SMALL, Ended, Run, lines, run, steps_done

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

APART = ("placement.reward=process", "placement.loader=process")
HEAVY = ("placement.rollout=process",)
TOY = (
    "--config-dir",
    str(ROOT / "tests/pipeline/conf"),
    "plugins=[tests.pipeline.stages_for_tests,tests.pipeline.stages_of_ends]",
    "pipeline=toy",
    "double=awkward",
    "learner=awkward",
)


SECRETS = {
    "HF_TOKEN": "hf_planted/secret+one",
    "WANDB_API_KEY": "wandbplantedsecrettwo",
    "AWS_SECRET_ACCESS_KEY": 'aws"planted\\secretthree',
    "DB_PASSWORD": "plantedsecretfour-ü",
}


def raises(folder: Path) -> Ended:
    """A stage of a user's own, in a process of its own, raises in step 2."""
    return run(folder, *OWN, f"hydra.run.dir={folder}/run", *SMALL, *APART, "reward=breaking", "run.steps=9")


def stopped_by(folder: Path, number: int, *more: str, group: bool = False) -> Ended:
    """The signal comes while steps are worked on."""
    started = Run(folder, f"hydra.run.dir={folder}/run", *SMALL, *APART, "run.steps=1000000", *more)
    started.until(lambda: steps_done(folder / "run") >= 1, "the end of step 1")
    (folder / "children").write_text("\n".join(started.commands()))
    return started.send(number, group=group).end()


# -- the toy pipeline --------------------------------------------------------------------------------------------


def toy(folder: Path, *args: str) -> Ended:
    return run(folder, *TOY, f"hydra.run.dir={folder}/run", *args)


def busy(folder: Path, node: str, method: str, *args: str, seconds: float = 60) -> Run:
    """A run in which a stage is at work for so long; the run is at that point."""
    long = (f"{node}.where={method}", f"{node}.how=busy", f"{node}.text='{seconds}'")
    started = Run(folder, *TOY, f"hydra.run.dir={folder}/run", *long, "run.steps=4", *args)
    return started.until((folder / "run" / "misbehaves").exists, f"{node}.{method}")


def once(folder: Path, number: int, node: str, method: str, *args: str) -> Ended:
    """A signal while a stage has some seconds of work before it. Ctrl-C in a terminal goes to the process group, and
    many a cluster's SIGTERM to every process of a job."""
    started = busy(folder, node, method, *args, seconds=3)
    return (started.send(number, group=True) if number == signal.SIGINT else started.send_to_all(number)).end()


def twice(folder: Path) -> Ended:
    started = busy(folder, "double", "stream", "runner=overlap", "placement.double=process")
    told = started.send(signal.SIGINT, group=True)
    told.until(lambda: "once more" in (folder / "err.txt").read_text(), "what the first signal does")
    time.sleep(2 * ECHO_S)  # sooner it would count as the same wish
    return told.send(signal.SIGINT, group=True).end()


def at_the_start(folder: Path) -> Ended:
    return busy(folder, "double", "open", "placement.learner=process").send(signal.SIGTERM).end()


def after_the_end(folder: Path) -> Ended:
    """A signal while the interpreter ends."""
    how = ("learner.where=close", "learner.how=linger", f"learner.text={folder}/run/lingers")
    started = Run(folder, *TOY, f"hydra.run.dir={folder}/run", *how)
    started.until((folder / "run" / "lingers").exists, "the end of the interpreter")
    return started.send(signal.SIGTERM).send(signal.SIGINT).end()


def stuck(folder: Path, node: str, method: str, how: str, *args: str) -> Ended:
    how = f"{node}.how={how}"
    settings = (f"{node}.where={method}", how, "run.stall_s=2", "double.text=${oc.env:HF_TOKEN}", *args)
    return Run(folder, *TOY, f"hydra.run.dir={folder}/run", *settings, more=SECRETS).end()


def slow(folder: Path) -> Ended:
    """Longer at work than is allowed without progress, in this process and in another; but they get on."""
    how = [f"{n}.{s}" for n in ("double", "learner") for s in ("how=busy", "text='3'")]
    where = ("double.where=run", "learner.where=learn", "placement.double=process")
    return toy(folder, *how, *where, "run.stall_s=1.5")


def vanishes(folder: Path) -> Ended:
    started = busy(folder, "learner", "learn", "placement.double=process", seconds=2)
    subprocess.run(["rm", "-r", str(folder / "run")], check=True)
    return started.end()


def by(folder: Path, code: str) -> Path:
    """A program that does something to itself and then becomes `python run.py`."""
    program = folder.parent / f"{folder.name}.py"
    program.write_text(f"import os, sys\nline = [sys.executable, '{ROOT}/run.py', *sys.argv[1:]]\n{code}\n")
    return program


def full(folder: Path) -> Ended:
    """A disk of 4 MB of its own, which a stage fills in step 2. What is left there is copied to `run`."""
    shell = f"""mkdir {folder}/disk && mount -t tmpfs -o size=4m none {folder}/disk && "$0" "$@"
        code=$?; rm {folder}/disk/run/fill; cp -r {folder}/disk/run {folder}/run; exit $code"""
    own = f"os.execvp('unshare', ['unshare', '-rm', '/bin/sh', '-c', {shell!r}, *line])"
    how = (
        f"hydra.run.dir={folder}/disk/run",
        "double.where=run",
        "double.how=fill",
        f"double.text={folder}/disk/run/fill",
    )
    return Run(folder, *TOY, *how, "run.steps=100", program=by(folder, own)).end()


CAN_MOUNT = subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode == 0


def tells(folder: Path) -> Ended:
    """Secrets in settings, in what stages print and in what they raise, in this process and another."""
    settings = (
        "double.text=${oc.env:HF_TOKEN}",
        "double.where=open",
        "double.how=print",
        "learner.text='key ${oc.env:WANDB_API_KEY} and ${oc.env:DB_PASSWORD} and ${oc.env:AWS_SECRET_ACCESS_KEY}'",
        "learner.where=learn",
        f"name={SECRETS['WANDB_API_KEY']}",
        "placement.double=process",
    )
    return Run(folder, *TOY, f"hydra.run.dir={folder}/run", *settings, more=SECRETS).end()


STOPPED: dict[str, tuple[signal.Signals, str, str, str, tuple[str, ...]]] = {
    # how it is stopped while which stage does what; what is finished; more settings
    "term-learn": (signal.SIGTERM, "learner", "learn", "step 2", ("placement={learner:process,double:process}",)),
    "int-stream": (signal.SIGINT, "double", "stream", "step 2", ("runner=overlap", "placement.learner=process")),
    "term-export": (signal.SIGTERM, "learner", "export", "what was learned is saved", ("placement.learner=process",)),
}
STUCK: dict[str, tuple[str, str, str, tuple[str, ...]]] = {
    # which stage does what, how it gets stuck there; more settings
    "interpreter": ("double", "run", "hold", ("placement.learner=process",)),
    "process": ("double", "run", "hold", ("placement={double:process,learner:process}",)),
    "overlap": ("double", "stream", "sleep", ("runner=overlap", "placement.learner=process")),
    "sigstop": ("learner", "learn", "stop", ("placement.learner=process",)),
}


def stops(name: str) -> Callable[[Path], Ended]:
    number, node, method, _, more = STOPPED[name]
    return lambda folder: once(folder, number, node, method, *more)


def sticks(name: str) -> Callable[[Path], Ended]:
    node, method, how, more = STUCK[name]
    return lambda folder: stuck(folder, node, method, how, *more)


RUNS: dict[str, Callable[[Path], Ended]] = {
    "raises": raises,
    "interrupted": lambda folder: stopped_by(folder, signal.SIGINT, group=True),
    "killed": lambda folder: stopped_by(folder, signal.SIGKILL, *HEAVY),
    **{name: stops(name) for name in STOPPED},
    "twice": twice,
    "at_the_start": at_the_start,
    "after_the_end": after_the_end,
    **{name: sticks(name) for name in STUCK},
    "slow": slow,
    "vanishes": vanishes,
    "tells": tells,
    **({"full": full} if CAN_MOUNT else {}),
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


# -- signals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "code"), [("interrupted", 130), ("killed", -signal.SIGKILL)], ids=str)
def test_nothing_is_left_after_a_signal(runs, name: str, code: int):
    """Ctrl-C, which a terminal sends to the whole group; kill -9, which the program never sees."""
    ended = runs(name)

    assert ended.code == code, ended.err[-3000:]
    assert (ended.folder / "children").read_text().count("pipeline.process") >= 3
    assert ended.left == {}
    assert "Traceback" not in ended.err
    done = lines(ended.folder / "run" / "metrics.jsonl")  # every line is whole
    assert [step["step"] for step in done] == list(range(len(done)))
    assert (ended.folder / "run" / "final" / "model.safetensors").exists() == (code > 0)


def test_a_stopped_run_says_where_it_lies(runs):
    for name in ("interrupted", "twice", "at_the_start"):
        ended = runs(name)
        assert f"stopped; what was written lies in {ended.folder}/run" in ended.err, name


@pytest.mark.parametrize("name", STOPPED)
def test_a_first_signal_lets_the_step_be_finished_and_saves_what_was_learned(runs, name: str):
    """Bug bank 137: in a rollout, an update, an export."""
    number, _, method, what, _ = STOPPED[name]
    ended, run_dir = runs(name), runs(name).folder / "run"

    assert (ended.code, ended.left) == (128 + number, {}), ended.err[-3000:]
    limit = ", or in 25 s (run.grace_s)" if number == signal.SIGTERM else ""
    assert f"{number.name}: stops after {what}{limit}; once more stops at once" in ended.err
    step = 4 if method == "export" else 2
    assert f"stopped after step {step}" in ended.err
    assert steps_done(run_dir) == step
    assert (
        float((run_dir / "final" / "weight.txt").read_text()) == lines(run_dir / "metrics.jsonl")[-1]["learner/weight"]
    )
    assert (run_dir / "advice.txt").read_text() == "double: seen by double\nlearner: seen by learner\n"
    assert sorted((run_dir / "closed").read_text().split()) == ["double", "learner"]
    assert "Traceback" not in ended.err + (run_dir / "run.log").read_text()


@pytest.mark.parametrize(
    ("name", "code", "done"),
    [("twice", 130, 1), ("at_the_start", 143, -1)],
)
def test_at_once_is_at_once(runs, name: str, code: int, done: int):
    """A second signal; one while stages are opened (bug bank 137), when there is nothing to be saved yet."""
    ended, run_dir = runs(name), runs(name).folder / "run"

    assert (ended.code, ended.left) == (code, {}), ended.err[-3000:]
    assert steps_done(run_dir) == done
    assert [p.name for p in run_dir.iterdir() if p.name.startswith("final")] == []
    assert ("stops after step 2" in ended.err) == (done == 1)
    assert "stops at once\n\n" in ended.err
    assert "Traceback" not in ended.err


def test_a_run_that_has_ended_has_its_status(runs):
    ended = runs("after_the_end")

    assert (ended.code, ended.left, ended.err) == (0, {}, "")


# -- the watchdog ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STUCK)
def test_a_node_without_progress_is_named_with_its_rows_and_every_stack(runs, name: str):
    node, method, how, more = STUCK[name]
    ended = runs(name)
    log = (ended.folder / "run" / "run.log").read_text()

    assert (ended.code, ended.left) == (1, {}), ended.err[-3000:]
    rows = "7, 8, 9, 10, 11" if method == "stream" else "6, 7, 8, 9, 10, 11"  # in a stream the first was finished
    said = rf"stage '{node}' failed in step 2, rows {rows}: stalled: no progress for 2\.\d s \(run.stall_s=2\), "
    said += rf"in '{method}' for [1-6]\.\d s"
    assert re.search(said, ended.err), ended.err[-3000:]
    assert re.search(said, log)
    assert "Traceback" not in ended.err
    apart = re.findall(r"(\w+):process|placement\.(\w+)=process", " ".join(more))
    stacks = log.split("--- process ")[1:]
    assert "the controlling process" in stacks[0]
    assert "running.py" in stacks[0]
    for child in ("".join(names) for names in apart):
        [stack] = [s for s in stacks if f"'{child}'" in s.splitlines()[0]]
        assert "in serve" in stack
    guilty = next(s for s in stacks if "in now" in s)
    assert "stages_of_ends.py" in guilty
    assert ("was stopped by a signal" in guilty) == (how == "stop")


def test_work_that_gets_on_is_left_alone(runs):
    ended = runs("slow")

    assert (ended.code, ended.left) == (0, {}), ended.err[-3000:]
    [step] = [m for m in lines(ended.folder / "run" / "metrics.jsonl") if m["step"] == 2]
    assert min(step["time/double_s"], step["time/learner_s"]) > 2.9


# -- the disk ----------------------------------------------------------------------------------------------------


def test_a_run_directory_that_vanishes_ends_the_run_and_is_not_made_anew(runs):
    ended = runs("vanishes")

    assert (ended.code, ended.left) == (1, {}), ended.err[-3000:]
    file = f"{ended.folder}/run/metrics.jsonl"
    assert f"'{file}' cannot be written: its directory is gone: was it moved or removed?" in ended.err
    assert "The run ended after step 1" in ended.err
    assert "Traceback" not in ended.err
    assert not (ended.folder / "run").exists()


def check_full(ended: Ended, why: str) -> None:
    run_dir = ended.folder / "run"
    assert ended.code == 1, ended.err[-3000:]
    assert re.search(
        rf"run/metrics\.jsonl' cannot be written: {why}; \d+\.\d+ GB of \d+\.\d+ GB are free in '", ended.err
    )
    assert "make room there, or choose another place with hydra.run.dir" in ended.err
    assert "Traceback" not in ended.err
    assert "Logging error" not in ended.err
    assert (run_dir / "metrics.jsonl").read_bytes().endswith(b"}\n")
    done = lines(run_dir / "metrics.jsonl")
    assert [step["step"] for step in done] == list(range(len(done)))
    assert f"The run ended after step {len(done) - 1}" in ended.err
    assert not (run_dir / "final").exists()
    assert not (run_dir / "final.part").exists()


@pytest.mark.skipif(not CAN_MOUNT, reason="this user may not mount")
def test_a_full_disk_ends_the_run(runs):
    check_full(runs("full"), "the disk is full")


# -- secrets -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tells", "process"])
def test_nothing_that_is_written_holds_a_secret(runs, name: str):
    ended, run_dir = runs(name), runs(name).folder / "run"

    assert (ended.code, ended.left) == (1, {}), ended.err[-3000:]
    texts = {p.name: p.read_bytes() for p in ended.folder.rglob("*") if p.is_file()}
    assert {"plan.json", "config.yaml", "environment.json", "run.log", "out.txt", "err.txt"} <= set(texts)
    parts = [p for value in SECRETS.values() for p in re.findall(r"[a-z]*planted[a-z]*|secretthree", value)]
    for file, text in texts.items():
        assert [p for p in parts if p.encode() in text] == [], file
    assert "${oc.env:HF_TOKEN}" in (run_dir / "config.yaml").read_text()
    if name == "tells":
        shown = "key ${oc.env:WANDB_API_KEY} and ${oc.env:DB_PASSWORD} and ${oc.env:AWS_SECRET_ACCESS_KEY}"
        assert f"ArithmeticError: {shown}" in ended.err
        assert f"raise ArithmeticError(text)\nArithmeticError: {shown}" in (run_dir / "run.log").read_text()
        assert "\n${oc.env:HF_TOKEN}\n" in "\n" + (run_dir / "run.log").read_text()  # printed by the other process
