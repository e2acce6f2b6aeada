"""What is kept, what is dropped, what is tokenised, and under which key."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import tracemalloc
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.context import Context
from pipeline.metrics import summarise
from stages.model.hf import HfModel, HfModelConfig
from stages.tokenizer_cache import TokenizerCacheConfig
from stages.tokenizer_cache.keys import fingerprint, key
from stages.tokenizer_cache.memory import (
    ENTRY_BYTES,
    LeastRecentlyUsed,
    MemoryTokenizerCache,
    MemoryTokenizerCacheConfig,
)
from tests.builders import prompt_batch
from tests.tiny_tokenizers import ids_of, write_tokenizer


class CountingModel(HfModel):
    """Remembers what each call of `render` was given."""

    def __init__(self, folder: Path):
        super().__init__(HfModelConfig(path=str(folder)))
        self.calls: list[list[Any]] = []

    def render(self, tokenizer: Any, prompts: list[Any]) -> list[list[int]]:
        self.calls.append(list(prompts))
        return super().render(tokenizer, prompts)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def cache_of(folder: Path, make_context: Callable[..., Context]) -> Callable[..., tuple[MemoryTokenizerCache, Any]]:
    def open_(**settings: Any) -> tuple[MemoryTokenizerCache, CountingModel]:
        model = CountingModel(folder)
        cache = MemoryTokenizerCache(MemoryTokenizerCacheConfig(**settings), model)
        cache.open(make_context("tokenizer_cache"))
        return cache, model

    return open_


def test_misses_go_to_the_tokenizer_once_and_together(cache_of: Any) -> None:
    cache, model = cache_of()
    cache.run(prompt_batch(["a", "b", "a", "c"]))
    cache.run(prompt_batch(["c", "b"]))
    cache.run(prompt_batch(["d", "a", "d"]))
    assert model.calls == [["a", "b", "c"], ["d"]]
    measured = summarise(cache.ctx.meter.drain())
    assert measured["tokenizer_cache/hit_ratio"] == (1 + 2 + 2) / (4 + 2 + 3)
    assert measured["tokenizer_cache/bytes"] == 4 * (4 + ENTRY_BYTES)
    assert measured["tokenizer_cache/evictions"] == 0


def test_the_least_recently_used_goes_first(cache_of: Any) -> None:
    cache, model = cache_of(max_bytes=2 * (4 + ENTRY_BYTES))
    for prompt in ("a", "b", "a", "c", "a", "b"):  # c drops b, as a was used since; b then drops c
        assert cache.run(prompt_batch([prompt])).prompt_ids[0].tolist() == ids_of(prompt)
    assert model.calls == [["a"], ["b"], ["c"], ["b"]]
    assert summarise(cache.ctx.meter.drain())["tokenizer_cache/evictions"] == 2


def test_a_batch_larger_than_the_cache_is_still_right(cache_of: Any) -> None:
    cache, model = cache_of(max_bytes=ENTRY_BYTES + 4)
    batch = cache.run(prompt_batch(["a", "b", "a", "c", "b"]))
    assert [r.tolist() for r in batch.prompt_ids.rows()] == [ids_of(p) for p in "abacb"]
    assert model.calls == [["a", "b", "c"]]


def test_nothing_is_kept_of_zero_bytes(cache_of: Any) -> None:
    cache, model = cache_of(max_bytes=0)
    cache.run(prompt_batch(["a", "a"]))
    cache.run(prompt_batch(["a"]))
    assert model.calls == [["a"], ["a"]]
    assert summarise(cache.ctx.meter.drain())["tokenizer_cache/bytes"] == 0


def test_ids_under_another_limit_are_not_mixed_up(cache_of: Any) -> None:
    short, _ = cache_of(max_prompt_tokens=2, truncation="right")
    long, _ = cache_of(max_prompt_tokens=3, truncation="right")
    assert short.run(prompt_batch(["abcd"])).prompt_ids[0].tolist() == ids_of("ab")
    assert long.run(prompt_batch(["abcd"])).prompt_ids[0].tolist() == ids_of("abc")


# -- the store -----------------------------------------------------------------------------------------------

operations = st.lists(st.tuples(st.sampled_from("gp"), st.integers(0, 9), st.integers(0, 100)), max_size=60)


@given(operations, st.integers(0, 3 * (ENTRY_BYTES + 100)))
def test_the_store_is_a_least_recently_used_list_within_its_bytes(
    steps: list[tuple[str, int, int]], limit: int
) -> None:
    store, model, evictions = LeastRecentlyUsed(limit), OrderedDict[bytes, int](), 0
    for what, name, size in steps:
        k = bytes([name])
        if what == "g":
            found = store.get(k)
            assert (None if found is None else len(found)) == model.get(k)
            if k in model:
                model[k] = model.pop(k)
        else:
            store.put(k, np.zeros(size, np.int32))
            if k not in model and 4 * size + ENTRY_BYTES <= limit:
                model[k] = size
                while sum(4 * s + ENTRY_BYTES for s in model.values()) > limit:
                    del model[next(iter(model))]
                    evictions += 1
        assert store.bytes == sum(4 * s + ENTRY_BYTES for s in model.values()) <= limit
        assert (len(store), store.evictions) == (len(model), evictions)


def test_bytes_are_counted_as_python_takes_them() -> None:
    """What the store says it holds is what the process pays, within a quarter."""
    entries, length = 4096, 100
    tracemalloc.start()
    try:
        store, before = LeastRecentlyUsed(2**30), tracemalloc.get_traced_memory()[0]
        for i in range(entries):
            store.put(key(b"f", str(i).encode()), np.array([i] * length, np.int32))
        paid = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 0.75 < store.bytes / paid < 1.25


def test_an_operation_does_not_slow_down_with_the_number_of_entries() -> None:
    def seconds(entries: int) -> float:
        store, ids = LeastRecentlyUsed(entries * (ENTRY_BYTES + 4)), np.zeros(1, np.int32)
        for i in range(entries):
            store.put(i.to_bytes(8), ids)
        best = float("inf")
        for repeat in range(5):
            started = time.perf_counter()
            for i in range(500):  # each put drops the oldest
                store.put((entries * (repeat + 1) + i).to_bytes(9), ids)
                store.get((entries * (repeat + 1) + i).to_bytes(9))
            best = min(best, time.perf_counter() - started)
        return best

    assert seconds(50_000) < 10 * seconds(500)  # a linear search would take a hundred times as long


# -- keys ----------------------------------------------------------------------------------------------------


def test_everything_that_decides_ids_is_in_the_fingerprint(tmp_path: Path) -> None:
    folder, base = write_tokenizer(tmp_path), TokenizerCacheConfig()
    seen = [fingerprint(str(folder), "t", base)]
    seen.append(fingerprint(str(folder), "t2", base))
    seen.append(fingerprint(str(folder), None, base))
    seen.append(fingerprint(str(folder), "t", TokenizerCacheConfig(max_prompt_tokens=5)))
    seen.append(fingerprint(str(folder), "t", TokenizerCacheConfig(truncation="left")))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "added_tokens.json"):
        file = folder / name
        file.write_text((file.read_text() if file.exists() else "") + " ")
        seen.append(fingerprint(str(folder), "t", base))
    assert len(set(seen)) == len(seen)


def test_using_the_tokenizer_does_not_change_the_fingerprint(folder: Path) -> None:
    """Its state changes when it truncates or pads (huggingface/datasets issue 5985)."""
    tokenizer, cfg = HfModel(HfModelConfig(path=str(folder))).tokenizer(), TokenizerCacheConfig()
    before = fingerprint(str(folder), str(tokenizer.chat_template), cfg)
    tokenizer(["abc", "d"], truncation=True, max_length=2, padding=True)
    assert fingerprint(str(folder), str(tokenizer.chat_template), cfg) == before


def test_keys_are_the_same_in_every_process(folder: Path, root: Path) -> None:
    code = (
        "from stages.tokenizer_cache import TokenizerCacheConfig\n"
        "from stages.tokenizer_cache.keys import fingerprint, key\n"
        f"print(key(fingerprint({str(folder)!r}, 't', TokenizerCacheConfig()), b'p').hex())"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True, env=env
        ).stdout
        for env in ({"PYTHONHASHSEED": "1"}, {"PYTHONHASHSEED": "2"})
    ]
    assert runs[0] == runs[1]
    assert runs[0].strip() == key(fingerprint(str(folder), "t", TokenizerCacheConfig()), b"p").hex()


def test_bytes_do_not_move_between_fingerprint_and_prompt() -> None:
    assert key(b"ab", b"c") != key(b"a", b"bc")


def test_messages_in_another_order_of_keys_are_another_prompt(cache_of: Any) -> None:
    """A template may show the order, for example of a tool call's arguments; equal content is then not equal ids."""
    cache, model = cache_of()
    message = {"role": "user", "content": "hi"}
    turned = dict(reversed(message.items()))
    assert json.dumps(message) != json.dumps(turned)
    cache.run(prompt_batch([[message], [turned]]))
    assert len(model.calls[0]) == 2
