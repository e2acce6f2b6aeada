"""Role `sampler`: draws one token a row from logits. The rollout owns the parameters; a sampler carries them out.

What is drawn, in exact arithmetic, for a row of logits `l`, temperature T, top-k, top-p and min-p:

1. `p = softmax(l / T)`. The log-prob that is given back is `log p[token]`, so filters never change it.
2. top-k (1 <= k < V): the k tokens with the largest p stay; of equal ones the lower ids stay. 0 or k >= V: all.
3. top-p (below 1): of what stayed, renormalised, the smallest set of largest tokens with mass >= top_p stays;
   of equal ones the lower ids. At least one token stays.
4. min-p (above 0): tokens with `p < min_p * max(p)` go. The likeliest token always stays.
5. One token is drawn from what stayed, renormalised. A token of zero probability is never drawn.

T = 0 is greedy: the largest logit (the lowest id of equal ones), filters play no part, and the log-prob is that
of `softmax(l)`. A T so small that all other tokens underflow gives the same token. A row whose largest logit is
not finite (it holds NaN or +inf, or is all -inf) has no distribution: its id is -1 and its log-prob NaN.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
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


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSampling:
    """What makes vLLM use a sampler, and how to see that it did.

    `environment`: variables of vLLM's processes. `seeded`: whether a request may carry a seed. `kernels`: prefix of
    the counted kernels that must have run (`native.`, `flashinfer.`), while no other did. `no_filter_top_p`: the
    top-p to ask for where no filter is wanted; below 1 where the kernel is skipped for unfiltered requests.
    """

    environment: Mapping[str, str]
    seeded: bool
    kernels: str
    no_filter_top_p: float = 1.0


class Sampler(Component):
    """Capabilities: `logits_sampler` means `sample` works in this process; `vllm_sampler` means vLLM can be told
    to use it (`vllm`), and `seeded_rows` that a row's token depends on its own seed alone."""

    role: ClassVar[str] = "sampler"

    @abstractmethod
    def sample(
        self, logits: torch.Tensor, params: SamplingParams, seeds: np.ndarray, position: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids int64 [B] and log-probs float32 [B], on the device of `logits`.

        `logits` [B, V] float, not changed; `seeds` uint64 [B], one a row, for its whole life; `position` int64 [B],
        how many tokens the row has made. The log-prob is that of the token under the temperature-scaled
        distribution before filters (temperature 0: greedy, log-prob at temperature 1). The smallest set of
        tokens with mass >= top_p is kept; a token outside the filters is never drawn; a row without a finite
        largest logit (NaN, all -inf) gets id -1 and log-prob NaN, and its neighbours are as without it.
        """

    def vllm(self) -> VllmSampling:
        """How vLLM samples this way; a sampler that provides `vllm_sampler` says so here."""
        raise TypeError(f"{type(self).__name__} cannot be used inside vLLM")
