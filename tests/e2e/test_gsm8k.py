"""The recipe for a chat model on GSM8K, on a model folder and a data file as the recipe expects them, but tiny.

The model is random: what is proven is that the chat template, the answers after `####` and the maths reward meet.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.commands import Ended, lines, run
from tests.tiny_tokenizers import write_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

VOCABULARY = 262


def write_model(folder: Path) -> Path:
    """A Llama of one layer, with a byte tokenizer that has a chat template."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        head_dim=32,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_hidden_layers=1,
        intermediate_size=64,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return write_tokenizer(folder)


def write_data(file: Path) -> Path:
    rows = [
        {
            "question": f"Ann has {i} apples and buys {i + 1}. How many?",
            "answer": f"{i}+{i + 1}={2 * i + 1}\n#### {2 * i + 1}",
        }
        for i in range(20)
    ]
    file.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return file


def recipe(folder: Path) -> Ended:
    return run(
        folder,
        "experiment=gsm8k",
        f"model.path={write_model(folder / 'model')}",
        f"loader.path={write_data(folder / 'train.jsonl')}",
        f"hydra.run.dir={folder}/run",
        "run.steps=1",
        "loader.batch_size=2",
        "rollout.n=2",
        "rollout.max_new_tokens=8",
        "eval_loader.limit=4",
    )


RUNS = {"recipe": recipe}


def test_the_recipe_runs_a_step(runs):
    ended = runs("recipe")
    plan = json.loads((ended.folder / "run" / "plan.json").read_text())

    assert (ended.code, ended.left) == (0, {}), ended.err[-3000:]
    assert "Traceback" not in ended.err
    assert plan["facts"]["chat_template"] is True
    assert "critic" not in plan["nodes"]
    assert [s["step"] for s in lines(ended.folder / "run" / "metrics.jsonl")] == [0, 1]


def test_questions_become_chats_and_answers_numbers(runs):
    rows = lines(runs("recipe").folder / "run" / "rollouts.jsonl")
    written = {
        r["question"]: r["answer"].rpartition("####")[2].strip() for r in lines(runs("recipe").folder / "train.jsonl")
    }

    assert len(rows) == 4 + 2 * 2 + 4
    for r in rows:
        question = r["prompt"] if isinstance(r["prompt"], str) else r["prompt"][-1]["content"]
        assert r["ground_truth"] == written[question]
        assert r["reward_parts"].keys() == {"maths_verify"}
        assert r["status"] == "ok"
