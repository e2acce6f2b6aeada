"""What is looked for where, what is tokenised, and what is told about it; every caching backend the same."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.context import Context
from pipeline.metrics import summarise
from pipeline.process import Child
from stages.arena import Arena
from stages.tokenizer_cache.arena_store import ArenaStore
from stages.tokenizer_cache.caching import CachingTokenizer
from stages.tokenizer_cache.disk import DiskTokenizerCache, DiskTokenizerCacheConfig
from stages.tokenizer_cache.layered import LayeredTokenizerCache, LayeredTokenizerCacheConfig
from stages.tokenizer_cache.lru import ENTRY_BYTES
from stages.tokenizer_cache.memory import MemoryTokenizerCache, MemoryTokenizerCacheConfig
from stages.tokenizer_cache.shared import SharedTokenizerCache, SharedTokenizerCacheConfig
from tests.builders import plan_facts, prompt_batch
from tests.stages.tokenizer_cache.support import CountingModel
from tests.tiny_tokenizers import ids_of, write_tokenizer

CACHES: dict[str, tuple[type[CachingTokenizer], Any]] = {
    "memory": (MemoryTokenizerCache, MemoryTokenizerCacheConfig),
    "shared": (SharedTokenizerCache, SharedTokenizerCacheConfig),
    "disk": (DiskTokenizerCache, DiskTokenizerCacheConfig),
    "layered": (LayeredTokenizerCache, LayeredTokenizerCacheConfig),
}
SMALL: dict[str, dict[str, int]] = {
    "memory": {"max_bytes": 2**20},
    "shared": {"max_bytes": 2**20, "memory_bytes": 2**20},
    "disk": {"max_bytes": 2**22, "memory_bytes": 2**20},
    "layered": {"memory_bytes": 2**20, "shared_bytes": 2**20, "disk_bytes": 2**22},
}
Open = Callable[..., tuple[CachingTokenizer, CountingModel]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def cache_of(
    folder: Path, make_context: Callable[..., Context], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Open]:
    """A new run each time: only what is on disk is left of the one before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    opened: list[CachingTokenizer] = []

    def open_(name: str, **settings: Any) -> tuple[CachingTokenizer, CountingModel]:
        cls, config = CACHES[name]
        run_dir = tmp_path / f"run{len(opened)}"
        run_dir.mkdir()
        model = CountingModel(folder)
        cache: Any = cls(config(**SMALL[name] | settings), model)
        opened.append(cache)
        cache.open(make_context("tokenizer_cache", run_dir))
        return cache, model

    yield open_
    for cache in opened:
        cache.close()


def rows(batch: Any) -> list[list[int]]:
    return [r.tolist() for r in batch.prompt_ids.rows()]


each = pytest.mark.parametrize("name", CACHES)
kept_on_disk = pytest.mark.parametrize("name", ["disk", "layered"])
kept_in_arena = pytest.mark.parametrize("name", ["shared", "layered"])


# -- what is tokenised -----------------------------------------------------------------------------------------


@each
def test_misses_go_to_the_tokenizer_once_and_together(cache_of: Open, name: str) -> None:
    cache, model = cache_of(name)
    cache.run(prompt_batch(["a", "b", "a", "c"]))
    cache.run(prompt_batch(["c", "b"]))
    cache.run(prompt_batch(["d", "a", "d"], purpose="eval"))
    assert model.calls == [["a", "b", "c"], ["d"]]
    measured = summarise(cache.ctx.meter.drain())
    assert measured["tokenizer_cache/hit_ratio"] == (1 + 2) / (4 + 2)
    assert measured["tokenizer_cache/bytes"] > 0
    assert measured["tokenizer_cache/evictions"] == 0


@each
def test_messages_in_another_order_of_keys_are_another_prompt(cache_of: Open, name: str) -> None:
    """A template may show the order, for example of a tool call's arguments; equal content is then not equal ids."""
    cache, model = cache_of(name)
    message = {"role": "user", "content": "hi"}
    turned = dict(reversed(message.items()))
    assert json.dumps(message) != json.dumps(turned)
    cache.run(prompt_batch([[message], [turned]]))
    assert len(model.calls[0]) == 2


@each
def test_a_batch_of_hits_needs_no_tokenizer(cache_of: Open, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, model = cache_of(name)
    cache.run(prompt_batch(["a", "b"]))
    monkeypatch.setattr(model, "tokenizer", lambda: pytest.fail("the tokenizer was asked for"))
    assert rows(cache.run(prompt_batch(["b", "a"]))) == [ids_of("b"), ids_of("a")]


@each
def test_ids_under_another_limit_are_not_mixed_up(cache_of: Open, name: str, tmp_path: Path) -> None:
    limits = [(2, "right", "ab"), (3, "right", "abc"), (2, "left", "cd"), (0, "error", "abcd")]
    for tokens, truncation, want in limits * 2:
        cache, _ = cache_of(name, max_prompt_tokens=tokens, truncation=truncation)
        assert rows(cache.run(prompt_batch(["abcd"]))) == [ids_of(want)]
        cache.close()


@each
def test_what_a_caller_got_cannot_change_what_comes_later(cache_of: Open, name: str) -> None:
    cache, _ = cache_of(name)
    first = cache.run(prompt_batch(["ab"]))
    with pytest.raises(ValueError, match="read-only"):
        first.prompt_ids.values[:] = 0
    assert rows(cache.run(prompt_batch(["ab"]))) == [ids_of("ab")]


@each
def test_a_tokenizer_whose_state_was_changed_by_use_changes_no_ids(cache_of: Open, name: str) -> None:
    """Truncation and padding stay switched on in it (huggingface/datasets issue 5985)."""
    cache, model = cache_of(name)
    tokenizer: Any = model.tokenizer()
    tokenizer(["abc", "d"], truncation=True, max_length=2, padding=True)
    cache.run(prompt_batch(["abcdef"]))
    tokenizer(["abc", "d"], truncation=True, max_length=2, padding=True)
    assert rows(cache.run(prompt_batch(["abcdef", "xyz"]))) == [ids_of("abcdef"), ids_of("xyz")]
    assert model.calls == [["abcdef"], ["xyz"]]


@each
def test_sixteen_threads_get_what_one_gets(cache_of: Open, name: str) -> None:
    """huggingface/tokenizers issue 537, "Already borrowed": with two caches of different limits, and one model."""
    long, model = cache_of(name, max_prompt_tokens=64, truncation="left")
    short, _ = cache_of(name, max_prompt_tokens=16, truncation="left")
    short.model = model
    words, wrong = [f"{'x' * (i % 30)} {i}" for i in range(120)], list[Any]()

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for turn in range(25):
                some = rng.choices(words, k=6)
                cache, limit = ((long, 64), (short, 16))[(seed + turn) % 2]
                if rows(cache.run(prompt_batch(some))) != [ids_of(w)[-limit:] for w in some]:
                    wrong.append(some)
        except BaseException as e:
            wrong.append(e)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []
    tokenized = [p for call in model.calls for p in call]
    assert len(tokenized) <= 2 * len(words)  # each prompt once for each limit, also when many ask at the same time


@each
def test_a_forked_child_hits_and_tokenises(cache_of: Open, name: str) -> None:
    """A data loader's workers are forked; the threads of their parent do not exist in them."""
    cache, _ = cache_of(name)
    cache.run(prompt_batch(["a", "b"]))
    child = os.fork()
    if not child:
        try:
            right = rows(cache.run(prompt_batch(["b", "new", "a"]))) == [ids_of(p) for p in ("b", "new", "a")]
            cache.close()
        except BaseException:
            right = False
        os._exit(0 if right else 1)
    deadline, ended, status = time.monotonic() + 60, 0, 0
    while not ended and time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        time.sleep(0.01)
    if not ended:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended
    assert os.waitstatus_to_exitcode(status) == 0
    assert rows(cache.run(prompt_batch(["a", "new"]))) == [ids_of("a"), ids_of("new")]


@each
def test_an_error_of_the_tokenizer_is_raised_and_the_cache_goes_on(cache_of: Open, name: str) -> None:
    cache, _ = cache_of(name, max_prompt_tokens=2)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"row 1 has 3 tokens, tokenizer_cache\.max_prompt_tokens is 2"):
            cache.run(prompt_batch(["a", "abc"]))
    assert rows(cache.run(prompt_batch(["a"]))) == [ids_of("a")]


# -- memory ----------------------------------------------------------------------------------------------------


def test_the_least_recently_used_goes_first(cache_of: Open) -> None:
    cache, model = cache_of("memory", max_bytes=2 * (4 + ENTRY_BYTES))
    for prompt in ("a", "b", "a", "c", "a", "b"):  # c drops b, as a was used since; b then drops c
        assert rows(cache.run(prompt_batch([prompt]))) == [ids_of(prompt)]
    assert model.calls == [["a"], ["b"], ["c"], ["b"]]
    assert summarise(cache.ctx.meter.drain())["tokenizer_cache/evictions"] == 2


def test_bytes_are_those_of_the_entries(cache_of: Open) -> None:
    cache, _ = cache_of("memory")
    cache.run(prompt_batch(["a", "bcd"]))
    assert summarise(cache.ctx.meter.drain())["tokenizer_cache/bytes"] == 2 * ENTRY_BYTES + 4 * 4


def test_a_batch_larger_than_the_cache_is_still_right(cache_of: Open) -> None:
    cache, model = cache_of("memory", max_bytes=ENTRY_BYTES + 4)
    assert rows(cache.run(prompt_batch(["a", "b", "a", "c", "b"]))) == [ids_of(p) for p in "abacb"]
    assert model.calls == [["a", "b", "c"]]


def test_nothing_is_kept_of_zero_bytes(cache_of: Open) -> None:
    cache, model = cache_of("memory", max_bytes=0)
    cache.run(prompt_batch(["a", "a"]))
    cache.run(prompt_batch(["a"]))
    assert model.calls == [["a"], ["a"]]
    assert summarise(cache.ctx.meter.drain())["tokenizer_cache/bytes"] == 0


# -- the arena -------------------------------------------------------------------------------------------------


class Reader:
    """A reward in a process of its own: it has a run directory and keys."""

    def __init__(self, run_dir: Path):
        self._run_dir = run_dir

    def read(self, keys: list[bytes]) -> list[np.ndarray | None]:
        arena = Arena.of_run(self._run_dir)
        return [None] * len(keys) if arena is None else arena.get_many(keys)


def keys_of(batch: Any) -> list[bytes]:
    return [k.tobytes() for k in batch.prompt_key]


@kept_in_arena
def test_another_process_reads_the_ids_by_the_key_of_the_row(cache_of: Open, name: str) -> None:
    cache, _ = cache_of(name)
    child = Child(Reader, cache.ctx.run_dir, name="reader")
    try:
        child.wait_ready()
        for prompts in (["a", "bc", "a"], ["bc", "d"]):
            batch = cache.run(prompt_batch(prompts))
            found = child.call("read", keys_of(batch))
            assert [None if f is None else f.tolist() for f in found] == rows(batch) == [ids_of(p) for p in prompts]
        cache.close()
        assert child.call("read", keys_of(batch)) == [None, None]
    finally:
        child.kill()


@kept_in_arena
def test_what_the_arena_lost_is_put_back_when_it_is_used_again(cache_of: Open, name: str) -> None:
    cache, model = cache_of(name, memory_bytes=2**24, **({"shared_bytes": 2**16} if name == "layered" else {}))
    words = [f"{i} {'x' * 200}" for i in range(1500)]
    for i in range(0, 1500, 100):
        cache.run(prompt_batch(words[i : i + 100]))
    calls = len(model.calls)
    arena = Arena.of_run(cache.ctx.run_dir)
    assert arena is not None
    again = cache.run(prompt_batch(words[:5]))
    assert [f.tolist() for f in arena.get_many(keys_of(again)) if f is not None] == rows(again)
    assert len(model.calls) == calls


@pytest.mark.parametrize("name", ["memory", "disk"])
def test_rows_that_no_other_process_finds_have_no_key(cache_of: Open, name: str) -> None:
    cache, _ = cache_of(name)
    assert not cache.run(prompt_batch(["a", "b"])).prompt_key.any()
    assert not list(cache.ctx.run_dir.iterdir())


@kept_in_arena
def test_a_prompt_that_is_too_long_for_the_arena_has_no_key(cache_of: Open, name: str) -> None:
    cache, _ = cache_of(name)
    batch = cache.run(prompt_batch(["a", "x" * 2**18]))
    assert batch.prompt_key.any(axis=1).tolist() == [True, False]
    assert rows(batch) == [ids_of("a"), ids_of("x" * 2**18)]


def test_two_caches_of_a_run_share_its_arena(
    folder: Path, make_context: Callable[..., Context], tmp_path: Path
) -> None:
    caches = [
        SharedTokenizerCache(SharedTokenizerCacheConfig(**SMALL["shared"]), CountingModel(folder)) for _ in range(2)
    ]
    for cache in caches:
        cache.open(make_context("tokenizer_cache", tmp_path))
    caches[0].run(prompt_batch(["a"]))
    assert rows(caches[1].run(prompt_batch(["a"]))) == [ids_of("a")]
    assert caches[1].model.calls == []  # pyright: ignore[reportAttributeAccessIssue]
    caches[1].close()
    assert Arena.of_run(tmp_path) is not None
    caches[0].close()
    assert list(tmp_path.iterdir()) == []


# -- the disk --------------------------------------------------------------------------------------------------


@kept_on_disk
def test_a_second_run_tokenises_nothing_and_loads_no_tokenizer(cache_of: Open, name: str) -> None:
    words = [f"word {i}" for i in range(300)]
    first, model = cache_of(name)
    for i in range(0, 300, 30):
        first.run(prompt_batch(words[i : i + 30]))
    first.close()
    assert len(model.calls) == 10
    second, model = cache_of(name)
    for i in range(0, 300, 50):
        assert rows(second.run(prompt_batch(words[i : i + 50]))) == [ids_of(w) for w in words[i : i + 50]]
    assert model.calls == []
    assert model._tokenizer is None
    assert summarise(second.ctx.meter.drain())["tokenizer_cache/hit_ratio"] == 1


def test_what_the_disk_gives_is_kept_in_the_faster_layers(cache_of: Open) -> None:
    first, _ = cache_of("layered")
    first.run(prompt_batch(["a", "b"]))
    first.close()
    second, model = cache_of("layered")
    batch = second.run(prompt_batch(["a", "b"]))
    assert model.calls == []
    assert all(f is not None for layer in second._layers for f in layer.get(keys_of(batch)))
    assert len(second._layers) == 3


@pytest.mark.parametrize("left_out", ["memory_bytes", "shared_bytes", "disk_bytes"])
def test_a_layer_of_no_bytes_is_left_out(cache_of: Open, left_out: str) -> None:
    for _ in range(2):
        cache, model = cache_of("layered", **{left_out: 0})
        assert len(cache._layers) == 2
        batch = cache.run(prompt_batch(["a", "b", "a"]))
        assert rows(batch) == [ids_of("a"), ids_of("b"), ids_of("a")]
        assert batch.prompt_key.any() == (left_out != "shared_bytes")
        cache.close()
    assert len(model.calls) == (left_out == "disk_bytes")


def test_without_any_layer_it_still_tokenises_once_a_batch(cache_of: Open) -> None:
    cache, model = cache_of("layered", memory_bytes=0, shared_bytes=0, disk_bytes=0)
    assert rows(cache.run(prompt_batch(["a", "b", "a"]))) == [ids_of("a"), ids_of("b"), ids_of("a")]
    assert model.calls == [["a", "b"]]


# -- plan and advice -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "setting"), [("shared", "max_bytes"), ("layered", "shared_bytes")])
def test_an_arena_that_does_not_fit_is_found_before_training(folder: Path, name: str, setting: str) -> None:
    cls, config = CACHES[name]
    cache: Any = cls(config(**SMALL[name] | {setting: 2**43}), CountingModel(folder))
    [problem] = cache.check(plan_facts("tokenizer_cache"))
    assert problem.where == f"tokenizer_cache.{setting}"
    assert problem.what.startswith("an arena of 8 TiB is wanted, and ")
    assert problem.what.endswith("of memory are free")
    assert problem.level == "error"
    cache = cls(config(**SMALL[name]), CountingModel(folder))
    assert list(cache.check(plan_facts("tokenizer_cache"))) == []


@each
def test_advice_names_a_size_that_would_have_held_all(cache_of: Open, name: str) -> None:
    words = [f"{i} {'x' * 400}" for i in range(1500)]
    small = {"memory": {"max_bytes": 2**18}}.get(name, {"memory_bytes": 2**18})
    cache, _ = cache_of(name, **small)
    assert cache.advice() == []
    for _ in range(2):
        for i in range(0, 1500, 100):
            cache.run(prompt_batch(words[i : i + 100]))
    first, *sizes = cache.advice()
    cache.close()
    assert first.startswith("1,500 distinct prompts in 3,000 rows, hit ratio ")
    assert len(sizes) == len(cache._layers)
    advised = dict(s.split()[0].removeprefix("tokenizer_cache.").split("=") for s in sizes if "would have held" in s)
    assert {"memory": "max_bytes"}.get(name, "memory_bytes") in advised
    cache, _ = cache_of(name, **{k: int(v) for k, v in advised.items()})
    for _ in range(2):
        for i in range(0, 1500, 100):
            cache.run(prompt_batch(words[i : i + 100]))
    assert [layer.evictions for layer in cache._layers] == [0] * len(cache._layers)
    assert all("was enough" in s for s in cache.advice()[1:])


@pytest.mark.parametrize("length", [1, 10, 60, 256, 1000])
def test_the_arena_that_is_advised_holds_all(length: int, tmp_path: Path) -> None:
    entries = 3000
    small = ArenaStore(tmp_path, 2**20)
    room = small.room(entries, entries * length)
    small.close()
    store = ArenaStore(tmp_path, room)
    keys = [random.Random(i).randbytes(16) for i in range(entries)]
    for i in range(0, entries, 100):
        store.put([(k, np.arange(length, dtype=np.int32)) for k in keys[i : i + 100]])
    assert sum(f is not None for f in store.get(keys)) == entries
    assert store.evictions == 0
    store.close()


def test_a_size_that_is_far_too_large_is_told(cache_of: Open) -> None:
    cache, _ = cache_of("memory", max_bytes=2**30)
    cache.run(prompt_batch(["a", "b"]))
    assert cache.advice() == [
        "2 distinct prompts in 2 rows, hit ratio 0.000",
        "tokenizer_cache.max_bytes=1048576 (1 MiB) would have been enough; it was 1 GiB",
    ]
