"""What is given on a command line is what the run gets, whatever characters are in it and whatever a recipe says."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from pipeline import plan, quoting
from pipeline.config import parse
from pipeline.plan import Plan
from tests.conf.test_plans import ROOT, commands, files

__all__ = ["files"]


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def planned(*overrides: str) -> Plan:
    return plan.make(parse(["mode=plan", *overrides]))


def value(made: Plan, path: str) -> Any:
    """The value at a config path of the resolved configuration."""
    at: Any = made.configured.plain()
    for key in path.split("."):
        at = at[key]
    return at


PATTERNS = ["a=b", "a,b", "a{1,2}", "it's", '"', "a\nb", "~", "#", r"\d+", "$", "%@*:", "</s>", "on", "no", "null", "é"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_any_text_can_be_given_to_a_setting(pattern: str) -> None:
    """Typed as the messages show; bug bank: hydra-ecosystem/hydra issues 1577 and 962."""
    word = quoting.quoted("reward.pattern", pattern)
    [typed] = subprocess.run(["bash", "-c", f"printf %s {word}"], capture_output=True, text=True).stdout.split("\0")
    made = planned("reward.weights.regex=1", typed)
    assert value(made, "reward.pattern") == pattern


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("loader.shuffle=on", True),
        ("loader.shuffle=no", False),
        ("loader.shuffle=Yes", True),
        ("name=on", "on"),
        ("name=1E234", "1E234"),
        ("name=007", "007"),
        ("name=true", "true"),
        ("trainer.lr=1e-6", 1e-6),
        ('trainer.lr="1e-6"', 1e-6),
        ("rollout.temperature=1", 1.0),
        ("++rollout.n=4", 4),
        ("rollout={n: 4}", 4),
        ("+rollout.n=4", None),
    ],
)
def test_the_right_value(override: str, expected: Any) -> None:
    """Bug bank: speechbrain/HyperPyYAML issue 12, hydra-ecosystem/hydra issues 2599 and 2227."""
    path = override.lstrip("+").partition("=")[0]
    if expected is None:
        with pytest.raises(plan.PlanError, match="is there already"):
            planned(override)
        return
    made = planned("trainer.mini_batch=0", override)
    assert value(made, "rollout.n" if path == "rollout" else path) == expected


def test_items_of_a_list() -> None:
    """Bug bank: hydra-ecosystem/hydra issue 403."""
    given = "advantage.reward_weights=[1,2]"
    assert value(planned(given), "advantage.reward_weights") == [1, 2]
    assert value(planned(given, "advantage.reward_weights.1=.5"), "advantage.reward_weights") == [1, 0.5]
    assert value(planned(given, "advantage.reward_weights=[3]"), "advantage.reward_weights") == [3]


@pytest.mark.parametrize("first", [True, False])
def test_the_command_line_wins_over_a_recipe(first: bool, files: dict[str, str]) -> None:
    """Wherever it stands."""
    mine = ["rollout.n=2", "name=mine", "reward.weights.exact=0.5"]
    recipe = commands("gsm8k", files)[0]
    made = planned(*([*mine, *recipe] if first else [*recipe, *mine]))
    assert [value(made, o.partition("=")[0]) for o in mine] == [2, "mine", 0.5]
    assert value(made, "reward.weights.maths_verify") == 1, "what the recipe says of the rest stays"


def test_an_edge_is_changed_without_a_plus() -> None:
    """Nodes and edges are named freely; the graph's own check finds what is misspelt."""
    made = planned("graph.learn.critic.values=critic", "graph.evaluate=[eval_loader,tokenizer_cache,rollout,reward]")
    assert made.graph.learn["critic"]["values"] == "critic"


def test_the_folder_of_a_run_has_a_plain_name() -> None:
    """So that it can be given back as an override; bug bank: hydra-ecosystem/hydra issue 1832."""
    folder = planned("name=my-run_2.1", "loader.path='data/digits/train.jsonl'").configured.run_dir
    assert folder.name.endswith("-my-run_2.1")
    assert quoting.parse([f"hydra.run.dir={folder}"])[1] == []
    assert Path(*folder.parts[:1]) == Path("outputs")
