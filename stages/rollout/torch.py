"""A decoding loop of its own over a transformers model; the samples of a prompt share its keys and values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pipeline.context import Context
from pipeline.registry import backend
from pipeline.stage import setting
from stages.model import Model
from stages.rollout import RolloutConfig, shared_prompt
from stages.rollout.assembly import Settings
from stages.rollout.in_process import InProcessRollout, Responses
from stages.sampler import Sampler

if TYPE_CHECKING:
    import torch

# Finished rows leave the batch when they are this share of it: leaving copies what the others have cached.
_LEAVE_AT = 1 / 8


@dataclass(slots=True, kw_only=True)
class TorchRolloutConfig(RolloutConfig):
    """What bounds the memory of the loop."""

    batch_rows: int = setting(256, min=1, doc="rows that are decoded at the same time; bounds the memory")
    prefill_tokens: int = setting(16384, min=1, doc="prompt tokens that go through the model at once")


@backend("rollout", "torch")
class TorchRollout(InProcessRollout):
    """Each distinct prompt of `batch_rows` rows goes through the model once and is cached once
    (stages/rollout/shared_prompt.py). Rows that have finished leave the batch."""

    def __init__(self, cfg: TorchRolloutConfig, model: Model, sampler: Sampler):
        super().__init__(cfg, model, sampler, cfg.batch_rows)
        self.prefill_tokens = cfg.prefill_tokens

    def tokens_held(self, rows: int, prompt: int) -> tuple[int, int]:
        """A prompt is cached once for all its samples; the longest prompt goes through whole."""
        distinct = -(-rows // self.cfg.n)
        at_once = max(min(self.prefill_tokens, distinct * prompt), prompt)
        return distinct * prompt + rows * self.cfg.max_new_tokens, at_once

    def open(self, ctx: Context) -> None:
        super().open(ctx)
        shared_prompt.register()
        name, kinds = type(self.module).__name__, set(getattr(self.module.config, "layer_types", None) or ())
        if not self.module._supports_attention_backend or kinds - {"full_attention", "sliding_attention"}:
            raise ValueError(
                f"the attention of {name} (model.path={self.model.path}) cannot be exchanged, which this rollout "
                f"needs to share prompts: choose another rollout"
            )
        self.prompt_attention = self.module.config._attn_implementation

    def generate(
        self,
        prompts: list[np.ndarray],
        prompt_of_row: np.ndarray,
        seeds: np.ndarray,
        settings: Settings,
        out: Responses,
    ) -> None:
        import torch

        with torch.inference_mode():
            cached, logits = shared_prompt.prefill(self.module, prompts, self.prefill_tokens)
            cache = shared_prompt.DecodeCache(cached, prompt_of_row, settings.max_new_tokens)
            logits = logits[torch.from_numpy(prompt_of_row).to(logits.device)]
            rows = np.arange(len(prompt_of_row))
            with self._decoding():
                while True:
                    position = np.full(len(rows), cache.made)
                    ids, log_probs = self.sampler.sample(logits, settings.params, seeds[rows], position)
                    out.add(rows, ids.cpu().numpy(), log_probs.cpu().numpy())
                    staying = np.flatnonzero(out.is_open(rows))
                    if not len(staying):
                        return
                    if len(staying) <= (1 - _LEAVE_AT) * len(rows):
                        cache.keep(staying)
                        rows, ids = rows[staying], ids[torch.from_numpy(staying).to(ids.device)]
                    logits = self._step(ids, cache)

    def _step(self, ids: torch.Tensor, cache: shared_prompt.DecodeCache) -> torch.Tensor:
        """Logits [R, V] after one more token int64 [R] of each row; a failed row still in the batch has id -1."""
        out = self.module(
            input_ids=ids.clamp(min=0)[:, None],
            position_ids=cache.positions(),
            past_key_values=cache,
            use_cache=True,
            decode_cache=cache,
        )
        cache.made += 1
        return out.logits[:, 0]

    @contextmanager
    def _decoding(self) -> Iterator[None]:
        """Inside, the model's attention is that over shared prompts."""
        self.module.set_attn_implementation(shared_prompt.ATTENTION)
        try:
            yield
        finally:
            self.module.set_attn_implementation(self.prompt_attention)
