"""The decoding loop: prompts cached once, rows that leave, windows, room that grows, models it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, MistralConfig, MistralForCausalLM

from stages.records import Finish, RolloutBatch
from stages.rollout import shared_prompt
from stages.rollout import torch as backend
from stages.rollout.shared_prompt import DecodeCache, PromptCache
from tests.builders import token_batch
from tests.stages.rollout.test_in_process import open_rollout
from tests.tiny_models import VOCABULARY, llama_config, load, reference_log_probs, save_model

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15, 16], [20, 21, 22, 23]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("gqa") / "model")


class Watched(DecodeCache):
    """Notes the shapes of what is stored, after each arrangement and each step."""

    seen: ClassVar[list[dict[str, Any]]] = []

    def _arrange(self, prompts: PromptCache, prompt_of_row: np.ndarray) -> None:
        super()._arrange(prompts, prompt_of_row)
        self.note(step=False)

    def update(self, *args: Any, **kwargs: Any) -> Any:
        out = super().update(*args, **kwargs)
        self.note(step=True)
        return out

    def note(self, step: bool) -> None:
        prompts = [*self.prompts.keys, *self.prompts.values]
        self.seen.append(
            {
                "step": step,
                "rows": len(self.prompt_of_row),
                "prompt_rows": {t.shape[0] for t in prompts},
                "prompt_storage": sum(t.untyped_storage().nbytes() for t in prompts),
                "prompt_pointers": {t.data_ptr() for t in prompts},
                "own_rows": {t.shape[0] for t in [*self.keys, *self.values]},
                "room": {t.shape[2] for t in [*self.keys, *self.values]},
            }
        )


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    monkeypatch.setattr(Watched, "seen", [])
    monkeypatch.setattr(shared_prompt, "DecodeCache", Watched)
    return Watched.seen


def agree(out: RolloutBatch, module: Any, atol: float = 2e-5) -> None:
    """Every log-prob is that of a forward without any cache."""
    for row in range(len(out)):
        expected = reference_log_probs(module, out.prompt_ids[row], out.response_ids[row], out.temperature)
        np.testing.assert_allclose(out.log_probs[row], expected, atol=atol, err_msg=f"row {row}")


def test_a_prompt_is_stored_once_for_all_its_samples(
    folder: Path, make_context: Any, watched: list[dict[str, Any]]
) -> None:
    """Four prompts, two of them the same text in another group: G is 4 of 5, and no step copies them."""
    rollout = open_rollout("torch", folder, make_context("rollout"), n=16, max_new_tokens=4)
    fed: list[tuple[int, ...]] = []
    rollout.module.model.embed_tokens.register_forward_hook(lambda _, x, __: fed.append(tuple(x[0].shape)))
    out = rollout.run(token_batch([*PROMPTS, PROMPTS[0]]))
    assert fed[0] == (4, 8)  # each prompt goes through the model once, padded to the longest
    assert all(shape[1] == 1 for shape in fed[1:])
    cfg = llama_config()
    stored = 2 * cfg.num_hidden_layers * 4 * cfg.num_key_value_heads * 8 * cfg.head_dim * 4  # K, V; float32
    assert watched[0]["rows"] == 80
    for step in watched:
        assert step["prompt_rows"] == {4}
        assert step["prompt_storage"] == stored
        assert step["prompt_pointers"] == watched[0]["prompt_pointers"]
    agree(out, load(folder))


def test_rows_that_finish_leave(folder: Path, make_context: Any, watched: list[dict[str, Any]]) -> None:
    """Rows in the batch never exceed what is open by more than the share at which they leave; prompts whose rows
    have all finished leave too, once half of them have; and what is left is undisturbed."""
    rollout = open_rollout("torch", folder, make_context("rollout"), n=8, max_new_tokens=60)
    out = rollout.run(token_batch([[5 + i, 6, 7 + 2 * i] for i in range(12)]))
    lengths = out.response_ids.lengths
    assert len(np.unique(lengths)) > 10
    sizes = [w["rows"] for w in watched]
    assert sizes[0] == 96
    assert sizes == sorted(sizes, reverse=True)
    # Each step notes its two layers; what is fed at step t is open after t + 1 tokens, or has not left yet.
    steps = [w["rows"] for w in watched if w["step"]][::2]
    for step, fed in enumerate(steps):
        still_open = np.count_nonzero(lengths > step + 1)
        assert still_open <= fed < still_open / (1 - backend._LEAVE_AT) + 1
    assert len(steps) == lengths.max() - 1
    assert min(min(w["prompt_rows"]) for w in watched) <= 6
    assert all(w["own_rows"] <= {w["rows"]} for w in watched)
    agree(out, load(folder))


def test_room_grows_up_to_the_limit_and_no_further(
    folder: Path, make_context: Any, watched: list[dict[str, Any]]
) -> None:
    rollout = open_rollout("torch", folder, make_context("rollout"), n=8, max_new_tokens=22)
    out = rollout.run(token_batch(PROMPTS))
    rooms = sorted({r for w in watched for r in w["room"]})
    assert rooms == [16, 22]
    assert (out.finish == Finish.LENGTH).any()
    agree(out, load(folder))


def test_prompts_that_are_prefilled_in_batches(folder: Path, make_context: Any) -> None:
    tokens = token_batch([[5, 6, 7], [8] * 20, [9, 10], [11] * 9, [12] * 9, [13] * 40])
    whole, cut = (
        open_rollout("torch", folder, make_context("rollout"), n=3, max_new_tokens=6, prefill_tokens=budget).run(tokens)
        for budget in (10_000, 21)
    )
    assert whole.response_ids.values.tolist() == cut.response_ids.values.tolist()
    agree(cut, load(folder))


def test_prefill_batches_stay_within_their_budget() -> None:
    lengths = np.array([3, 20, 2, 9, 9, 40])
    parts = [p.tolist() for p in shared_prompt._by_length(lengths, 21)]
    assert parts == [[5], [1], [3, 4], [0, 2]]
    assert [p.tolist() for p in shared_prompt._by_length(lengths, 240)] == [[0, 1, 2, 3, 4, 5]]


def test_the_head_sees_one_position_a_prompt(folder: Path) -> None:
    """Logits of all positions of long prompts would not fit a large vocabulary."""
    module, sizes = load(folder), []
    module.lm_head.register_forward_hook(lambda _, x, __: sizes.append(tuple(x[0].shape[:2])))
    with torch.no_grad():
        cache, logits = shared_prompt.prefill(module, [np.array(p) for p in PROMPTS], 1000)
        assert sizes == [(4, 1)]
        for row, prompt in enumerate(PROMPTS):
            expected = module(torch.tensor([prompt])).logits[0, -1]
            np.testing.assert_allclose(logits[row], expected, atol=1e-5)
    assert cache.lengths.tolist() == [3, 1, 8, 4]
    assert sizes[1:] == [(1, len(p)) for p in PROMPTS]  # outside a prefill the head sees everything again


@pytest.mark.parametrize("window", [1, 4, 7, 1000])
def test_sliding_windows(tmp_path: Path, make_context: Any, window: int) -> None:
    """Windows that end in the response, in the prompt, and nowhere."""
    torch.manual_seed(0)
    shape = {k: v for k, v in llama_config().to_dict().items() if k in MistralConfig().to_dict()}
    shape |= {"sliding_window": window, "model_type": "mistral", "architectures": None}
    folder = save_model(tmp_path / "mistral", MistralForCausalLM(MistralConfig(**shape)))
    out = open_rollout("torch", folder, make_context("rollout"), n=4, max_new_tokens=12).run(token_batch(PROMPTS))
    module = load(folder)
    assert module.config.sliding_window == window
    agree(out, module)


def test_attention_that_it_cannot_compute_is_refused(tmp_path: Path, make_context: Any) -> None:
    config = Gemma2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        head_dim=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_hidden_layers=2,
        intermediate_size=64,
        attn_logit_softcapping=50.0,
        max_position_embeddings=128,
    )
    folder = save_model(tmp_path / "gemma", Gemma2ForCausalLM(config))
    rollout = open_rollout("torch", folder, make_context("rollout"), n=2, max_new_tokens=4)
    with pytest.raises(ValueError, match="Gemma2Attention uses softcap in its attention"):
        rollout.run(token_batch([[5, 6]]))
    assert rollout.module.config._attn_implementation == "sdpa"  # what the model was loaded with is back in place


def test_layers_without_attention_are_refused(folder: Path, make_context: Any) -> None:
    rollout = open_rollout("torch", folder, make_context("rollout"))
    load_model = rollout.model.load

    def recurrent(device: str) -> Any:
        module = load_model(device)
        module.config.layer_types = ["full_attention", "linear_attention"]
        return module

    rollout.model.load = recurrent
    with pytest.raises(ValueError, match=r"attention of LlamaForCausalLM .* cannot be exchanged"):
        rollout.open(make_context("rollout"))


def test_slots_of_ragged_groups() -> None:
    """Rows of three prompts in a mixed order, with 1, 3 and 0 rows: there and back, and each beside its prompt."""
    prompts = PromptCache([torch.zeros(3, 2, 5, 4)], [torch.zeros(3, 2, 5, 4)], np.array([5, 3, 4]))
    cache = DecodeCache(prompts, np.array([1, 0, 1, 1]), 8)
    assert cache.width == 3
    x = torch.arange(4 * 2 * 2 * 3.0).reshape(4, 2, 2, 3) + 1
    there = cache.to_prompts(x)
    assert there.shape == (3, 2, 3 * 2, 3)
    assert torch.equal(there[1], torch.cat([x[0], x[2], x[3]], 1))
    assert torch.equal(there[0, :, :2], x[1])
    assert not there[0, :, 2:].any()
    assert not there[2].any()
    assert torch.equal(cache.to_rows(there), x)
    assert cache.positions().tolist() == [[3], [5], [3], [3]]
