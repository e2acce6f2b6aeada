"""FlashInfer's sorting-free sampling kernels, inside vLLM on CUDA (https://github.com/flashinfer-ai/flashinfer)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pipeline.registry import backend
from stages.sampler import Sampler, SamplingParams, VllmSampling

if TYPE_CHECKING:
    import torch


@dataclass(slots=True, kw_only=True)
class FlashInferSamplerConfig:
    """Nothing to set."""


@backend("sampler", "flashinfer")
class FlashInferSampler(Sampler):
    """vLLM takes these kernels only in steps where some row has top-k or top-p on and no row has a seed. So
    unfiltered sampling asks for a top-p so close to 1 that it drops at most a millionth of the mass, and rows are not
    seeded: two runs of one seed differ."""

    provides = frozenset({"vllm_sampler"})
    requires = ("flashinfer", "device:cuda")

    def __init__(self, cfg: FlashInferSamplerConfig):
        self.cfg = cfg

    def sample(
        self, logits: torch.Tensor, params: SamplingParams, seeds: np.ndarray, position: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        raise TypeError("this sampler runs inside vLLM only; rollouts that sample themselves need 'logits_sampler'")

    def vllm(self) -> VllmSampling:
        environment = {"VLLM_USE_FLASHINFER_SAMPLER": "1"}
        return VllmSampling(environment=environment, seeded=False, kernels="flashinfer.", no_filter_top_p=0.999999)
