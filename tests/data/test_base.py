"""What the default job starts from: prompts that do not leak, and a base that picks among four skills."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

TARGETS = {
    "copy": lambda d: d,
    "reverse": lambda d: d[::-1],
    "sort": lambda d: "".join(sorted(d)),
    "sort_down": lambda d: "".join(sorted(d, reverse=True)),
}


def rows(root: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (root / "data" / "digits" / name).read_text().splitlines()]


def test_no_held_out_prompt_is_in_the_training_file(root: Path) -> None:
    train, held_out = rows(root, "train.jsonl"), rows(root, "heldout.jsonl")
    assert len(held_out) >= 200
    prompts = [r["prompt"] for r in train] + [r["prompt"] for r in held_out]
    assert len(set(prompts)) == len(prompts)
    for row in train + held_out:
        digits = row["prompt"].rstrip("=")
        assert row["answer"] == {name: f(digits) for name, f in TARGETS.items()}


def test_the_checkpoint_is_small_and_safe(root: Path) -> None:
    files = [f for f in (root / "data" / "base").iterdir() if f.suffix not in {".json", ".jinja"}]
    assert [f.name for f in files] == ["model.safetensors"]
    assert files[0].stat().st_size < 2**20


@pytest.fixture(scope="module")
def base(root: Path) -> Any:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = str(root / "data" / "base")
    return AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def held_out(root: Path, base: Any) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Prompt ids [B, P], and the ids of each target's answers with the end token [B, 5]."""
    _, tokenizer = base
    data = rows(root, "heldout.jsonl")
    prompts = np.array([tokenizer(r["prompt"])["input_ids"] for r in data])
    end = tokenizer.eos_token_id
    return prompts, {t: np.array([[*tokenizer(r["answer"][t])["input_ids"], end] for r in data]) for t in TARGETS}


@pytest.mark.parametrize("target", TARGETS)
def test_a_skill_is_there_but_not_preferred(base: Any, held_out: Any, target: str) -> None:
    """Greedy accuracy at most 0.40, and pass@8 at least 0.9: p(answer) by teacher forcing, 1 - (1 - p)^8 exactly."""
    import torch

    model, _ = base
    prompts, answers = held_out[0], held_out[1][target]
    ids = torch.from_numpy(np.concatenate([prompts, answers], 1))
    with torch.no_grad():
        logp = torch.log_softmax(model(ids).logits[:, prompts.shape[1] - 1 : -1].double(), -1)
        greedy = torch.from_numpy(prompts)
        for _ in range(answers.shape[1]):
            greedy = torch.cat([greedy, model(greedy).logits[:, -1:].argmax(-1)], 1)
    p = np.exp(logp.gather(-1, torch.from_numpy(answers)[..., None])[..., 0].sum(-1).numpy())
    exact = (greedy[:, prompts.shape[1] :].numpy() == answers).all(1)
    assert exact.mean() <= 0.40
    assert (1 - (1 - p) ** 8).mean() >= 0.90
