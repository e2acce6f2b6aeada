"""On a CUDA device: every rollout gives the log-probs of transformers, before and after a push, and the named
sampler is the one that ran. `pytest -m gpu tests/gpu`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline import registry
from pipeline.context import Context
from stages.records import RolloutBatch
from stages.weights import snapshot_of
from tests.builders import token_batch

pytestmark = pytest.mark.gpu

PROMPTS = ["3142=", "9917=", "0123=", "5=", "1212="]
# Against transformers: vLLM's attention for float32 multiplies in TF32 (10 bits of mantissa), so its log-probs differ by
# some 1e-3 of the largest logits. Against an engine that started with the same weights: the same kernels, so rounding.
TOLERANCE, SAME_KERNELS = 5e-3, 1e-4


def build(role: str, name: str, **settings: Any) -> Any:
    entry = next(e for e in registry.entries(role) if e.name == name)
    held = settings.pop("held", {})
    return entry.cls(entry.config(**settings), **held)  # pyright: ignore[reportCallIssue]


@pytest.fixture(scope="module", autouse=True)
def backends() -> None:
    registry.discover("stages")


@pytest.fixture(params=[("torch", "torch"), ("hf", "torch"), ("vllm_async", "torch"), ("vllm_async", "flashinfer")])
def rollout(request: pytest.FixtureRequest, tiny_model: Path, make_context: Callable[..., Context]) -> Iterator[Any]:
    backend, sampler = request.param
    held = {"model": build("model", "hf", path=str(tiny_model)), "sampler": build("sampler", sampler)}
    stage = build("rollout", backend, n=4, max_new_tokens=8, temperature=0.7, held=held)
    try:
        stage.open(make_context("rollout", device="cuda"))
        yield stage
    finally:
        stage.close()


def perturb(module: Any) -> None:
    import torch

    torch.manual_seed(0)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.05 * torch.randn_like(p.cpu()).to(p.device))


def reference(module: Any, batch: RolloutBatch, temperature: float) -> np.ndarray:
    """float64 log-probs of the response tokens by a transformers forward, one row at a time."""
    import torch

    out: list[np.ndarray] = []
    for prompt, response in zip(batch.prompt_ids.rows(), batch.response_ids.rows(), strict=True):
        ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))[None]
        with torch.no_grad():
            logits = module(ids.to(module.device)).logits[0].double() / temperature
        logp = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
        out.append(logp[torch.arange(len(response)), torch.from_numpy(response.astype(np.int64))].cpu().numpy())
    return np.concatenate(out)


def test_log_probs_follow_the_weights(rollout: Any) -> None:
    """Drawn at temperature 0.7: before and after a push the log-probs are those of transformers on the same weights."""
    module = rollout.model.load("cuda")
    tokens = token_batch(rollout.model.render(rollout.model.tokenizer(), PROMPTS))
    batch = rollout.run(tokens)
    assert len(batch) == 4 * len(PROMPTS)
    assert np.abs(reference(module, batch, 0.7) - batch.log_probs.values).max() < TOLERANCE
    perturb(module)
    assert np.abs(reference(module, batch, 0.7) - batch.log_probs.values).max() > 20 * TOLERANCE
    rollout.receive(snapshot_of(module, 3))
    after = rollout.run(tokens)
    assert np.abs(reference(module, after, 0.7) - after.log_probs.values).max() < TOLERANCE
    assert set(after.version_min.tolist()) == {3}


@pytest.mark.parametrize("sampler", ["torch", "flashinfer"])
def test_a_push_equals_a_start(sampler: str, tiny_model: Path, tmp_path: Path, make_context: Callable[..., Context]) -> None:
    """vLLM with pushed weights gives, greedily, the tokens and log-probs of vLLM started on them: no tensor is stale,
    the tied head included."""
    base = build("model", "hf", path=str(tiny_model))
    module = base.load("cpu")
    perturb(module)
    base.save(module, str(tmp_path / "new"))
    batches = []
    for folder, push in ((tiny_model, True), (tmp_path / "new", False)):
        held = {"model": build("model", "hf", path=str(folder)), "sampler": build("sampler", sampler)}
        stage = build("rollout", "vllm_async", n=1, max_new_tokens=8, temperature=0.0, enforce_eager=True, held=held)
        try:
            stage.open(make_context("rollout", device="cuda"))
            tokens = token_batch(base.render(base.tokenizer(), PROMPTS))
            stage.run(tokens)  # fills the prefix cache with keys and values of the weights it started with
            if push:
                stage.receive(snapshot_of(module, 1))
            batches.append(stage.run(tokens))
        finally:
            stage.close()
    pushed, started = batches
    assert pushed.response_ids.values.tolist() == started.response_ids.values.tolist()
    assert np.abs(pushed.log_probs.values - started.log_probs.values).max() < SAME_KERNELS


def test_the_literal_command_learns(root: Path, tmp_path: Path) -> None:
    """`python run.py rollout=vllm_async sampler=flashinfer` reaches 0.95, and every draw was FlashInfer's."""
    command = [sys.executable, "run.py", "rollout=vllm_async", "sampler=flashinfer", f"hydra.run.dir={tmp_path}/run"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["eval/accuracy"] >= 0.95
    assert all(x["rollout/sampler_calls"] > 0 for x in lines[1:])
