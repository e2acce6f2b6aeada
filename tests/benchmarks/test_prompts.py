"""The prompts that benchmarks read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from benchmarks import prompts


def test_rows_are_about_360_bytes_in_verls_layout(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    prompts.write(file, 5000)
    data = file.read_bytes()
    rows = [json.loads(line) for line in data.splitlines()]
    assert len(rows) == 5000
    assert 350 <= len(data) / 5000 <= 370
    assert [row["extra_info"]["index"] for row in rows] == list(range(5000))
    texts = [row["prompt"][0]["content"] for row in rows]
    assert len(set(texts)) == 5000
    assert all(row["reward_model"]["ground_truth"] and row["data_source"] for row in rows)
    assert 0.005 < sum(not text.isascii() for text in texts) / 5000 < 0.1


def test_equal_seeds_give_equal_files(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a", "b", "c")]
    for file, seed in zip(files, (0, 0, 1), strict=True):
        prompts.write(file, 100, seed)
    a, b, c = (file.read_bytes() for file in files)
    assert a == b
    assert a != c


@pytest.mark.parametrize("tokens", [5, 60, 256])
def test_texts_have_the_length_that_was_asked_for(root: Path, tokens: int) -> None:
    tokenizer = Tokenizer.from_file(str(root / "data/tokenizer/tokenizer.json"))
    pool = list(prompts.texts(50))
    found = prompts.of_length(tokenizer, pool, tokens, 50)
    assert all(len(tokenizer.encode(text, add_special_tokens=False).ids) == tokens for text in found)
    assert all(text.startswith(start[:5]) for text, start in zip(found, pool, strict=True))
