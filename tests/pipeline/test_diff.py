"""Two plans or runs, side by side: settings, versions, final metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import run
from pipeline.config import PlanSettings
from pipeline.diff import compare, render
from pipeline.errors import PlanError
from tests.pipeline.conftest import PLUGINS, TOY, toy_plan


def write(
    folder: Path, *overrides: str, versions: dict[str, str] | None = None, metrics: list[dict[str, Any]] | None = None
) -> str:
    """The plan and metrics that a run of the toy pipeline with these overrides leaves."""
    folder.mkdir()
    plan = toy_plan(*overrides).plain()
    (folder / "plan.json").write_text(json.dumps(plan | {"versions": plan["versions"] | (versions or {})}))
    if metrics is not None:
        (folder / "metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in metrics))
    return str(folder)


def difference(a: str, b: str) -> Any:
    return compare(PlanSettings(a=a, b=b))


def test_nothing_differs(tmp_path: Path) -> None:
    metrics = [{"step": 0, "eval/accuracy": 0.5}, {"step": 1, "reward/mean": 0.25, "time/step_s": 1.0}]
    a = write(tmp_path / "a", "seed=1", metrics=metrics)
    slower = metrics[1] | {"time/step_s": 2.0, "loader/wait_s": 0.5, "rollout/tokens_per_s": 3.0, "memory/peak_gb": 1.0}
    b = write(tmp_path / "b", "seed=1", "mode=plan", metrics=[metrics[0], slower])
    found = difference(a, b)
    assert not found
    assert found.speed["time/step_s"] == (1.0, 2.0)
    assert set(found.speed) == {"time/step_s", "loader/wait_s", "rollout/tokens_per_s", "memory/peak_gb"}
    text = render(found, a, b)
    assert "no difference in settings, versions and final metrics" in text
    assert "  time/step_s: 1 -> 2  (+1)" in text


def test_what_differs_is_named(tmp_path: Path) -> None:
    a = write(
        tmp_path / "a",
        "learner.lr=0.5",
        versions={"torch": "2.13.0", "vllm": "0.27.1"},
        metrics=[{"step": 0, "eval/accuracy": 0.25}, {"step": 3, "reward/mean": 0.5, "reward/unscored": 0.0}],
    )
    b = write(
        tmp_path / "b",
        "learner.lr=0.25",
        "double=streaming",
        "graph.learn.learner.judged=scorer",
        "~graph.forward.judge",
        "~judge",
        versions={"torch": "2.13.1"},
        metrics=[{"step": 0, "eval/accuracy": 0.25}, {"step": 3, "reward/mean": 0.75, "reward/unscored": 0.0}],
    )
    found = difference(a, b)
    assert found
    assert found.settings["learner.lr"] == (0.5, 0.25)
    assert found.settings["double"] == ("double=whole", "double=streaming")
    assert found.settings["double.most"] == ("(absent)", 3)
    assert found.settings["graph.learn.learner.judged"] == ("judge", "scorer")
    assert found.settings["judge"] == ("judge=group", "(absent)")
    assert found.versions == {"torch": ("2.13.0", "2.13.1"), "vllm": ("0.27.1", "(absent)")}
    assert found.metrics == {"reward/mean": (0.5, 0.75)}
    text = render(found, a, b)
    assert '  double: "double=whole" -> "double=streaming"' in text
    assert "  reward/mean: 0.5 -> 0.75  (+0.25)" in text
    assert '  vllm: "0.27.1" -> (absent)' in text
    assert found.plain()["metrics"] == {"reward/mean": {"a": 0.5, "b": 0.75}}


def test_a_plan_has_no_metrics_to_compare(tmp_path: Path) -> None:
    a = write(tmp_path / "a", metrics=[{"step": 1, "reward/mean": 0.5}])
    b = write(tmp_path / "b")
    assert not difference(a, f"{b}/plan.json")


def test_the_last_line_of_a_killed_run_may_be_cut(tmp_path: Path) -> None:
    a = write(tmp_path / "a", metrics=[{"step": 1, "reward/mean": 0.5}])
    b = write(tmp_path / "b", metrics=[{"step": 1, "reward/mean": 0.5}])
    with open(f"{b}/metrics.jsonl", "a") as f:
        f.write('{"step": 2, "rewa')
    assert not difference(a, b)


def test_what_is_no_plan(tmp_path: Path) -> None:
    write(tmp_path / "a")
    (tmp_path / "b.json").write_text("[1]")
    for a, b, what in (
        ("", "", "must be given"),
        (f"{tmp_path}/none", f"{tmp_path}/gone", "there is no plan at"),
        (f"{tmp_path}/b.json", f"{tmp_path}/b.json", "is no plan"),
    ):
        with pytest.raises(PlanError) as caught:
            difference(a, b)
        assert [p.where for p in caught.value.problems] == ["plan.a", "plan.b"]
        assert all(what in p.what and "plan.format=json" in p.hint for p in caught.value.problems)
    with pytest.raises(PlanError) as caught:
        difference(str(tmp_path), f"{tmp_path}/a")
    assert f"runs below it: {tmp_path}/a" in caught.value.problems[0].hint


def test_the_exit_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write(tmp_path / "a"), write(tmp_path / "b", "seed=3")
    for other, status in ((a, 0), (b, 1)):
        assert run.main([*TOY, PLUGINS, "mode=diff", f"plan.a={a}", f"plan.b={other}"]) == status
    assert "  seed: 0 -> 3  (+3)" in capsys.readouterr().out
    assert run.main([*TOY, PLUGINS, "mode=diff", f"plan.a={a}", f"plan.b={b}", "plan.format=json"]) == 1
    assert json.loads(capsys.readouterr().out)["settings"] == {"seed": {"a": 0, "b": 3}}


def test_what_only_a_comparison_reads_starts_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "run"
    assert run.main([*TOY, PLUGINS, "plan.a=x", "plan.b=y", f"hydra.run.dir={place}"]) == 2
    told = capsys.readouterr().err
    assert "plan.a: only mode=diff reads it, and this is none\n    add mode=diff, or leave it out" in told
    assert "plan.b: only mode=diff reads it" in told
    assert not place.exists()
