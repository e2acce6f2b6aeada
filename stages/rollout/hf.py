"""`generate` of transformers, with tokens chosen by the run's sampler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pipeline.context import Context
from pipeline.registry import backend
from pipeline.stage import setting
from stages.model import Model
from stages.rollout import RolloutConfig
from stages.rollout.assembly import Settings
from stages.rollout.in_process import InProcessRollout, Responses
from stages.sampler import Sampler

if TYPE_CHECKING:
    import torch


@dataclass(slots=True, kw_only=True)
class HfRolloutConfig(RolloutConfig):
    """How many rows `generate` is given at once."""

    batch_rows: int = setting(256, min=1, doc="rows that are decoded at the same time; bounds the memory")


@backend("rollout", "hf")
class HfRollout(InProcessRollout):
    """The plain way, for comparison: prompts are padded at the left and repeated for each sample, and a row that
    has finished is computed on until the last has. Any model that `generate` can handle."""

    def __init__(self, cfg: HfRolloutConfig, model: Model, sampler: Sampler):
        super().__init__(cfg, model, sampler, cfg.batch_rows)

    def open(self, ctx: Context) -> None:
        super().open(ctx)
        from transformers import GenerationConfig

        # `generate` fills what a caller leaves open from here, which is the model folder's generation_config.json.
        self.module.generation_config = GenerationConfig()

    def generate(
        self,
        prompts: list[np.ndarray],
        prompt_of_row: np.ndarray,
        seeds: np.ndarray,
        settings: Settings,
        out: Responses,
    ) -> None:
        import torch
        from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

        ids, mask = _pad_left([prompts[p] for p in prompt_of_row])
        chooser = _Chooser(self.sampler, settings, seeds, out)
        self.module.generate(
            input_ids=torch.from_numpy(ids).to(self.module.device),
            attention_mask=torch.from_numpy(mask).to(self.module.device),
            # No end token is named: rows are ended by the chooser alone, and nothing is written in their place.
            generation_config=GenerationConfig(do_sample=False, max_new_tokens=settings.max_new_tokens),
            logits_processor=LogitsProcessorList([chooser.choose]),  # pyright: ignore[reportArgumentType]
            stopping_criteria=StoppingCriteriaList([chooser.ended]),  # pyright: ignore[reportArgumentType]
        )


class _Chooser:
    """Draws each next token with the sampler, keeps it, and leaves `generate` no other choice."""

    def __init__(self, sampler: Sampler, settings: Settings, seeds: np.ndarray, out: Responses):
        self.sampler, self.params, self.seeds, self.out = sampler, settings.params, seeds, out
        self.rows = np.arange(len(seeds))
        self.made = 0

    def choose(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """A logits processor: [R, V] scores to scores of which only the chosen token's is finite."""
        ids, log_probs = self.sampler.sample(scores, self.params, self.seeds, np.full(len(self.rows), self.made))
        self.out.add(self.rows, ids.cpu().numpy(), log_probs.cpu().numpy())
        self.made += 1
        return scores.new_full(scores.shape, float("-inf")).scatter_(1, ids.clamp(min=0)[:, None], 0.0)

    def ended(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: object) -> torch.Tensor:
        """A stopping criterion: bool [R]."""
        import torch

        return torch.from_numpy(~self.out.is_open(self.rows)).to(input_ids.device)


def _pad_left(prompts: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Ids int64 [R, P] and mask int64 [R, P], 0 where padded."""
    width = max(len(p) for p in prompts)
    ids, mask = np.zeros((2, len(prompts), width), np.int64)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = prompt
        mask[row, width - len(prompt) :] = 1
    return ids, mask
