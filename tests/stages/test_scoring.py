"""Log-probs through the head's hook, for architectures that treat positions and logits in their own ways."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, GPT2Config, GraniteConfig

from stages.batching import micro_batches
from stages.scoring import score
from tests.stages.learners import random_rollouts

SMALL = {"vocab_size": 259, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
CONFIGS = {
    "learned positions": GPT2Config(vocab_size=259, n_embd=32, n_layer=2, n_head=2, n_positions=64),
    "soft-capped logits": Gemma2Config(**SMALL, **HEADS, final_logit_softcapping=0.5),
    "scaled logits": GraniteConfig(**SMALL, num_attention_heads=2, num_key_value_heads=1, logits_scaling=0.1),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_padded_row_scores_as_it_does_alone(kind):
    """huggingface/transformers issue 29029: padding and positions must not change the numbers."""
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(CONFIGS[kind]).eval()
    rollouts = random_rollouts(4, 2)
    for micro in micro_batches(rollouts, np.arange(len(rollouts)), 10_000, "cpu"):
        assert micro.slots > micro.tokens, "nothing is padded: the test would prove nothing"
        log_probs, entropy = score(module, micro, 0.7, entropy=True, bfloat16=False)
        expected, spread = [], []
        for row in micro.rows:
            prompt, response = rollouts.prompt_ids[row].tolist(), rollouts.response_ids[row].tolist()
            with torch.no_grad():
                logits = module(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
            every = (logits.double() / 0.7).log_softmax(-1).numpy()
            expected += every[range(len(response)), response].tolist()
            spread += (-(np.exp(every) * every).sum(-1)).tolist()
        assert log_probs.detach().numpy() == pytest.approx(np.array(expected), abs=1e-5)
        assert entropy.detach().numpy() == pytest.approx(np.array(spread), abs=1e-5)
    assert not module.get_output_embeddings()._forward_pre_hooks, "the hook is gone"
