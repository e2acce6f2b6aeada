"""What the plan says before an engine starts; nothing here imports vLLM."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import Device, Mode
from pipeline.errors import Problem
from stages.model.hf import HfModel, HfModelConfig
from stages.rollout import vllm_async
from stages.rollout.vllm_async import VllmAsyncRollout, VllmAsyncRolloutConfig
from stages.sampler.torch import TorchSampler, TorchSamplerConfig
from tests.builders import plan_facts

FITS = {"max_position_embeddings": 128, "head_dim": 32}


def check(
    folder: Path, config: dict[str, Any], *, device: str = "cpu", mode: Mode = Mode.run, prompt: int = 20, **cfg: Any
) -> list[Problem]:
    (folder / "config.json").write_text(json.dumps({"model_type": "any", **config}))
    model = HfModel(HfModelConfig(path=str(folder)))
    rollout = VllmAsyncRollout(VllmAsyncRolloutConfig(**cfg), model, TorchSampler(TorchSamplerConfig()))
    facts = plan_facts("rollout", max_prompt_tokens=prompt)
    run = replace(facts.root.run, device=Device(device))
    return list(rollout.check(replace(facts, root=replace(facts.root, run=run, mode=mode))))


def test_settings_that_fit_have_no_problem(tmp_path: Path) -> None:
    assert check(tmp_path, FITS) == []
    assert check(tmp_path, FITS, max_model_len=128, max_new_tokens=108) == []


@pytest.mark.parametrize(
    "config",
    [
        {"head_dim": 48},
        {"hidden_size": 96, "num_attention_heads": 2},
        {"n_embd": 96, "n_head": 2},
        {"head_dim": 32, "text_config": {"head_dim": 48}},
        {"text_config": {"hidden_size": 96, "num_attention_heads": 2}},
    ],
)
def test_a_head_size_that_the_cpu_build_lacks_is_an_error_of_the_plan(tmp_path: Path, config: dict[str, Any]) -> None:
    [problem] = check(tmp_path, config)
    assert (problem.where, problem.level) == ("model.path", "error")
    assert "heads of size 48" in problem.what
    assert "32, 64, 80" in problem.hint


def test_a_head_size_that_is_there_is_found_in_nested_configs(tmp_path: Path) -> None:
    assert check(tmp_path, {"head_dim": 48, "text_config": {"head_dim": 64}}) == []
    assert check(tmp_path, {"text_config": {"hidden_size": 128, "num_attention_heads": 2}}) == []


def test_head_sizes_matter_where_the_run_will_be_on_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check(tmp_path, {"head_dim": 48}, device="cuda") == []
    monkeypatch.setattr(vllm_async, "has_cuda", lambda: True)
    assert check(tmp_path, {"head_dim": 48}, device="auto") == []
    monkeypatch.setattr(vllm_async, "has_cuda", lambda: False)
    assert [p.level for p in check(tmp_path, {"head_dim": 48}, device="auto")] == ["error"]
    assert [p.level for p in check(tmp_path, {"head_dim": 48}, device="auto", mode=Mode.plan)] == ["warning"]


@pytest.mark.parametrize(
    ("config", "cfg", "where", "says"),
    [
        (FITS, {"max_model_len": 129}, "rollout.max_model_len", "129 tokens are more than the model's 128"),
        (FITS, {"max_model_len": 83}, "rollout.max_model_len", "64 new tokens after a prompt of 20 do not fit"),
        ({}, {"max_new_tokens": 4077}, "rollout.max_model_len", "do not fit the engine's 4096 tokens"),
        (FITS, {"max_new_tokens": 109}, "rollout.max_new_tokens", "do not fit the model's 128 positions"),
        (FITS, {"temperature": 1e-39}, "rollout.temperature", "is not allowed"),
    ],
)
def test_what_does_not_fit_is_said_once(
    tmp_path: Path, config: dict[str, Any], cfg: dict[str, Any], where: str, says: str
) -> None:
    [problem] = check(tmp_path, config, **cfg)
    assert (problem.where, problem.level) == (where, "error")
    assert says in problem.what
    assert problem.hint
