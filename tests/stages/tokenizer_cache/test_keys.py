"""Under which key ids are kept: all that decides them is in it, and nothing that does not."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.records import Ragged
from stages.model import fingerprint as model_fingerprint
from stages.model.hf import HfModel, HfModelConfig
from stages.tokenizer_cache import TokenizerCacheConfig
from stages.tokenizer_cache.keys import fingerprint, key, keys
from tests.tiny_tokenizers import write_tokenizer


def model(folder: Path) -> HfModel:
    return HfModel(HfModelConfig(path=str(folder)))


def test_everything_that_decides_ids_is_in_the_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, base = write_tokenizer(tmp_path), TokenizerCacheConfig()
    seen = [fingerprint(model(folder), base)]
    seen.append(fingerprint(model(folder), TokenizerCacheConfig(max_prompt_tokens=5)))
    seen.append(fingerprint(model(folder), TokenizerCacheConfig(max_prompt_tokens=5, truncation="left")))
    seen.append(fingerprint(model(folder), TokenizerCacheConfig(max_prompt_tokens=5, truncation="right")))
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "chat_template.jinja",
        "config.json",
        "additional_chat_templates/tool.jinja",
    ):
        file = folder / name
        file.parent.mkdir(exist_ok=True)
        file.write_text((file.read_text() if file.exists() else "") + " ")
        seen.append(fingerprint(model(folder), base))
    for what, value in (("RENDERING", b"2"), ("LIBRARIES", ("tokenizers",))):
        monkeypatch.setattr(model_fingerprint, what, value)
        seen.append(fingerprint(model(folder), base))
    assert len(set(seen)) == len(seen)
    assert {len(f) for f in seen} == {16}


def test_a_file_that_moves_to_another_name_is_another_fingerprint(tmp_path: Path) -> None:
    folder, base = write_tokenizer(tmp_path), TokenizerCacheConfig()
    (folder / "vocab.json").write_text("{}")
    before = fingerprint(model(folder), base)
    (folder / "vocab.json").rename(folder / "merges.txt")
    assert fingerprint(model(folder), base) != before


def test_where_the_folder_lies_does_not_matter(tmp_path: Path) -> None:
    first, second = (write_tokenizer(tmp_path / name) for name in ("a", "b"))
    assert model(first).fingerprint() == model(second).fingerprint()


def test_a_template_that_writes_the_date_changes_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Tomorrow(date):
        @classmethod
        def today(cls) -> Any:
            return date(2100, 1, 1)

    folder = write_tokenizer(tmp_path)
    plain = model(folder).fingerprint()
    monkeypatch.setattr(model_fingerprint, "date", Tomorrow)
    assert model(folder).fingerprint() == plain
    (folder / "chat_template.jinja").write_text("{{ strftime_now('%d %b %Y') }}")
    later = model(folder).fingerprint()
    monkeypatch.undo()
    assert model(folder).fingerprint() != later


def test_using_the_tokenizer_does_not_change_the_fingerprint(tmp_path: Path) -> None:
    """Its state changes when it truncates or pads (huggingface/datasets issue 5985)."""
    one, cfg = model(write_tokenizer(tmp_path)), TokenizerCacheConfig()
    before = fingerprint(one, cfg)
    one.tokenizer()(["abc", "d"], truncation=True, max_length=2, padding=True)
    assert fingerprint(one, cfg) == before


def test_the_fingerprint_loads_no_tokenizer(tmp_path: Path, root: Path) -> None:
    code = (
        "import sys\nfrom stages.model.hf import HfModel, HfModelConfig\n"
        f"HfModel(HfModelConfig(path={str(write_tokenizer(tmp_path))!r})).fingerprint()\n"
        "print({'transformers', 'tokenizers', 'torch'} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"


def test_keys_are_the_same_in_every_process(tmp_path: Path, root: Path) -> None:
    folder = write_tokenizer(tmp_path)
    code = (
        "from stages.model.hf import HfModel, HfModelConfig\n"
        "from stages.tokenizer_cache import TokenizerCacheConfig\n"
        "from stages.tokenizer_cache.keys import fingerprint, key\n"
        f"model = HfModel(HfModelConfig(path={str(folder)!r}))\n"
        "print(key(fingerprint(model, TokenizerCacheConfig()), b'p').hex())"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True, env=env
        ).stdout
        for env in ({"PYTHONHASHSEED": "1"}, {"PYTHONHASHSEED": "2"})
    ]
    assert runs[0] == runs[1]
    assert runs[0].strip() == key(fingerprint(model(folder), TokenizerCacheConfig()), b"p").hex()


def test_the_key_is_the_one_of_the_published_hash() -> None:
    """XXH3 of 128 bits, big-endian, as xxhsum prints it: known for the empty input (xxHash's own test vectors)."""
    assert key(b"", b"").hex() == "99aa06d3014798d86001c324468d497f"


def test_a_prompt_of_any_length_has_a_key_of_16_bytes() -> None:
    """LMDB refuses keys above 511 bytes (ThoughtRiver/lmdb-embeddings PR 4)."""
    assert {len(key(bytes(16), b"x" * n)) for n in (0, 1, 511, 512, 600, 10_000, 10**6)} == {16}


texts = st.lists(st.text(max_size=20), max_size=8)


@given(texts)
def test_rows_have_the_keys_of_their_own_bytes(rows: list[str]) -> None:
    found = keys(bytes(16), Ragged.jsons(rows))
    assert found == [key(bytes(16), json.dumps(r, ensure_ascii=False, separators=(",", ":")).encode()) for r in rows]


messages = st.recursive(
    st.text(max_size=6) | st.integers() | st.booleans() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(messages, messages)
def test_different_prompts_have_different_keys(a: Any, b: Any) -> None:
    one, other = Ragged.jsons([a, b])[0].tobytes(), Ragged.jsons([a, b])[1].tobytes()
    assert (key(bytes(16), one) == key(bytes(16), other)) == (one == other)
    assert (one == other) == (json.dumps(a) == json.dumps(b))
