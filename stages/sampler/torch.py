"""Sampling with plain PyTorch operations, on any device: the reference for every other sampler.

One uniform number a row, by a counter-based hash of its seed and position, and the inverse of the cumulative
distribution in float64. No generator has a state, so a row's token does not depend on the batch it is in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pipeline.context import mix64
from pipeline.registry import backend
from stages.device import send
from stages.sampler import Sampler, SamplingParams, VllmSampling

if TYPE_CHECKING:
    import torch

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
# Rows are worked in blocks of about so many float64 values: memory is reused, and a CPU block stays near the cache.
_BLOCK_VALUES = {"cpu": 1 << 20}
_BLOCK_VALUES_ELSEWHERE = 1 << 26
# The nucleus is looked for among so many of the largest tokens first; a full sort of a large vocabulary is slow.
_FIRST_LOOK = 1024


@dataclass(slots=True, kw_only=True)
class TorchSamplerConfig:
    """Nothing to set: the rollout owns the sampling parameters."""


@backend("sampler", "torch")
class TorchSampler(Sampler):
    """In plain tensor operations, on any device; a row's random numbers come from its own seed."""

    provides = frozenset({"logits_sampler", "vllm_sampler", "seeded_rows"})
    requires = ("torch",)

    def __init__(self, cfg: TorchSamplerConfig):
        self.cfg = cfg

    def sample(
        self, logits: torch.Tensor, params: SamplingParams, seeds: np.ndarray, position: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        rows, vocabulary = logits.shape
        uniform = send(logits.device, uniform=uniforms(seeds, position))["uniform"]
        size = max(1, _BLOCK_VALUES.get(logits.device.type, _BLOCK_VALUES_ELSEWHERE) // vocabulary)
        if size >= rows:
            return _sample_block(logits, params, uniform)
        blocks = [_sample_block(x, params, u) for x, u in zip(logits.split(size), uniform.split(size), strict=True)]
        return torch.cat([ids for ids, _ in blocks]), torch.cat([log_probs for _, log_probs in blocks])

    def vllm(self) -> VllmSampling:
        """vLLM's own sampler in PyTorch, never a kernel of another library."""
        return VllmSampling(environment={"VLLM_USE_FLASHINFER_SAMPLER": "0"}, seeded=True, kernels="native.")


def uniforms(seeds: np.ndarray, position: np.ndarray) -> np.ndarray:
    """float64 [B] in [0, 1), 53 bits each: output number `position` of a splitmix64 generator seeded by `seeds`
    (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators", OOPSLA)."""
    with np.errstate(over="ignore"):
        state = mix64(seeds.astype(np.uint64) + _GOLDEN) + position.astype(np.uint64) * _GOLDEN
        return (mix64(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _sample_block(
    logits: torch.Tensor, params: SamplingParams, uniform: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    temperature = params.temperature or 1.0  # greedy: log-probs at temperature 1
    largest = logits.amax(-1, keepdim=True).double()  # NaN if the row holds one
    usable = largest.isfinite()
    weights = logits.to(torch.float64, copy=True)
    weights.sub_(largest).div_(temperature).exp_()  # in 0..1, and 1 at the largest: no overflow
    if not usable.all():
        weights.masked_fill_(~usable, 1.0)
    total = weights.sum(-1, keepdim=True)
    if params.temperature == 0:
        ids = logits.argmax(-1, keepdim=True)
    else:
        _filter(weights, params)
        ids = _draw(weights, uniform)
    log_probs = (logits.gather(-1, ids).double() - largest) / temperature - total.log()
    ids = ids.masked_fill(~usable, -1)
    return ids.squeeze(-1), log_probs.masked_fill(~usable, float("nan")).float().squeeze(-1)


def _filter(weights: torch.Tensor, params: SamplingParams) -> None:
    """Set the weights of tokens outside top-k, top-p and min-p to zero, in place."""
    width = weights.shape[-1]
    floor = params.min_p  # the largest weight is 1, whatever top-k and top-p take away
    if 0 < params.top_k < width:
        width = params.top_k
        _keep(weights, weights.topk(width, -1).values[:, -1:], width)
    if params.top_p < 1:
        _keep(weights, *_nucleus(weights, params.top_p, width))
    if floor > 0:
        weights.masked_fill_(weights < floor, 0.0)


def _keep(weights: torch.Tensor, threshold: torch.Tensor, count: torch.Tensor | int) -> None:
    """Keep the `count` largest weights of each row, whose smallest is `threshold` [B, 1]; lower ids first."""
    kept = weights >= threshold
    if (kept.sum(-1, keepdim=True) > count).any():
        above, equal = weights > threshold, weights == threshold
        kept = above | (equal & (equal.cumsum(-1) <= count - above.sum(-1, keepdim=True)))
    weights.masked_fill_(~kept, 0.0)


def _nucleus(weights: torch.Tensor, top_p: float, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """How many of its largest weights a row needs to reach the share `top_p` [B, 1], and the smallest of them.

    At most `width` weights of a row are not zero. Rows that do not get there among their first largest are
    looked at again with more, each on its own account, so that no row depends on another.
    """
    import torch

    needed = top_p * weights.sum(-1, keepdim=True)
    threshold, count = torch.empty_like(needed), torch.empty_like(needed, dtype=torch.int64)
    rows, look = torch.arange(len(weights), device=weights.device), min(width, _FIRST_LOOK)
    while len(rows):
        largest = weights[rows].topk(look, -1).values
        short = largest.cumsum(-1) < needed[rows]
        # With all of them looked at, only rounding can leave a row short.
        found = ~short[:, -1] if look < width else torch.ones_like(short[:, -1])
        size = (short.sum(-1, keepdim=True) + 1).clamp(max=look)
        threshold[rows[found]], count[rows[found]] = largest.gather(-1, size - 1)[found], size[found]
        rows, look = rows[~found], min(width, 8 * look)
    return threshold, count


def _draw(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Ids int64 [B, 1]: the first token whose cumulative weight is above `uniform` times the total.

    There is always one, and its own weight is not zero, for the mark is kept below the total: a product that is
    rounded up to the total would otherwise point behind the last live token.
    """
    import torch

    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:]
    mark = torch.minimum(uniform[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, mark, right=True)
