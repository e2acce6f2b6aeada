"""data/verl: rows of data/digits in the columns that verl's dataset reads, and a reward file that verl can call."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

SPLITS = {"train": ("train.jsonl", 1024), "test": ("heldout.jsonl", 256)}


@pytest.mark.parametrize("split", SPLITS)
def test_rows_are_those_of_the_digits(root: Path, split: str) -> None:
    file, count = SPLITS[split]
    table = pq.read_table(root / "data" / "verl" / f"{split}.parquet")
    digits = [json.loads(line) for line in (root / "data" / "digits" / file).read_text().splitlines()[:count]]

    assert table.column_names == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
    assert table.num_rows == count
    for index, (row, own) in enumerate(zip(table.to_pylist(), digits, strict=True)):
        assert row["prompt"] == [{"role": "user", "content": own["prompt"]}]
        assert row["reward_model"] == {"style": "rule", "ground_truth": "".join(sorted(own["prompt"].rstrip("=")))}
        assert row["extra_info"] == {"split": split, "index": index}


@pytest.mark.parametrize(
    ("given", "score", "acc"),
    [("1337", 1.0, 1), (" 1337\n", 1.0, 1), ("1733", 0.1, 0), ("13378", 0.16, 0), ("", 0.0, 0), ("7331", 0.1, 0)],
)
def test_the_reward_is_one_or_a_share_of_a_fifth(root: Path, given: str, score: float, acc: int) -> None:
    function: Any = runpy.run_path(str(root / "data" / "verl" / "sort_digits.py"))["compute_score"]
    made = function(data_source="x", solution_str=given, ground_truth="1337", extra_info={"index": 0})
    assert (made["score"], made["acc"]) == (pytest.approx(score), acc)


def test_a_chat_is_the_tokens_of_its_text(root: Path) -> None:
    """So that the base model takes the same prompts in verl's form."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(root / "data" / "base")
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1337="}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "1337="
