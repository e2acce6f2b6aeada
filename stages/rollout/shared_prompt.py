"""Keys and values of prompts that are stored once, however many samples a prompt has, and attention over them.

A decode step has one query a row. Its keys lie in two places: the prompt's, shared by all rows of that prompt
([G, H, P, D], G distinct prompts), and those of the row's own response ([R, H, T, D]). The queries of the rows of
one prompt are put side by side, so the shared part is one matrix product a prompt and head; the scores of both
parts go through one softmax. The idea is that of Hydragen (Juravsky et al. 2024, arXiv:2402.05099).

H is the number of key-value heads; each serves `rep` query heads (grouped-query attention). Prompts of different
length are padded at the right, so a key's index is its position.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from stages.device import Parcel, send

if TYPE_CHECKING:
    import torch

ATTENTION = "shared_prompt"
_REFUSED = "decoding with a shared prompt cannot do that, choose another rollout"
_FIRST_ROOM = 16  # response tokens that a cache has room for at first; doubled when they are used up


class PromptCache:
    """`keys`, `values`: a tensor [G, H, P, D] a layer. `lengths` int64 [G], on the host. `hidden`: bool
    [G, 1, 1, P], the padding, or None where all prompts have the same length."""

    def __init__(self, keys: list[torch.Tensor], values: list[torch.Tensor], lengths: np.ndarray):
        self.keys, self.values, self.lengths = keys, values, lengths
        self.hidden: torch.Tensor | None = None
        if np.any(lengths != keys[0].shape[2]):
            padding = np.arange(keys[0].shape[2]) >= lengths[:, None]
            self.hidden = send(keys[0].device, hidden=padding[:, None, None])["hidden"]

    def __len__(self) -> int:
        return len(self.lengths)

    def select(self, prompts: np.ndarray) -> PromptCache:
        import torch

        index = torch.from_numpy(prompts).to(self.keys[0].device)
        return PromptCache([k[index] for k in self.keys], [v[index] for v in self.values], self.lengths[prompts])


class DecodeCache:
    """What the rows of a decoding batch look back on; takes the place of a transformers cache in decode steps.

    `prompt_of_row` int64 [R]; `made`: response tokens of each row that are in the cache; `limit`: the most that
    will be.
    """

    def __init__(self, prompts: PromptCache, prompt_of_row: np.ndarray, limit: int):
        self.limit, self.made = limit, 0
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self._arrange(prompts, prompt_of_row)

    def _arrange(self, prompts: PromptCache, prompt_of_row: np.ndarray) -> None:
        """Give each row a slot: `width` slots a prompt, as many as the prompt with most rows needs."""
        import torch

        used, numbers = np.unique(prompt_of_row, return_inverse=True)
        if 2 * len(used) <= len(prompts):  # else prompts without rows stay: dropping them copies the others
            prompts, prompt_of_row = prompts.select(used), numbers
        self.prompts, self.prompt_of_row = prompts, prompt_of_row
        counts = np.bincount(prompt_of_row, minlength=len(prompts))
        order = np.argsort(prompt_of_row, kind="stable")
        place = np.empty_like(prompt_of_row)
        place[order] = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
        self.width = int(counts.max())
        slot = prompt_of_row * self.width + place
        self.slots = len(prompts) * self.width
        self.device = prompts.keys[0].device
        in_order = len(slot) == self.slots and np.array_equal(slot, np.arange(self.slots))
        self.slot = None if in_order else torch.from_numpy(slot).to(self.device)
        self.length_of_row = torch.from_numpy(prompts.lengths[prompt_of_row]).to(self.device)

    def positions(self) -> torch.Tensor:
        """int64 [R, 1]: the position of the token that is fed next."""
        return (self.length_of_row + self.made)[:, None]

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by each layer with [R, H, 1, D]; gives back the row's own keys and values [R, H, made + 1, D].
        `made` rises when the step is over."""
        if layer_idx == len(self.keys):
            room = min(_FIRST_ROOM, self.limit)
            self.keys.append(_with_room(key[:, :, :0], room))
            self.values.append(_with_room(value[:, :, :0], room))
        elif self.made == self.keys[layer_idx].shape[2]:
            room = min(2 * self.made, self.limit)
            self.keys[layer_idx] = _with_room(self.keys[layer_idx], room)
            self.values[layer_idx] = _with_room(self.values[layer_idx], room)
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        keys[:, :, self.made], values[:, :, self.made] = key[:, :, 0], value[:, :, 0]
        return keys[:, :, : self.made + 1], values[:, :, : self.made + 1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The longest row; positions are given to the model, which need not ask."""
        return int(self.prompts.lengths.max()) + self.made

    def keep(self, rows: np.ndarray) -> None:
        """Let all rows but these leave."""
        import torch

        index = torch.from_numpy(rows).to(self.device)
        self.keys = [k[index] for k in self.keys]
        self.values = [v[index] for v in self.values]
        self._arrange(self.prompts, self.prompt_of_row[rows])

    def to_prompts(self, x: torch.Tensor) -> torch.Tensor:
        """[R, H, rep, X] to [G, H, width * rep, X]; slots without a row hold zeros."""
        _, heads, rep, size = x.shape
        if self.slot is not None:
            x = x.new_zeros(self.slots, heads, rep, size).index_copy_(0, self.slot, x)
        grouped = x.reshape(len(self.prompts), self.width, heads, rep, size).transpose(1, 2)
        return grouped.reshape(len(self.prompts), heads, self.width * rep, size)

    def to_rows(self, x: torch.Tensor) -> torch.Tensor:
        """The inverse of `to_prompts`."""
        prompts, heads, _, size = x.shape
        x = x.view(prompts, heads, self.width, -1, size).transpose(1, 2).reshape(self.slots, heads, -1, size)
        return x if self.slot is None else x[self.slot]


def _with_room(x: torch.Tensor, room: int) -> torch.Tensor:
    """[R, H, T, D] with `room` in the place of T, and its content at the front."""
    out = x.new_empty(*x.shape[:2], room, x.shape[3])
    out[:, :, : x.shape[2]] = x
    return out


def shared_prompt_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    decode_cache: DecodeCache | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function for transformers: query [R, Hq, 1, D], own keys and values [R, H, T, D], and the
    prompts' in `decode_cache`. Gives [R, 1, Hq, D]."""
    import torch

    if decode_cache is None:
        raise ValueError(f"{type(module).__name__} does not hand arguments on to its attention: {_REFUSED}")
    if unknown := [name for name in ("softcap", "s_aux") if kwargs.get(name) is not None]:
        raise ValueError(f"{type(module).__name__} uses {', '.join(unknown)} in its attention: {_REFUSED}")
    cache, layer = decode_cache, int(module.layer_idx)  # pyright: ignore[reportArgumentType]
    rows, query_heads, _, size = query.shape
    heads = key.shape[1]
    q = query.reshape(rows, heads, query_heads // heads, size) * (size**-0.5 if scaling is None else scaling)

    prompt = cache.to_prompts(q) @ cache.prompts.keys[layer].transpose(-1, -2)
    if cache.prompts.hidden is not None:
        prompt.masked_fill_(cache.prompts.hidden, float("-inf"))
    prompt = cache.to_rows(prompt)
    own = q @ key.transpose(-1, -2)
    if sliding_window is not None:
        _hide_outside(prompt, own, cache, sliding_window)
    weights = torch.cat([prompt, own], -1).softmax(-1, dtype=torch.float32).to(value.dtype)
    length = prompt.shape[-1]
    seen = cache.to_rows(cache.to_prompts(weights[..., :length]) @ cache.prompts.values[layer])
    out = seen + weights[..., length:] @ value
    return out.reshape(rows, 1, query_heads, -1), None


def _hide_outside(prompt: torch.Tensor, own: torch.Tensor, cache: DecodeCache, window: int) -> None:
    """A query sees the last `window` positions, its own included."""
    import torch

    positions = torch.arange(prompt.shape[-1], device=prompt.device)
    prompt.masked_fill_((positions <= cache.positions() - window)[:, None, None], float("-inf"))
    own[..., : max(0, own.shape[-1] - window)] = float("-inf")


def register() -> None:
    """Make the attention known to transformers, under the name `ATTENTION`."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, shared_prompt_attention)


def prefill(module: Any, prompts: Sequence[np.ndarray], batch_tokens: int) -> tuple[PromptCache, torch.Tensor]:
    """Each prompt once through the model, with the attention it was loaded with, in batches of about
    `batch_tokens` tokens: the cache of all, and the logits [G, V] after each prompt's last token."""
    import torch

    lengths = np.array([len(p) for p in prompts], np.int64)
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    logits = None
    for part in _by_length(lengths, batch_tokens):
        cached, last = _prefill_batch(module, [prompts[i] for i in part])
        if len(part) == len(prompts) and np.array_equal(part, np.arange(len(part))):
            return PromptCache([k for k, _ in cached], [v for _, v in cached], lengths), last
        if logits is None:
            keys = [k.new_zeros(len(prompts), k.shape[1], lengths.max(), k.shape[3]) for k, _ in cached]
            values = [v.new_zeros(len(prompts), v.shape[1], lengths.max(), v.shape[3]) for _, v in cached]
            logits = last.new_empty(len(prompts), last.shape[1])
        index = torch.from_numpy(part).to(last.device)
        logits[index] = last
        for layer, (k, v) in enumerate(cached):
            keys[layer][index, :, : k.shape[2]], values[layer][index, :, : v.shape[2]] = k, v
    if logits is None:
        raise ValueError("no prompts")
    return PromptCache(keys, values, lengths), logits


def _by_length(lengths: np.ndarray, batch_tokens: int) -> Iterator[np.ndarray]:
    """Prompts in batches of at most `batch_tokens` tokens, padding included, but at least one prompt. Longest
    first, so that a batch holds prompts of like length; all in the order given if they fit into one."""
    if len(lengths) * lengths.max() <= batch_tokens:
        yield np.arange(len(lengths))
        return
    order = np.argsort(-lengths, kind="stable")
    start = 0
    while start < len(order):
        size = max(1, batch_tokens // int(lengths[order[start]]))
        yield order[start : start + size]
        start += size


def _prefill_batch(
    module: Any, prompts: Sequence[np.ndarray]
) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], torch.Tensor]:
    """Keys and values [G, H, P, D] of each layer, and logits [G, V]. Padding stands at the right, where causal
    attention never looks."""
    from transformers import DynamicCache

    lengths = np.array([len(p) for p in prompts])
    parcel = Parcel(module.device, ids=((len(prompts), int(lengths.max())), np.int64), last=((len(prompts),), np.int64))
    for row, prompt in zip(parcel.host["ids"], prompts, strict=True):
        row[: len(prompt)] = prompt
    np.subtract(lengths, 1, out=parcel.host["last"])
    sent = parcel.send().receive()
    cache = DynamicCache()  # without a config: every layer keeps all positions, also one with a window
    with _last_only(module, sent["last"]):
        out = module(input_ids=sent["ids"], past_key_values=cache, use_cache=True)
    layers: list[Any] = cache.layers
    return [(layer.keys, layer.values) for layer in layers], out.logits[:, 0]


@contextmanager
def _last_only(module: Any, last: torch.Tensor) -> Iterator[None]:
    """Inside, the output head is given one position a row, `last` int64 [G]: of prompts, no other is needed, and
    the logits of a long prompt are large."""
    import torch

    def pick(_: Any, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        return (inputs[0][torch.arange(len(last), device=last.device), last].unsqueeze(1),)

    handle = module.get_output_embeddings().register_forward_pre_hook(pick)
    try:
        yield
    finally:
        handle.remove()
