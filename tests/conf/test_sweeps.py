"""What is shipped can be swept: every recipe of `conf/sweep`, and every pipeline with `-m` (bug bank 129)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pipeline import plan
from pipeline.config import parse
from pipeline.sweep.points import expand

ROOT = Path(__file__).resolve().parents[2]


def names(group: str) -> list[str]:
    return sorted(p.stem for p in (ROOT / "conf" / group).glob("*.yaml"))


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("recipe", names("sweep"))
def test_every_recipe_can_be_planned_with_every_pipeline(recipe: str) -> None:
    lines, problems = expand(parse(["-m", f"sweep={recipe}", f"pipeline={','.join(names('pipeline'))}"]))
    assert not problems
    assert {plan.make(line).root.name for line in lines} >= set(names("pipeline"))


def test_a_sweep_over_pipelines_can_be_planned() -> None:
    lines, problems = expand(parse(["-m", f"pipeline={','.join(names('pipeline'))}", "seed=0,1"]))
    assert not problems
    assert [plan.make(line).root.name for line in lines] == [name for name in names("pipeline") for _ in "01"]


def test_hydra_can_show_what_it_composes() -> None:
    command = [sys.executable, str(ROOT / "run.py"), "--cfg", "job", "--resolve", "sweep=optuna"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert shown.returncode == 0, shown.stderr
    assert "\nseed: 0\n" in shown.stdout
