"""Every pipeline with every recipe, and every backend in its place, can be planned."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from pipeline import plan, registry
from pipeline.config import parse
from pipeline.errors import PlanError

ROOT = Path(__file__).resolve().parents[2]
CONF = ROOT / "conf"


def names(group: str) -> list[str]:
    return sorted(p.stem for p in (CONF / group).glob("*.yaml"))


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What recipes leave to the command line: a chat model with room, and a file of questions and answers."""
    folder = tmp_path_factory.mktemp("files")
    model = Path(shutil.copytree(ROOT / "data" / "base", folder / "model"))
    for name, changed in {
        "config.json": {"max_position_embeddings": 2048},
        "tokenizer_config.json": {"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"},
    }.items():
        content = json.loads((model / name).read_text())
        (model / name).write_text(json.dumps(content | changed))
    row = {"question": "1 + 1?", "answer": "It is 2\n#### 2"}
    (folder / "train.jsonl").write_text(f"{json.dumps(row)}\n" * 16)
    return [f"model.path={model}", f"loader.path={folder / 'train.jsonl'}"]


@pytest.mark.parametrize("pipeline", names("pipeline"))
@pytest.mark.parametrize("experiment", [None, *names("experiment")])
def test_every_pipeline_with_every_recipe(pipeline: str, experiment: str | None, files: list[str]) -> None:
    chosen = [f"experiment={experiment}", *files] if experiment else []
    made = plan.make(parse(["mode=plan", f"pipeline={pipeline}", *chosen]))
    assert made.root.name == (experiment or pipeline)
    assert next(iter(made.graph.forward)) == "loader"
    assert made.graph.evaluate


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
