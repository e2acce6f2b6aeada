"""The model component on small folders: what it refuses, what it renders, what it saves."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stages.model.hf import HfModel, HfModelConfig
from tests.builders import plan_facts
from tests.tiny_tokenizers import ASSISTANT, BOS, EOS, USER, ids_of, write_tokenizer


def model(folder: Path, **settings: Any) -> HfModel:
    return HfModel(HfModelConfig(path=str(folder), **settings))


@pytest.fixture
def copied(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy of the base model that a test may break."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def problems(folder: Path, **settings: Any) -> list[str]:
    return [str(p) for p in model(folder, **settings).check(plan_facts("model"))]


def edit(file: Path, **changes: Any) -> None:
    old = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({k: v for k, v in (old | changes).items() if v is not None}))


# -- plan time -----------------------------------------------------------------------------------------------


def test_facts_are_those_of_the_config(tiny_model: Path) -> None:
    config = json.loads((tiny_model / "config.json").read_text())
    facts = model(tiny_model).facts()
    assert facts["context_length"] == config["max_position_embeddings"]
    assert facts["vocab_size"] == config["vocab_size"]
    assert facts["hidden_size"] == config["hidden_size"]
    assert facts["layers"] == config["num_hidden_layers"]
    assert facts["chat_template"] is True  # the one of data/base, which joins what was said


def test_a_chat_template_is_seen_at_plan_time(tmp_path: Path) -> None:
    assert model(write_tokenizer(tmp_path / "a", template=True)).facts()["chat_template"] is True
    assert model(write_tokenizer(tmp_path / "b", template=False)).facts()["chat_template"] is False


def test_a_good_folder_has_no_problems(tiny_model: Path) -> None:
    assert problems(tiny_model) == []


def test_problems_of_a_folder(copied: Path, tmp_path: Path) -> None:
    assert "there is no folder" in problems(tmp_path / "none")[0]
    assert "is not a folder" in problems(copied / "config.json")[0]
    (copied / "config.json").write_text("{")
    (copied / "tokenizer.json").unlink()
    (copied / "model.safetensors").rename(copied / "pytorch_model.bin")
    found = "\n".join(problems(copied))
    assert found.count("model.path: ") == 3
    assert "no usable config.json" in found
    assert "no tokenizer.json" in found
    assert "pytorch_model.bin holds pickled weights" in found


def test_weights_that_are_a_pointer_or_cut_short_are_found(copied: Path) -> None:
    file = copied / "model.safetensors"
    content = file.read_bytes()
    for bad in (b"version https://git-lfs.github.com/spec/v1\n", content[:40], b""):
        file.write_bytes(bad)
        assert any("no safetensors file (a Git LFS pointer?)" in p for p in problems(copied))
    file.write_bytes(content)
    edit(copied / "model.safetensors.index.json", weight_map={"a": "model.safetensors", "b": "gone.safetensors"})
    (found,) = problems(copied)
    assert "gone.safetensors is missing" in found


def test_settings_have_allowed_values(tiny_model: Path) -> None:
    found = problems(tiny_model, dtype="float23", attn_implementation="flash")
    assert any("model.dtype" in p and "did you mean 'float32'" in p for p in found)
    assert any("model.attn_implementation" in p and "sdpa" in p for p in found)


def test_a_relative_path_is_looked_for_here_then_in_the_checkout(
    root: Path, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(copied.parent)
    assert model(Path("data/base")).path == str(root / "data" / "base")
    assert model(Path("model")).path == str(copied)


def test_planning_imports_nothing_heavy(root: Path) -> None:
    code = (
        "import sys\n"
        "from pipeline.config import RootConfig\nfrom pipeline.plan import Facts\n"
        "from stages.model.hf import HfModel, HfModelConfig\n"
        "m = HfModel(HfModelConfig(path='data/base')); m.facts()\n"
        "assert not list(m.check(Facts(key='model', root=RootConfig())))\n"
        "print(sorted({'torch', 'transformers', 'tokenizers', 'safetensors'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


# -- rendering -----------------------------------------------------------------------------------------------

CHAT = [{"role": "user", "content": "hi"}]


def rendered(folder: Path, *prompts: Any) -> list[list[int]]:
    m = model(folder)
    return m.render(m.tokenizer(), list(prompts))


@pytest.mark.parametrize("template_bos", [False, True])
@pytest.mark.parametrize("adds_bos", [False, True])
def test_bos_stands_once_where_template_or_tokenizer_put_it(tmp_path: Path, template_bos: bool, adds_bos: bool) -> None:
    """Four combinations (huggingface/transformers issue 37686, unslothai/unsloth PR 10312)."""
    folder = write_tokenizer(tmp_path, template_bos=template_bos, adds_bos=adds_bos)
    chat, text, text_with_bos = rendered(folder, CHAT, "hi", "<bos>hi")
    turn = [USER, *ids_of("hi"), ASSISTANT]
    assert chat == ([BOS, *turn] if template_bos or adds_bos else turn)
    assert text == ([BOS, *ids_of("hi")] if adds_bos else ids_of("hi"))
    assert text_with_bos == [BOS, *ids_of("hi")]


def test_no_bos_where_the_tokenizer_has_none(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, has_bos=False)
    assert rendered(folder, CHAT, "hi") == [[USER, *ids_of("hi"), ASSISTANT], ids_of("hi")]


def test_texts_and_chats_keep_their_places(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path)
    other = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    out = rendered(folder, "a", CHAT, "b\n\u2028c", other)
    assert out[0] == ids_of("a")
    assert out[2] == ids_of("b\n\u2028c")
    assert out[1] == [USER, *ids_of("hi"), ASSISTANT]
    assert len(out[3]) == 5
    assert rendered(folder) == []


def test_rows_are_rendered_as_if_alone(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, adds_bos=True)
    prompts: list[Any] = ["a", "bbb" * 50, "", CHAT]
    assert rendered(folder, *prompts) == [rendered(folder, p)[0] for p in prompts]


def test_messages_are_not_changed(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": " hi "}]
    rendered(write_tokenizer(tmp_path), chat)
    assert chat == [{"role": "user", "content": " hi "}]


def test_a_chat_without_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no chat template"):
        rendered(write_tokenizer(tmp_path, template=False), CHAT)


def test_what_a_template_refuses_is_said_with_the_roles(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path)
    (folder / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match="with roles user, user: roles must alternate"):
        rendered(folder, CHAT * 2)


def test_the_base_model_reads_digits(tiny_model: Path) -> None:
    m = model(tiny_model)
    tokenizer = m.tokenizer()
    (ids,) = m.render(tokenizer, ["7331="])
    assert tokenizer.decode(ids) == "7331="
    assert len(ids) == 5


# -- weights -------------------------------------------------------------------------------------------------


def test_end_ids_are_of_generation_config_and_tokenizer(copied: Path) -> None:
    own = json.loads((copied / "config.json").read_text())["eos_token_id"]
    edit(copied / "generation_config.json", eos_token_id=[7, own, 5])
    assert model(copied).end_ids() == tuple(sorted({5, 7, own}))
    edit(copied / "generation_config.json", eos_token_id=9)
    assert model(copied).end_ids() == tuple(sorted({9, own}))
    (copied / "generation_config.json").unlink()
    edit(copied / "config.json", eos_token_id=11)
    assert model(copied).end_ids() == tuple(sorted({11, own}))


def test_end_ids_of_a_small_tokenizer(tmp_path: Path) -> None:
    assert model(write_tokenizer(tmp_path)).end_ids() == (EOS,)


def test_each_load_makes_new_weights_in_eval_mode(tiny_model: Path) -> None:
    import torch

    m = model(tiny_model)
    first, second = m.load("cpu"), m.load("cpu")
    assert not first.training
    weight = first.get_input_embeddings().weight
    assert weight.dtype == torch.float32
    weight.data.zero_()
    assert second.get_input_embeddings().weight.abs().sum() > 0


def test_the_configured_dtype_and_attention_are_used(tiny_model: Path) -> None:
    import torch

    m = model(tiny_model, dtype="bfloat16", attn_implementation="eager")
    module = m.load("cpu")
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    assert module.config._attn_implementation == "eager"
    assert m.dtype_name == "bfloat16"


def test_sampling_values_of_a_checkpoint_are_left_behind(copied: Path, tmp_path: Path) -> None:
    edit(copied / "generation_config.json", temperature=0.3, top_k=20, repetition_penalty=1.3, do_sample=True)
    m = model(copied)
    module = m.load("cpu")
    loaded = module.generation_config.to_diff_dict()
    m.save(module, str(tmp_path / "saved"))
    saved = json.loads((tmp_path / "saved" / "generation_config.json").read_text())
    for values in (loaded, saved):
        assert set(values) - {"transformers_version"} == {"bos_token_id", "eos_token_id", "pad_token_id"}


def test_missing_weights_are_an_error(copied: Path) -> None:
    from safetensors.numpy import load_file, save_file

    tensors = load_file(copied / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, copied / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks weights of LlamaForCausalLM: model\.norm\.weight"):
        model(copied).load("cpu")


def test_pickled_weights_are_not_loaded(copied: Path) -> None:
    import torch

    (copied / "model.safetensors").unlink()
    torch.save({}, copied / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        model(copied).load("cpu")


def test_code_in_the_folder_is_not_run(copied: Path) -> None:
    mark = copied / "ran"
    (copied / "modeling_own.py").write_text(f"open({str(mark)!r}, 'w')\n")
    auto = {"AutoConfig": "modeling_own.C", "AutoModelForCausalLM": "modeling_own.M"}
    edit(copied / "config.json", model_type="own", auto_map=auto)
    with pytest.raises(ValueError, match=r"trust_remote_code|model type"):
        model(copied).load("cpu")
    assert not mark.exists()


def test_what_is_saved_loads_with_from_pretrained(tiny_model: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    m, folder = model(tiny_model), tmp_path / "saved"
    module = m.load("cpu")
    with torch.no_grad():
        module.get_input_embeddings().weight.add_(0.5)
    m.save(module, str(folder))
    assert list(folder.glob("*.safetensors"))
    assert not list(folder.glob("*.bin"))
    again, ids = AutoModelForCausalLM.from_pretrained(folder), torch.tensor([[20, 21, 22]])
    with torch.no_grad():
        np.testing.assert_array_equal(again(ids).logits, module(ids).logits)
    assert again.get_output_embeddings().weight is again.get_input_embeddings().weight  # tied, as the base is
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("4410=")["input_ids"] == m.tokenizer()("4410=")["input_ids"]
    assert list(model(folder).check(plan_facts("model"))) == []
    assert model(folder).end_ids() == m.end_ids()


def test_only_pretrained_models_are_saved(tiny_model: Path, tmp_path: Path) -> None:
    import torch

    with pytest.raises(TypeError, match="Linear cannot be saved"):
        model(tiny_model).save(torch.nn.Linear(1, 1), str(tmp_path / "saved"))
    assert not (tmp_path / "saved").exists()


def test_loading_shows_no_progress_bar(tiny_model: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from transformers.utils import logging

    m = model(tiny_model)
    m.save(m.load("cpu"), str(tmp_path / "saved"))
    assert capfd.readouterr().err == ""
    assert logging.is_progress_bar_enabled()
