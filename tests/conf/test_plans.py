"""Every pipeline with every recipe, and every backend in its place, can be planned."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Iterator
from functools import reduce
from itertools import takewhile
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline import plan, registry
from pipeline.config import load, parse
from pipeline.errors import PlanError

ROOT = Path(__file__).resolve().parents[2]
CONF = ROOT / "conf"


def names(group: str) -> list[str]:
    return sorted(p.stem for p in (CONF / group).glob("*.yaml"))


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What recipes leave to the command line: a chat model with room, and a file of questions and answers."""
    folder = tmp_path_factory.mktemp("files")
    model = Path(shutil.copytree(ROOT / "data" / "base", folder / "model"))
    (model / "chat_template.jinja").unlink()
    for name, changed in {
        "config.json": {"max_position_embeddings": 2048},
        "tokenizer_config.json": {"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"},
    }.items():
        content = json.loads((model / name).read_text())
        (model / name).write_text(json.dumps(content | changed))
    row = {"question": "1 + 1?", "answer": "It is 2\n#### 2"}
    (folder / "train.jsonl").write_text(f"{json.dumps(row)}\n" * 16)
    return {
        "DIR": str(model),
        "FILE": str(folder / "train.jsonl"),
        "REWARD.py": str(ROOT / "data/verl/sort_digits.py"),
    } | {f"{name.upper()}.parquet": str(ROOT / f"data/verl/{name}.parquet") for name in ("train", "test")}


def commands(recipe: str, files: dict[str, str]) -> list[list[str]]:
    """The command lines in the comment at the top of a recipe, without `python run.py`, with files for their names."""
    comment = "".join(takewhile(lambda line: line.startswith("#"), (CONF / "experiment" / f"{recipe}.yaml").open()))
    lines = re.findall(r"^#   python run\.py (.*)$", comment, re.M)
    return [[f"{key}={files.get(value, value)}" for key, _, value in map(_parts, line.split())] for line in lines]


def _parts(override: str) -> tuple[str, str, str]:
    return override.partition("=")


@pytest.mark.parametrize("pipeline", names("pipeline"))
@pytest.mark.parametrize("experiment", [None, *names("experiment")])
def test_every_pipeline_with_every_recipe(pipeline: str, experiment: str | None, files: dict[str, str]) -> None:
    chosen = commands(experiment, files)[0] if experiment else []
    made = plan.make(parse(["mode=plan", f"pipeline={pipeline}", *chosen]))
    assert made.root.name == (experiment or pipeline)
    assert next(iter(made.graph.forward)) == "loader"
    assert made.graph.evaluate


@pytest.mark.parametrize("experiment", names("experiment"))
def test_a_recipe_begins_with_what_it_shows_and_commands_that_plan(experiment: str, files: dict[str, str]) -> None:
    lines = (CONF / "experiment" / f"{experiment}.yaml").read_text().splitlines()
    assert lines[0] == "# @package _global_"
    assert re.match(r"# [A-Z].{20}", lines[1]), "it does not say what it shows"
    first, *_ = lines = commands(experiment, files)
    assert first[0] == f"experiment={experiment}"
    for line in lines:
        assert any(experiment in part for part in line)
        made = plan.make(parse(["mode=plan", *(part for part in line if not part.startswith("mode="))]))
        assert made.root.name == (experiment if line[0].startswith("experiment=") else "ppo")


def leaves(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where each value of a file stands; of the defaults list each option but `_self_`."""
    if isinstance(node, dict):
        for key, inner in node.items():
            yield from leaves(inner, (*path, key))
    elif path == ("defaults",):
        yield from (("defaults", i) for i, option in enumerate(node) if option != "_self_")
    else:
        yield path


@pytest.mark.parametrize("experiment", names("experiment"))
def test_a_recipe_restates_nothing(experiment: str, files: dict[str, str], tmp_path: Path) -> None:
    """Without any one of its values the configuration is another one."""
    content = yaml.safe_load((CONF / "experiment" / f"{experiment}.yaml").read_text())
    line = commands(experiment, files)[0]
    (tmp_path / "experiment").mkdir()
    whole = composed(line)
    for path in leaves(content):
        changed = copy.deepcopy(content)
        at = reduce(getitem, path[:-1], changed)
        del at[path[-1]]
        less = "less-" + "-".join(map(str, path))
        (tmp_path / "experiment" / f"{less}.yaml").write_text(f"# @package _global_\n{yaml.safe_dump(changed)}")
        assert composed(["--config-dir", str(tmp_path), f"experiment={less}", *line[1:]]) != whole, (
            f"{path} is inherited anyway"
        )


def composed(line: list[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """All settings and the backend of each part, valid or not."""
    configured, _ = load(parse([*line, "mode=plan"]))
    return configured.plain(), {key: str(entry) for key, entry in configured.entries.items()}


def test_recipes_go_together(files: dict[str, str]) -> None:
    """Parts on a task: the later one wins where both say something, and the command line over all."""
    made = plan.make(parse(["mode=plan", "experiment=[gsm8k,fast]", *commands("gsm8k", files)[0][1:], "run.steps=7"]))
    backends = {n: s.cls.backend for n, s in made.nodes.items()}
    assert (backends["rollout"], backends["tokenizer_cache"]) == ("vllm_async", "layered")
    assert (made.root.name, made.root.run.steps, made.nodes["trainer"].config.lr) == ("fast", 7, 1e-6)
    assert "critic" not in backends


def test_fast_and_baseline_differ_in_parts_alone() -> None:
    """So that one against the other measures the parts: no size, length or task of one is another than the other's."""
    (fast, fast_parts), (plain, plain_parts) = (composed([f"experiment={name}"]) for name in ("fast", "baseline"))
    for key in {*fast, *plain} - {"name"}:
        ours, theirs = fast[key], plain[key]
        if isinstance(ours, dict):  # what only one of two backends has is its own
            ours, theirs = ({k: v for k, v in a.items() if k in b} for a, b in ((ours, theirs), (theirs, ours)))
        assert ours == theirs, key
    other = {key for key in fast_parts if fast_parts[key] != plain_parts[key]}
    assert other == {"loader", "eval_loader", "tokenizer_cache", "rollout", "sampler", "runner"}


registry.discover("pipeline.runner")
registry.discover("stages")
CHOICES = [str(e) for e in registry.entries() if (CONF / e.role / f"{e.name}.yaml").exists()]


@pytest.mark.parametrize("choice", CHOICES)
def test_every_backend_has_a_place(choice: str) -> None:
    """Alone on the command line. Where it needs a partner or a file, each problem says what to do."""
    role = choice.partition("=")[0]
    try:
        made = plan.make(parse(["mode=plan", choice]))
    except PlanError as e:
        errors = [p for p in e.problems if p.level == "error"]
    else:
        backends = {str(s) for top in (*made.nodes.values(), made.runner, made.tracker) for s in top.walk()}
        assert choice in backends
        errors = []
    assert all(p.hint and (choice in p.what or p.where.partition(".")[0] == role) for p in errors), errors
