"""A text setting holds what was written, in a file or on the command line, whatever YAML or Hydra makes of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pipeline import plan
from pipeline.config import parse
from tests.pipeline.conftest import PLUGINS, TOY, toy_plan

WORDS = [
    "1E234",
    "1e-6",
    "007",
    "1_000",
    "true",
    "Yes",
    "no",
    "on",
    "off",
    "0x10",
    ".5",
    "2024-01-01",
    "+3",
    "nan",
    "-inf",
]


@pytest.mark.parametrize("word", WORDS)
def test_on_the_command_line(word: str) -> None:
    assert toy_plan(f"source.path={word}").nodes["source"].config.path == word


@pytest.mark.parametrize("word", WORDS)
def test_in_a_file(word: str, tmp_path: Path) -> None:
    """In a pipeline's file, where a value is quoted or not, and in an option's."""
    shutil.copytree(TOY[1], tmp_path / "conf")
    toy, option = tmp_path / "conf" / "pipeline" / "toy.yaml", tmp_path / "conf" / "source" / "counting.yaml"
    toy.write_text(f'{toy.read_text()}  path: {word}\nsource: {{path: "{word}"}}\n')
    option.write_text(f"{option.read_text()}note: {word}\n")
    made = plan.make(parse(["--config-dir", str(tmp_path / "conf"), "pipeline=toy", PLUGINS]))
    assert made.nodes["eval_source"].config.path == word
    assert made.nodes["source"].config.path == word
    assert made.nodes["source"].config.note == word


def test_a_number_stays_a_number() -> None:
    """However it is spelt; bug bank: speechbrain/HyperPyYAML issue 12."""
    for text in ("1e-6", '"1e-6"', "0.000001", "1E-6"):
        assert toy_plan(f"learner.lr={text}").nodes["learner"].config.lr == 1e-6


def test_the_last_of_several_overrides_counts() -> None:
    made = toy_plan("source.path=007", "source.path=x", "eval_source.path=x", "eval_source.path=007")
    assert made.nodes["source"].config.path == "x"
    assert made.nodes["eval_source"].config.path == "007"
    warned = {p.where: p for p in made.problems}
    assert warned["source.path"].what == "is given 2 times: source.path=007, source.path=x"
    assert warned["source.path"].level == "warning"


def test_words_for_a_truth_value() -> None:
    for word, meant in {"on": True, "no": False, "yes": True, "off": False, "true": True}.items():
        assert toy_plan(f"tracker.break_at_start={word}").tracker.config.break_at_start is meant
