"""What the rollouts with a transformers model of their own have in common beyond the contract of the role."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stages.model.hf import HfModel, HfModelConfig
from stages.records import Finish, Sampling, Status
from stages.rollout.hf import HfRollout, HfRolloutConfig
from stages.rollout.in_process import Responses
from stages.rollout.torch import TorchRollout, TorchRolloutConfig
from stages.sampler.torch import TorchSampler, TorchSamplerConfig
from stages.weights import snapshot_of
from tests.builders import token_batch
from tests.tiny_models import load, save_model

BACKENDS = {"hf": (HfRollout, HfRolloutConfig), "torch": (TorchRollout, TorchRolloutConfig)}
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15, 16], [20, 21, 22, 23], [5, 6, 7], [30] * 12]


def open_rollout(name: str, folder: Path, ctx: Any, **cfg: Any) -> Any:
    cls, config = BACKENDS[name]
    rollout: Any = cls(config(**cfg), HfModel(HfModelConfig(path=str(folder))), TorchSampler(TorchSamplerConfig()))
    rollout.open(ctx)
    return rollout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("gqa") / "model")


# -- the rows under way ----------------------------------------------------------------------------------------


def test_responses_end_by_an_end_token_a_limit_or_a_failure() -> None:
    out = Responses(4, 3, end_ids=(2, 7))
    rows = np.arange(4)
    for ids in ([5, 7, -1, 4], [5, 9, 9, 4], [5, 9, 9, 2]):
        out.add(rows, np.array(ids), np.full(4, -0.5, np.float32))
    assert not out.is_open(rows).any()
    drafts = [out.draft(i, 10 + i, version=3) for i in range(4)]
    assert [d.finish for d in drafts] == [Finish.LENGTH, Finish.STOP, Finish.FAILED, Finish.STOP]
    assert [list(d.ids) for d in drafts] == [[5, 5, 5], [7], [], [4, 4, 2]]
    assert [d.row for d in drafts] == [10, 11, 12, 13]
    assert "token 0" in drafts[2].reason


def test_a_subset_of_rows_grows() -> None:
    out = Responses(3, 4, end_ids=())
    out.add(np.array([0, 1, 2]), np.array([4, 5, 6]), np.zeros(3, np.float32))
    out.add(np.array([2, 0]), np.array([8, 9]), np.array([-1.0, -2.0], np.float32))
    assert out.length.tolist() == [2, 1, 2]
    assert out.ids[:, :2].tolist() == [[4, 9], [5, 0], [6, 8]]
    assert out.log_probs[:, 1].tolist() == [-2, 0, -1]


# -- both are one ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(temperature=0.7, top_k=20, top_p=0.9), Sampling(temperature=0), Sampling(min_p=0.2)],
)
def test_hf_and_torch_make_the_same_rows(folder: Path, make_context: Any, sampling: Sampling) -> None:
    """The same seeds, sampler and float32 weights: prompts padded left or right, cached once or n times."""
    tokens = token_batch(PROMPTS, sampling=sampling)
    made = [
        open_rollout(name, folder, make_context("rollout"), n=4, max_new_tokens=20).run(tokens)
        for name in ("hf", "torch")
    ]
    assert made[0].response_ids.values.tolist() == made[1].response_ids.values.tolist()
    assert made[0].response_ids.offsets.tolist() == made[1].response_ids.offsets.tolist()
    assert made[0].finish.tolist() == made[1].finish.tolist()
    assert [made[0].response.text(i) for i in range(24)] == [made[1].response.text(i) for i in range(24)]
    np.testing.assert_allclose(made[0].log_probs.values, made[1].log_probs.values, atol=2e-5)
    assert len(set(made[0].response_ids.lengths.tolist())) > 2 or sampling.temperature == 0


@pytest.mark.parametrize("name", BACKENDS)
def test_the_size_of_parts_changes_nothing(name: str, folder: Path, make_context: Any) -> None:
    """Parts that cut through groups, and one that holds all."""
    tokens = token_batch(PROMPTS)
    whole, cut = (
        open_rollout(name, folder, make_context("rollout"), n=4, max_new_tokens=12, batch_rows=rows).run(tokens)
        for rows in (256, 5)
    )
    assert whole.response_ids.values.tolist() == cut.response_ids.values.tolist()
    np.testing.assert_allclose(whole.log_probs.values, cut.log_probs.values, atol=2e-5)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_row_without_finite_logits_fails_alone(name: str, folder: Path, make_context: Any) -> None:
    """A NaN in the embedding of token 50 spoils the prompts that hold it, and rows that draw it later."""
    broken = load(folder)
    with torch.no_grad():
        broken.model.embed_tokens.weight[50] = float("nan")
    tokens = token_batch([[5, 6], [7, 50], [8, 9]])
    rollout = open_rollout(name, folder, make_context("rollout"), n=2, max_new_tokens=6)
    sound = rollout.run(tokens)
    rollout.receive(snapshot_of(broken, 1))
    out = rollout.run(tokens)
    assert out.status.tolist() == [Status.OK] * 2 + [Status.FAILED] * 2 + [Status.OK] * 2
    assert out.finish[2:4].tolist() == [Finish.FAILED] * 2
    assert out.reason.text(2) == "the policy gave no finite logits for token 0"
    assert out.response_ids.lengths[2:4].tolist() == [0, 0]
    for row in (0, 1, 4, 5):
        assert 50 not in sound.response_ids[row]
        assert out.response_ids[row].tolist() == sound.response_ids[row].tolist()
        assert out.reason.text(row) == ""
    assert rollout.ctx.meter.drain()["rollout/failed"][1] == [0, 2]


@pytest.mark.parametrize("name", BACKENDS)
def test_a_row_that_fails_midway_keeps_what_it_has(name: str, folder: Path, make_context: Any) -> None:
    """The likeliest first token of the prompt is spoilt: it is drawn, and then nothing can be."""
    module = load(folder)
    with torch.no_grad():
        first = int(module(torch.tensor([[5, 6]])).logits[0, -1].argmax())
        module.model.embed_tokens.weight[first] = float("nan")
    rollout = open_rollout(name, folder, make_context("rollout"), n=1, temperature=0.0, max_new_tokens=6)
    rollout.receive(snapshot_of(module, 1))
    out = rollout.run(token_batch([[5, 6], [8, 9]]))
    assert out.response_ids[0].tolist() == [first]
    assert out.status.tolist() == [Status.FAILED, Status.OK]
    assert out.reason.text(0) == "the policy gave no finite logits for token 1"


@pytest.mark.parametrize("name", BACKENDS)
def test_weights_that_do_not_fit_are_refused(name: str, folder: Path, tiny_model: Path, make_context: Any) -> None:
    """And the rollout goes on with those it has, under their version."""
    rollout = open_rollout(name, folder, make_context("rollout"), n=2, max_new_tokens=6)
    rollout.receive(snapshot_of(load(folder), 4))
    before = rollout.run(token_batch(PROMPTS))
    with pytest.raises(ValueError, match=r"version 5 do not fit LlamaForCausalLM: missing: lm_head\.weight"):
        rollout.receive(snapshot_of(load(tiny_model), 5))
    assert rollout.run(token_batch(PROMPTS)).same(before)
    assert set(before.version_min.tolist()) == {4}


@pytest.mark.parametrize("name", BACKENDS)
def test_bfloat16(name: str, folder: Path, make_context: Any) -> None:
    """Log-probs are those of the bfloat16 model, within its precision; weights arrive rounded."""
    cls, config = BACKENDS[name]
    model = HfModel(HfModelConfig(path=str(folder), dtype="bfloat16"))
    rollout: Any = cls(config(n=2, max_new_tokens=8), model, TorchSampler(TorchSamplerConfig()))
    rollout.open(make_context("rollout"))
    rollout.receive(snapshot_of(load(folder), 1))
    assert rollout.module.dtype == torch.bfloat16
    out = rollout.run(token_batch(PROMPTS))
    assert (out.status == Status.OK).all()
    reference = model.load("cpu")
    with torch.no_grad():
        ids = torch.tensor([[*out.prompt_ids[0].tolist(), *out.response_ids[0].tolist()]])
        logits = reference(ids).logits[0, len(out.prompt_ids[0]) - 1 : -1].double()
    expected = logits.log_softmax(-1)[range(len(out.response_ids[0])), out.response_ids[0].tolist()]
    np.testing.assert_allclose(out.log_probs[0], expected.numpy(), atol=0.15)
