"""Weights to a snapshot and back: every bit, each tensor once, ties kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from pipeline.records import Snapshot
from stages.weights import iterate, load_into, snapshot_of
from tests.tiny_models import llama_config, perturb

CASES = [(tied, dtype) for tied in (False, True) for dtype in (torch.float32, torch.bfloat16)]


def llama(seed: int, tied: bool, dtype: torch.dtype = torch.float32, **config: Any) -> Any:
    torch.manual_seed(seed)
    return LlamaForCausalLM(llama_config(tie_word_embeddings=tied, **config)).to(dtype)


def raw(t: torch.Tensor) -> bytes:
    return t.detach().contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(("tied", "dtype"), CASES)
def test_round_trip_is_bit_exact(tied: bool, dtype: torch.dtype) -> None:
    source, target = llama(0, tied, dtype), llama(1, tied, dtype)
    assert raw(source.lm_head.weight) != raw(target.lm_head.weight)
    snapshot = snapshot_of(source, 7)
    assert snapshot.version == 7
    load_into(target, snapshot)
    for (name, a), (_, b) in zip(source.state_dict().items(), target.state_dict().items(), strict=True):
        assert raw(a) == raw(b), name
    assert (target.lm_head.weight is target.model.embed_tokens.weight) == tied


@pytest.mark.parametrize(("tied", "dtype"), CASES)
def test_tensors_lie_back_to_back_and_tied_ones_once(tied: bool, dtype: torch.dtype) -> None:
    module = llama(0, tied, dtype)
    snapshot = snapshot_of(module, 0)
    names = [name for name, *_ in snapshot.manifest]
    assert ("lm_head.weight" in names) != tied
    assert "model.embed_tokens.weight" in names
    width = 2 if dtype is torch.bfloat16 else 4
    assert len(snapshot.data) == width * sum(p.numel() for p in module.parameters())  # which counts tied ones once
    at = 0
    for _, dtype_name, shape, start, stop in snapshot.manifest:
        assert (start, stop) == (at, at + width * int(np.prod(shape)))
        assert dtype_name == str(dtype).removeprefix("torch.")
        at = stop
    assert at == len(snapshot.data)


def test_a_snapshot_is_a_copy() -> None:
    module = llama(0, True)
    snapshot = snapshot_of(module, 0)
    before = snapshot.data.copy()
    perturb(module, 1)
    assert np.array_equal(snapshot.data, before)
    for _, tensor in iterate(snapshot):
        tensor.zero_()
    assert np.array_equal(snapshot.data, before)


def test_mixed_dtypes_buffers_scalars_and_views() -> None:
    """A bfloat16 tensor of odd length leaves the next one unaligned; a transposed one is not contiguous."""

    class Mixed(torch.nn.Module):
        def __init__(self, seed: int):
            super().__init__()
            g = torch.Generator().manual_seed(seed)
            self.odd = torch.nn.Parameter(torch.randn(3, generator=g).bfloat16())
            self.turned = torch.nn.Parameter(torch.randn(4, 5, generator=g).T)
            self.register_buffer("count", torch.randint(0, 1000, (), generator=g))
            self.register_buffer("empty", torch.empty(0))
            self.register_buffer("unsaved", torch.randn(2, generator=g), persistent=False)

    source, target = Mixed(0), Mixed(1)
    snapshot = snapshot_of(source, 1)
    assert [m[0] for m in snapshot.manifest] == ["odd", "turned", "count", "empty"]
    load_into(target, snapshot)
    for name, tensor in iterate(snapshot):
        assert tensor.dtype == source.state_dict()[name].dtype
        assert torch.equal(tensor, source.state_dict()[name])
        assert torch.equal(target.state_dict()[name], source.state_dict()[name])
    assert not torch.equal(target.unsaved, source.unsaved)


def test_works_from_memory_that_cannot_be_written(recwarn: pytest.WarningsRecorder) -> None:
    module = llama(0, False)
    snapshot = snapshot_of(module, 0)
    snapshot.data.flags.writeable = False
    target = llama(1, False)
    load_into(target, snapshot)
    assert raw(target.lm_head.weight) == raw(module.lm_head.weight)
    assert not [w for w in recwarn if "writable" in str(w.message)]


def test_another_dtype_is_converted() -> None:
    source, target = llama(0, True), llama(1, True, torch.bfloat16)
    load_into(target, snapshot_of(source, 0))
    assert raw(target.lm_head.weight) == raw(source.lm_head.weight.bfloat16())


def changed(snapshot: Snapshot, *, drop: str = "", add: str = "", shape: str = "") -> Snapshot:
    manifest = [m for m in snapshot.manifest if m[0] != drop]
    manifest = [(n, d, (1, *s) if n == shape else s, a, b) for n, d, s, a, b in manifest]
    return Snapshot(
        version=3, manifest=(*manifest, (add, *manifest[0][1:])) if add else tuple(manifest), data=snapshot.data
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"drop": "model.norm.weight"}, "missing: model.norm.weight"),
        ({"add": "model.other.weight"}, "unexpected: model.other.weight"),
        ({"shape": "model.norm.weight"}, r"of another shape: model.norm.weight \(1, 64\)"),
    ],
)
def test_a_snapshot_that_does_not_fit_is_refused_whole(change: dict, said: str) -> None:
    source, target = llama(0, False), llama(1, False)
    before = [raw(p) for p in target.parameters()]
    with pytest.raises(ValueError, match=said):
        load_into(target, changed(snapshot_of(source, 3), **change))
    assert [raw(p) for p in target.parameters()] == before


def test_tied_and_untied_do_not_mix() -> None:
    with pytest.raises(ValueError, match=r"missing: lm_head\.weight"):
        load_into(llama(0, False), snapshot_of(llama(1, True), 0))
    with pytest.raises(ValueError, match=r"unexpected: lm_head\.weight"):
        load_into(llama(0, True), snapshot_of(llama(1, False), 0))
