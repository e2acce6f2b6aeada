"""Role `sampler`: draws one token a row from logits. The rollout owns the parameters; a sampler carries them out."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from pipeline.stage import Component

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """What to sample, all values given. Order: temperature, top-k, top-p on the renormalised rest; min-p
    against the largest probability of the temperature-scaled distribution."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float


class Sampler(Component):
    """Capabilities: `logits_sampler` means `sample` works in this process; `vllm_sampler` means vLLM can be told
    to use it (`vllm_environment`), and `seeded_rows` that a row's token depends on its own seed alone."""

    role: ClassVar[str] = "sampler"

    @abstractmethod
    def sample(self, logits: torch.Tensor, params: SamplingParams, seeds: np.ndarray, position: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids int64 [B] and log-probs float32 [B].

        `logits` [B, V] float, not changed; `seeds` uint64 [B], one a row, for its whole life; `position` int64 [B],
        how many tokens the row has made. The log-prob is that of the token under the temperature-scaled
        distribution before filters (temperature 0: greedy, log-prob at temperature 1). The smallest set of
        tokens with mass >= top_p is kept; a token outside the filters is never drawn; a row without a finite
        largest logit (NaN, all -inf) gets id -1 and log-prob NaN, and its neighbours are as without it.
        """
