"""What cannot run is told at once, all of it, in words for people, and nothing is started or written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.commands import ROOT, SMALL, Ended, run

pytestmark = pytest.mark.timeout(300)


def wrong(folder: Path) -> Ended:
    """Seven mistakes of seven kinds."""
    return run(
        folder,
        "rollout=turch",
        "loader.batchsize=4",
        "rollout.temperature=-1",
        "rollout.max_new_tokens=1000",
        "trainer.policy_loss=vanila",
        "loader.path=nowhere.jsonl",
        "placement.rewards=process",
    )


def unfed(folder: Path) -> Ended:
    """GAE without the critic that gives it values."""
    return run(folder, "pipeline=grpo", "advantage.estimator=gae")


def taken(folder: Path) -> Ended:
    """The directory holds the files of somebody else."""
    (folder / "mine").mkdir()
    (folder / "mine" / "thesis.txt").write_text("two years of work")
    return run(folder, f"hydra.run.dir={folder}/mine", *SMALL)


def planned(folder: Path) -> Ended:
    return run(folder, "mode=plan", "rollout=hf", *SMALL)


def as_json(folder: Path) -> Ended:
    return run(folder, "mode=plan", "plan.format=json", "seed=7")


def bad_point(folder: Path) -> Ended:
    """A sweep whose second point cannot run."""
    return run(folder, "-m", "trainer.policy_loss=vanilla,vanila", *SMALL)


RUNS = {
    "wrong": wrong,
    "unfed": unfed,
    "taken": taken,
    "planned": planned,
    "as_json": as_json,
    "bad_point": bad_point,
}


@pytest.mark.parametrize("name", ["wrong", "unfed", "taken", "bad_point"])
def test_exit_status_2_and_nothing_on_disk(runs, name: str):
    ended = runs(name)

    assert ended.code == 2, ended.err[-3000:]
    assert ended.left == {}
    assert "Traceback" not in ended.out + ended.err
    assert "Nothing was started and nothing was written." in ended.err
    expected = {"out.txt", "err.txt", "tmp"} | ({"mine", "mine/thesis.txt"} if name == "taken" else set())
    assert {str(p.relative_to(ended.folder)) for p in ended.folder.rglob("*")} == expected


def test_all_problems_are_told_at_once(runs):
    told = runs("wrong").err

    assert "7 problems" in told
    for where, hint in (
        ("rollout: there is no 'turch'", "did you mean 'torch'?"),
        ("loader.batchsize: no such setting", "did you mean 'batch_size'?"),
        ("rollout.temperature: -1", ">= 0"),
        ("rollout.max_new_tokens: ", "128"),
        ("trainer.policy_loss: verl has no policy loss 'vanila'", "did you mean 'vanilla'?"),
        ("loader.path: ", "nowhere.jsonl"),
        ("placement.rewards: there is no node 'rewards'", "did you mean 'reward'?"),
    ):
        assert where in told
        assert hint in told


def test_an_estimator_that_nothing_feeds_is_named(runs):
    told = runs("unfed").err

    assert "advantage.estimator: gae needs values, which nothing feeds" in told
    assert "rloo" in told  # one that could run instead


def test_the_files_of_another_are_not_touched(runs):
    ended = runs("taken")

    assert "hydra.run.dir: " in ended.err
    assert (ended.folder / "mine" / "thesis.txt").read_text() == "two years of work"


def test_a_plan_prints_and_stops(runs):
    ended = runs("planned")

    assert (ended.code, ended.err, ended.left) == (0, "", {})
    for text in (
        "loader\n└─ tokenizer_cache\n   └─ rollout\n      ├─ reward\n",
        "rollout          hf           tokens=tokenizer_cache",
        "prompts a step: 4, rows a step: 16",
        "batch_size=4",
        "memory, estimated  weights",
        "  all on cpu: ",
    ):
        assert text in ended.out
    assert max(map(len, ended.out.splitlines())) <= 100
    assert {p.name for p in ended.folder.iterdir()} == {"out.txt", "err.txt", "tmp"}


def test_plans_are_compared(runs, tmp_path: Path):
    """With itself, with another one, and with nothing: exit status 0, 1 and 2."""
    whole = json.loads(runs("as_json").out)
    (tmp_path / "a.json").write_text(json.dumps(whole))
    other = whole | {"settings": whole["settings"] | {"seed": 8}, "versions": whole["versions"] | {"torch": "0.1"}}
    (tmp_path / "b.json").write_text(json.dumps(other))
    for b, code, text in (
        ("a.json", 0, "no difference in settings, versions and final metrics"),
        ("b.json", 1, "  seed: 7 -> 8  (+1)"),
        ("c.json", 2, ""),
    ):
        command = [sys.executable, str(ROOT / "run.py"), "mode=diff", "plan.a=a.json", f"plan.b={b}"]
        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert ended.returncode == code, ended.stderr
        assert text in ended.stdout
    assert "plan.b: there is no plan at 'c.json'" in ended.stderr
    assert {p.name for p in tmp_path.iterdir()} == {"a.json", "b.json"}


def test_a_plan_needs_none_of_the_packages_that_a_run_needs(tmp_path: Path):
    """As on a laptop on which only the framework is installed: each missing package is a warning, and named."""
    missing = ("torch", "transformers", "verl", "vllm", "ray", "tensordict", "safetensors", "math_verify")
    script = (
        f"import sys; sys.modules |= dict.fromkeys({missing}); sys.path.insert(0, {str(ROOT)!r})\n"
        "import run; sys.exit(run.main(sys.argv[1:]))"
    )
    line = ["rollout=vllm_async", "run.device=cuda"]
    for mode, code in (("plan", 0), ("run", 2)):
        command = [sys.executable, "-c", script, f"mode={mode}", *line]
        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert ended.returncode == code, ended.stderr
        told = ended.stdout if mode == "plan" else ended.stderr
        for part, package in (("rollout=vllm_async", "vllm"), ("trainer=torch", "torch"), ("advantage=verl", "verl")):
            assert f"{part} needs the package '{package}', which is not installed" in told.replace("\n    ", " ")
        assert ("warning: " in told) is (mode == "plan")
    assert list(tmp_path.iterdir()) == []


BROKEN = """
from __future__ import annotations
from dataclasses import dataclass
from pipeline.registry import backend
from pipeline.stage import Stage, setting

@dataclass(slots=True, kw_only=True)
class SieveConfig:
    pass

@backend("filter", "sieve")
class Sieve(Stage):
    def __init__(self, cfg: SieveConfig):
        pass

    def run(self, rollouts):
        return rollouts

@dataclass(slots=True, kw_only=True)
class OtherConfig:
    share: float = setting("half", doc="no number")

@backend("filter", "other")
class Other(Stage):
    def __init__(self, cfg: OtherConfig):
        pass
"""


def test_a_plug_in_that_cannot_be_read_is_told_with_its_place(tmp_path: Path):
    """A method that does not say what it takes, and a default that its own type refuses."""
    (tmp_path / "mine.py").write_text(BROKEN)
    (tmp_path / "conf" / "filter").mkdir(parents=True)
    (tmp_path / "conf" / "filter" / "sieve.yaml").write_text("defaults: [/schema/filter/sieve@_here_, _self_]\n")
    ended = run(
        tmp_path, "--config-dir", "conf", "plugins=[mine]", "+filter=sieve", "graph.forward.filter={rollouts: rollout}"
    )
    assert ended.code == 2
    assert "Traceback" not in ended.err
    assert "2 problems" in ended.err
    assert "plugins: OtherConfig, the settings of filter=other, cannot be read: Value 'half'" in ended.err
    assert "filter: TypeError: mine.Sieve.run: parameter 'rollouts' needs a record type" in ended.err
    assert f"it is defined at {tmp_path}/mine.py:16" in ended.err


def test_a_reader_may_stop_reading(tmp_path: Path):
    """`python run.py mode=plan | head -1`"""
    command = [sys.executable, str(ROOT / "run.py"), "mode=plan"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout
    process.stdout.close()
    assert process.stderr
    assert process.stderr.read() == b""
    process.wait(timeout=120)


@pytest.mark.parametrize("flags", [["--cfg", "job", "--resolve"], ["--info", "defaults"], ["--cfg", "all"]])
def test_hydra_can_show_every_shipped_configuration(flags: list[str], tmp_path: Path):
    """From any folder; bug bank: hydra-ecosystem/hydra issues 559 and 1786."""
    command = [sys.executable, str(ROOT / "run.py"), *flags]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert "rollout" in ended.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_plan_imports_nothing_heavy(tmp_path: Path):
    """Python itself tells what it imports, on standard error."""
    command = [sys.executable, "-X", "importtime", str(ROOT / "run.py"), "mode=plan"]
    told = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True).stderr
    imported = {
        line.rpartition("|")[2].strip().split(".")[0] for line in told.splitlines() if line.startswith("import time:")
    }

    assert {"hydra", "numpy", "stages", "pipeline"} <= imported
    assert imported.isdisjoint({"torch", "transformers", "verl", "vllm", "ray", "tensordict", "flashinfer"})
