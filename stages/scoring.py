"""Log-probs and entropies of response tokens by a causal language model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from stages.batching import MicroBatch
from stages.records import RolloutBatch

if TYPE_CHECKING:
    import torch


def temperature_of(rollouts: RolloutBatch) -> float:
    """The temperature of the log-probs: a greedy batch has those of temperature 1."""
    return rollouts.temperature or 1.0


def score(
    module: torch.nn.Module, micro: MicroBatch, temperature: float, *, entropy: bool, bfloat16: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs, and with `entropy` also entropies (else an empty tensor), of the response tokens: [N], in nats.

    They are those of softmax(logits / temperature), without filters, in float32 whatever the model computes in;
    `bfloat16` runs the model under autocast. Gradients flow where they are on.
    """
    import torch

    with torch.autocast(micro.ids.device.type, torch.bfloat16, enabled=bfloat16), _only(module, micro.predicts):
        logits = module(input_ids=micro.ids, use_cache=False).logits[0]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature != 1.0:
        logits = logits / temperature
    normaliser = logits.logsumexp(-1)
    log_probs = logits.gather(-1, micro.targets[:, None])[:, 0] - normaliser
    if not entropy:
        return log_probs, log_probs.new_zeros(0)
    return log_probs, normaliser - (logits.softmax(-1) * logits).sum(-1)


@contextmanager
def _only(module: torch.nn.Module, positions: torch.Tensor) -> Iterator[None]:
    """Inside, the model's head sees only these of the flattened [R * L] positions, so logits are [1, N, V].

    With a large vocabulary the logits of prompts and padding would cost most of the memory. A hook, and not the head
    called by hand: what a model does to its logits afterwards (scaling, soft-capping) stays.
    """
    head = module.get_output_embeddings()  # pyright: ignore[reportCallIssue]
    hook = head.register_forward_pre_hook(lambda _, args: (args[0].flatten(0, 1)[positions][None],))
    try:
        yield
    finally:
        hook.remove()
