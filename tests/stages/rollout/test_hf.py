"""What `generate` must not do on its own account."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stages.model.hf import HfModel
from stages.records import Finish
from stages.rollout import hf
from tests.builders import token_batch
from tests.stages.rollout.test_in_process import open_rollout
from tests.tiny_models import END, load, save_model, set_generation_config


def test_padding_stands_at_the_left() -> None:
    ids, mask = hf._pad_left([np.array([5, 6, 7]), np.array([8])])
    assert ids.tolist() == [[5, 6, 7], [0, 0, 8]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("gqa") / "model")


@pytest.mark.parametrize("token", [0, END])
def test_pads_and_ends_that_were_sampled_stay_and_no_others_come(folder: Path, make_context: Any, token: int) -> None:
    """verl issue 3805, OpenRLHF issue 238. A model that prefers one token always: the end token ends the row at
    once; the padding token is a token like any other, and fills the row to its limit."""
    rollout = open_rollout("hf", folder, make_context("rollout"), n=1, max_new_tokens=4, temperature=0.0)
    with torch.no_grad():
        rollout.module.model.norm.register_forward_hook(lambda _, __, hidden: torch.ones_like(hidden))
        rollout.module.lm_head.weight.zero_()
        rollout.module.lm_head.weight[token] = 1.0
    out = rollout.run(token_batch([[5, 6], [7]]))
    made = [END] if token == END else [0] * 4
    assert [r.tolist() for r in out.response_ids.rows()] == [made, made]
    assert set(out.finish.tolist()) == {Finish.STOP if token == END else Finish.LENGTH}


def test_no_processor_of_the_model_folder_is_at_work(
    folder: Path, make_context: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """NeMo-RL issue 3497: values a folder can bring that change scores or lengths, left on the module by its loader."""
    other = save_model(tmp_path / "other", load(folder))
    leaks = {"temperature": 0.1, "top_k": 1, "top_p": 0.1, "repetition_penalty": 1.5, "no_repeat_ngram_size": 1}
    lengths = {"min_new_tokens": 12, "max_length": 4, "suppress_tokens": [5], "forced_eos_token_id": END}
    set_generation_config(other, do_sample=True, **leaks, **lengths)
    assert load(other).generation_config.repetition_penalty == 1.5
    monkeypatch.setattr(HfModel, "load", lambda self, device: load(Path(self.path)))
    made = [
        open_rollout("hf", f, make_context("rollout"), n=4, max_new_tokens=12).run(token_batch([[5, 6], [7]]))
        for f in (folder, other)
    ]
    assert made[0].same(made[1])
    assert made[0].response_ids.lengths.min() < 12
