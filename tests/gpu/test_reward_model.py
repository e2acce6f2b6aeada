"""On a CUDA device: a reward model's scores are those of a CPU, row by row. `pytest -m gpu tests/gpu`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from pipeline.context import Context
from stages.model.hf import HfModel, HfModelConfig
from stages.reward.model import ModelReward, ModelRewardConfig
from tests.builders import rollout_batch
from tests.tiny_models import save_classifier

pytestmark = pytest.mark.gpu

DEVICE = "cuda"


@pytest.mark.parametrize("kind", ["llama", "bert"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.3)])
def test_scores_are_those_of_a_cpu(
    tmp_path: Path, make_context: Callable[..., Context], kind: str, dtype: str, tolerance: float
) -> None:
    folder = save_classifier(tmp_path, kind)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(6, 262, rng.integers(1, 30)).tolist() for _ in range(16)]
    responses = [rng.integers(6, 262, rng.integers(0, 60)).tolist() for _ in range(64)]
    rollouts = rollout_batch(prompts, responses, n=4)
    config = ModelRewardConfig(path=str(folder), tokenizer="policy", dtype=dtype, micro_tokens=500)
    reward = ModelReward(config, HfModel(HfModelConfig(path=str(folder))))
    try:
        reward.open(make_context("reward", device=DEVICE))
        scores = reward.run(rollouts).score
        assert reward.run(rollouts).score.tobytes() == scores.tobytes(), "the same rows give the same bits"
    finally:
        reward.close()
    module = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        rows = [[*prompts[i // 4], *responses[i]] for i in range(64)]
        expected = [module(torch.tensor([row])).logits.item() for row in rows]
    np.testing.assert_allclose(scores, expected, atol=tolerance, rtol=0)
