"""Small models with random weights, saved as folders in Hugging Face format, and plain references to compute with.

Head size 32, which every engine can serve. The tokenizer is that of the checkout's own tiny model.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

TOKENIZER = Path(__file__).resolve().parent.parent / "data" / "tokenizer"
VOCABULARY = 259
END = 2
ENDS = (END, *range(100, 130))
"""End tokens of the random models: so many that a response of random tokens ends after about nine."""


def llama_config(**changed: Any) -> LlamaConfig:
    """Grouped-query attention (4 query heads on 2), untied output head, weights large enough to be sure of things."""
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "head_dim": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "initializer_range": 0.15,
        "bos_token_id": 1,
        "eos_token_id": END,
        "pad_token_id": 0,
    }
    return LlamaConfig(**(settings | changed))


def save_model(folder: Path, module: PreTrainedModel | None = None, *, seed: int = 0, **config: Any) -> Path:
    """A model folder with tokenizer; without a module, a random Llama of `llama_config(**config)`."""
    if module is None:
        torch.manual_seed(seed)
        module = LlamaForCausalLM(llama_config(**config))
    module.save_pretrained(folder)
    for file in TOKENIZER.iterdir():
        shutil.copy(file, folder)
    set_generation_config(folder)
    return folder


def save_classifier(folder: Path, kind: str = "llama", *, seed: int = 0, **config: Any) -> Path:
    """A reward model folder with random weights: `kind` llama (pools the last token that is not padding) or bert (the
    first). Its tokenizer is that of tests/tiny_tokenizers.py with whatever `write_tokenizer` makes beforehand."""
    from transformers import BertConfig, BertForSequenceClassification, LlamaForSequenceClassification

    from tests.tiny_tokenizers import EOS, PAD, SPECIAL, write_tokenizer

    size = {"vocab_size": len(SPECIAL) + 256, "pad_token_id": PAD, "num_labels": 1} | config
    torch.manual_seed(seed)
    if kind == "llama":
        module: Any = LlamaForSequenceClassification(llama_config(**{"eos_token_id": EOS} | size))
    else:
        shape = {"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 128}
        limits = {"max_position_embeddings": 128, "initializer_range": 0.15}
        module = BertForSequenceClassification(BertConfig(**(shape | limits | size)))
    module.save_pretrained(folder)
    if not (folder / "tokenizer.json").exists():
        write_tokenizer(folder)
    return folder


def set_generation_config(folder: Path, **values: Any) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(ENDS), **values}))


def load(folder: Path) -> Any:
    """The float32 reference, in eval mode."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def perturb(module: Any, seed: int, scale: float = 0.05) -> Any:
    """Other weights, tied ones still tied."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * scale)
    return module


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """float64, over the last axis."""
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def reference_log_probs(
    module: Any, prompt: Sequence[int] | np.ndarray, response: Sequence[int] | np.ndarray, temperature: float = 1.0
) -> np.ndarray:
    """float64 [T]: of the response tokens, by one forward over prompt and response without a cache."""
    ids = [*map(int, prompt), *map(int, response)]
    with torch.no_grad():
        logits = module(torch.tensor([ids])).logits[0].double().numpy()
    table = log_softmax(logits[len(prompt) - 1 : -1] / temperature)
    return table[np.arange(len(response)), np.asarray(response, np.int64)]


def reference_greedy(
    module: Any, prompt: Sequence[int] | np.ndarray, limit: int, ends: Sequence[int] = ENDS
) -> list[int]:
    """The likeliest token again and again, each by a forward over everything before it."""
    ids, made = [*map(int, prompt)], []
    while len(made) < limit and not (made and made[-1] in ends):
        with torch.no_grad():
            made.append(int(module(torch.tensor([ids + made])).logits[0, -1].argmax()))
    return made
