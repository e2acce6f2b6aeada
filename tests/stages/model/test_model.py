"""What a `config.json` says of the language model, wherever it stands in it."""

from __future__ import annotations

import json
from pathlib import Path

from stages.model import context_length
from stages.model.hf import HfModel, HfModelConfig


def test_context_length_is_found_where_configs_have_it() -> None:
    assert context_length({"max_position_embeddings": 5}) == 5
    assert context_length({"n_positions": 6}) == 6
    assert context_length({"text_config": {"max_position_embeddings": 7}}) == 7
    assert context_length({}) is None


def test_facts_of_a_nested_config_are_those_of_the_language_model(tmp_path: Path) -> None:
    text = {"max_position_embeddings": 7, "vocab_size": 11, "hidden_size": 13, "num_hidden_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "seeing", "hidden_size": 99, "text_config": text}))
    facts = HfModel(HfModelConfig(path=str(tmp_path))).facts()
    found = [facts.get(name) for name in ("context_length", "vocab_size", "hidden_size", "layers")]
    assert found == [7, 11, 13, 3]
