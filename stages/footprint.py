"""Bytes that a decoder-only transformer needs, from its `config.json` and the number of its weights.

Weights, gradients and Adam's moments are exact. Keys and values are exact for full attention. Activations are of the
Llama architecture (RMS norms, rotary positions, gated feed-forward: three matrices), which has more of them than its
predecessors; mixtures of experts are not told apart. What PyTorch, CUDA and the allocator need for themselves is not in
here: a process that has imported torch holds about half a gigabyte more of the host's memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stages.model import text_config

if TYPE_CHECKING:
    from stages.model import Model

FLOAT32, BFLOAT16 = 4, 2


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model. `kv` is the width of all key heads together; `head` parameters are of an output matrix that
    is not tied to the embeddings."""

    parameters: int
    head: int
    layers: int
    hidden: int
    heads: int
    kv: int
    ffn: int
    vocab: int
    eager: bool
    """Attention matrices are made in full, not block by block."""


def shape_of(model: Model) -> Shape | None:
    """None if the folder does not say all of it; that it is no model is told elsewhere."""
    cfg, parameters = text_config(model.config()), model.parameters()
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
    layers, hidden, heads, ffn, vocab = sizes = [_count(cfg.get(name)) for name in names]
    if not parameters or not all(sizes):
        return None
    kv_heads, size = cfg.get("num_key_value_heads") or heads, cfg.get("head_dim") or hidden // heads
    head = 0 if model.config().get("tie_word_embeddings", cfg.get("tie_word_embeddings", True)) else vocab * hidden
    return Shape(parameters, head, layers, hidden, heads, kv_heads * size, ffn, vocab, model.attention == "eager")


def _count(value: Any) -> int:
    """0 for what is no number above 0."""
    return value if isinstance(value, int) and value > 0 else 0


def itemsize(model: Model) -> int:
    """Bytes of a weight in the model's dtype."""
    return BFLOAT16 if model.dtype_name == "bfloat16" else FLOAT32


def adamw(parameters: int) -> dict[str, int]:
    """Float32 weights, their gradients, and AdamW's two moments: 4, 4 and 8 bytes a parameter."""
    return {
        "weights": FLOAT32 * parameters,
        "gradients": FLOAT32 * parameters,
        "optimizer": 2 * FLOAT32 * parameters,
    }


def kept_for_backward(s: Shape, tokens: int, row: int, *, bfloat16: bool) -> int:
    """What autograd keeps of `tokens` tokens in rows of `row`, up to the last layer's output.

    A token and layer in float32, h hidden, k key width, f feed-forward width: two norms (input, normalised, output)
    6h, queries 1h, keys and values 2k, the attention's output before and after it is laid out anew 2h, the gated
    feed-forward 4f: 4 (9h + 2k + 4f) bytes. Under bfloat16 autocast the norms stay in float32 and what the matrices
    give and take is bfloat16: 34h + 4k + 8f bytes, which is about what Korthikanti et al. 2022 (arXiv:2205.05198,
    equation 2) count. Eager attention also keeps each head's matrix of a row: 4 bytes a pair of tokens, 6 under
    autocast.
    """
    h, k, f = s.hidden, s.kv, s.ffn
    a_token = 34 * h + 4 * k + 8 * f if bfloat16 else 4 * (9 * h + 2 * k + 4 * f)
    attention = s.heads * row * (6 if bfloat16 else 4) if s.eager else 0
    return s.layers * tokens * (a_token + attention)


def logits(s: Shape, tokens: int, *, bfloat16: bool) -> int:
    """Of the tokens that are scored, in float32: the logits, and in the backward pass their softmax and gradient."""
    return tokens * s.vocab * (3 * FLOAT32 + (BFLOAT16 if bfloat16 else 0))


def keys_and_values(s: Shape, tokens: int, size: int) -> int:
    """Of `tokens` tokens: one key and one value a layer, of `size` bytes an element."""
    return 2 * s.layers * s.kv * tokens * size


def inference(s: Shape, tokens: int, size: int) -> int:
    """What a forward pass without gradients over `tokens` tokens holds at the same time: of one layer the stream, its
    norm, queries, keys, values and the attention's output, and the feed-forward's three: (4h + 2k + 3f) a token."""
    return tokens * size * (4 * s.hidden + 2 * s.kv + 3 * s.ffn)
