"""What a plan says of memory, against models that are really made: weights and optimizer exact, the rest near."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from pipeline.config import RootConfig
from pipeline.context import Context
from pipeline.plan import Facts
from stages import footprint
from stages.critic.value_model import ValueModelCritic, ValueModelCriticConfig
from stages.learning import Optimizer
from stages.model.hf import HfModel, HfModelConfig
from stages.rollout import shared_prompt
from stages.rollout.hf import HfRollout, HfRolloutConfig
from stages.rollout.torch import TorchRollout, TorchRolloutConfig
from stages.sampler.torch import TorchSampler, TorchSamplerConfig
from stages.trainer.torch import TorchTrainer, TorchTrainerConfig
from tests.tiny_models import llama_config, save_model

LAYERS, KV, HEAD = 2, 2, 32


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "m", tie_word_embeddings=request.param)


def model(folder: Path, dtype: str = "float32") -> HfModel:
    return HfModel(HfModelConfig(path=str(folder), dtype=dtype))


def facts(**values: int) -> Facts:
    return Facts(key="x", root=RootConfig(), values=values)


def bytes_of(tensors: Iterator[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def test_weights_are_counted_from_the_files_headers(folder: Path) -> None:
    loaded = model(folder).load("cpu")
    assert model(folder).parameters() == sum(p.numel() for p in loaded.parameters())
    shape = footprint.shape_of(model(folder))
    assert shape is not None
    assert (shape.layers, shape.kv, shape.hidden, shape.vocab) == (LAYERS, KV * HEAD, 64, 259)


@pytest.mark.parametrize("kind", ["trainer", "critic"])
def test_what_a_learner_holds(kind: str, folder: Path, tmp_path: Path) -> None:
    """After one update: weights, their gradients before they are cleared, AdamW's moments."""
    cfg, ctx = TorchTrainerConfig(), Context(node=kind, run_seed=0, run_dir=tmp_path)
    if kind == "trainer":
        told = TorchTrainer(cfg, model(folder)).memory(facts())
        module: torch.nn.Module = model(folder).load("cpu").float()
    else:
        critic = ValueModelCritic(ValueModelCriticConfig(), model(folder))
        told = critic.memory(facts())
        critic.open(ctx)
        module = critic._module
    optimizer = Optimizer(module.parameters(), cfg, ctx)
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    gradients = bytes_of(p.grad for p in module.parameters() if p.grad is not None)
    optimizer.step()
    moments = [t for s in optimizer.adam.state.values() for t in s.values() if t.dim()]  # the count of steps has none
    assert told["weights"] == bytes_of(iter(module.parameters()))
    assert told["gradients"] == gradients
    assert told["optimizer"] == bytes_of(iter(moments))


@contextmanager
def kept(module: torch.nn.Module) -> Iterator[list[int]]:
    """Bytes that autograd keeps inside, each storage once, parameters left out."""
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}
    seen: dict[int, tuple[torch.Tensor, int]] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = (t, storage.nbytes())  # the tensor stays, so that no address comes twice
        return t

    total: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        yield total
    total.append(sum(size for _, size in seen.values()))


@pytest.mark.parametrize("bfloat16", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("shape", [(64, 32, 128, 2), (128, 32, 512, 3), (64, 16, 256, 4)])
def test_what_autograd_keeps(shape: tuple[int, int, int, int], attention: str, bfloat16: bool) -> None:
    """Within 6 % of the formula, for small and large feed-forwards, few and many heads."""
    hidden, head, ffn, layers = shape
    heads, rows, width, vocab = hidden // head, 4, 96, 259
    config = llama_config(
        hidden_size=hidden, head_dim=head, num_attention_heads=heads, num_key_value_heads=heads // 2 or 1,
        intermediate_size=ffn, num_hidden_layers=layers, _attn_implementation=attention,
    )  # fmt: skip
    module = LlamaForCausalLM(config).float()
    known = footprint.Shape(1, 0, layers, hidden, heads, head * (heads // 2 or 1), ffn, vocab, attention == "eager")
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, vocab, (rows, width)))
    with kept(module) as total, torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
        hidden_states = module.model(input_ids=ids, use_cache=False).last_hidden_state
    assert hidden_states.requires_grad
    expected = footprint.kept_for_backward(known, rows * width, width, bfloat16=bfloat16)
    matrices = sum(p.numel() for n, p in module.model.named_parameters() if "proj" in n)
    expected += 2 * matrices if bfloat16 else 0  # autocast keeps a copy of each in half precision
    assert total[0] == pytest.approx(expected, rel=0.06)


def test_keys_and_values_of_a_shared_prompt(folder: Path) -> None:
    """The cache of 3 prompts of 10 tokens for 12 rows, when each has made 16 tokens."""
    shared_prompt.register()
    module = model(folder).load("cpu")
    prompts = [np.arange(10, dtype=np.int32) + i for i in range(3)]
    with torch.inference_mode():
        cached, _ = shared_prompt.prefill(module, prompts, 1000)
    told = TorchRollout(TorchRolloutConfig(n=4, max_new_tokens=16), model(folder), TorchSampler(TorchSamplerConfig()))
    tokens, at_once = told.tokens_held(12, 10)
    assert (tokens, at_once) == (3 * 10 + 12 * 16, 3 * 10)
    shape = footprint.shape_of(model(folder))
    assert shape is not None
    in_prompts = bytes_of(iter([*cached.keys, *cached.values]))
    assert in_prompts == footprint.keys_and_values(shape, 3 * 10, 4) == 2 * LAYERS * KV * HEAD * 30 * 4


def test_a_rollout_in_half_precision_and_with_prompts_of_its_own(folder: Path) -> None:
    known = facts(prompts_per_step=2, max_prompt_tokens=10)
    sampler = TorchSampler(TorchSamplerConfig())
    plain = HfRollout(HfRolloutConfig(n=4, max_new_tokens=16), model(folder), sampler).memory(known)
    half = HfRollout(HfRolloutConfig(n=4, max_new_tokens=16), model(folder, "bfloat16"), sampler).memory(known)
    assert plain["weights"] == 2 * half["weights"] == 4 * (model(folder).parameters() or 0)
    assert plain["kv_cache"] == 2 * half["kv_cache"] == 2 * LAYERS * KV * HEAD * (8 * 26) * 4


def test_activations_are_bounded_by_the_smallest_of_what_bounds_them(folder: Path) -> None:
    def activations(**values: int) -> int:
        cfg = TorchTrainerConfig(micro_tokens=1000, mini_batch=4)
        return TorchTrainer(cfg, model(folder)).memory(facts(**values))["activations"]

    step = {"prompts_per_step": 2, "samples_per_prompt": 4, "max_new_tokens": 10}
    assert activations() == activations(**step), "prompts may be of any length: the budget of tokens counts"
    assert activations(**step, max_prompt_tokens=30) < activations() / 4, "4 rows of 40 tokens are fewer than 1000"
    assert activations(**step, max_prompt_tokens=2000) > activations(), "a row longer than the budget goes alone"


def test_a_folder_that_is_no_model_has_no_estimate(tmp_path: Path) -> None:
    assert model(tmp_path).parameters() is None
    assert TorchTrainer(TorchTrainerConfig(), model(tmp_path)).memory(facts()) == {}
    (tmp_path / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    assert model(tmp_path).parameters() is None
