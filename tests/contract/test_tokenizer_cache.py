"""What every token cache must do: give what tokenising gives, and say which row it cannot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline import registry
from pipeline.context import Context
from pipeline.metrics import summarise
from pipeline.registry import Entry
from stages.arena import Arena
from stages.model.hf import HfModel, HfModelConfig
from stages.records import PromptBatch, Sampling, TokenBatch
from stages.tokenizer_cache import TokenizerCache
from tests.builders import plan_facts, prompt_batch
from tests.tiny_tokenizers import ASSISTANT, BOS, USER, ids_of, write_tokenizer

registry.discover("stages.tokenizer_cache")
Open = Callable[..., TokenizerCache]


@pytest.fixture(params=registry.entries("tokenizer_cache"), ids=lambda e: e.name)
def entry(request: pytest.FixtureRequest) -> Entry:
    return request.param


@pytest.fixture(autouse=True)
def _own_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"), adds_bos=True)


@pytest.fixture
def open_cache(entry: Entry, folder: Path, make_context: Callable[..., Context]) -> Iterator[Open]:
    opened: list[TokenizerCache] = []

    def open_(**settings: Any) -> TokenizerCache:
        cls: Any = entry.cls
        cache = cls(entry.config(**settings), HfModel(HfModelConfig(path=str(folder))))
        opened.append(cache)
        cache.open(make_context("tokenizer_cache"))
        return cache

    yield open_
    for cache in opened:
        cache.close()
        cache.close()


def ids(batch: TokenBatch) -> list[list[int]]:
    return [r.tolist() for r in batch.prompt_ids.rows()]


def test_ids_are_those_of_the_prompts(open_cache: Open) -> None:
    chat = [{"role": "user", "content": "hi"}]
    prompts: list[Any] = ["a", "bb\n", chat, "a", "\u2028é"]
    batch = open_cache().run(prompt_batch(prompts))
    chat_ids = [BOS, USER, *ids_of("hi"), ASSISTANT]
    assert ids(batch) == [
        [BOS, *ids_of("a")],
        [BOS, *ids_of("bb\n")],
        chat_ids,
        [BOS, *ids_of("a")],
        [BOS, *ids_of("\u2028é")],
    ]
    assert batch.prompt_ids.values.dtype == np.int32


def test_what_comes_again_equals_what_came_first(open_cache: Open) -> None:
    cache, rng = open_cache(), np.random.default_rng(0)
    words = [f"prompt {'x' * i}" for i in range(20)]
    for _ in range(5):
        chosen = [words[i] for i in rng.integers(0, 20, 15)]
        assert ids(cache.run(prompt_batch(chosen))) == [[BOS, *ids_of(w)] for w in chosen]


def test_all_columns_are_carried_over(open_cache: Open) -> None:
    prompts = prompt_batch(
        ["a", "b"],
        [{"x": 1}, "2"],
        step=7,
        purpose="eval",
        sampling=Sampling(n=1, temperature=0),
        data_source="here",
        extra=[{"i": 1}, {}],
        first_row=40,
    )
    batch = open_cache().run(prompts)
    carried = PromptBatch(**{f.name: getattr(batch, f.name) for f in fields(PromptBatch)})
    assert carried.same(prompts)


def test_ids_cannot_be_written_to(open_cache: Open) -> None:
    cache = open_cache()
    for _ in range(2):
        with pytest.raises(ValueError, match="read-only"):
            cache.run(prompt_batch(["a", "b"])).prompt_ids.values[0] = 9


def test_a_part_of_a_batch_gives_the_same(open_cache: Open) -> None:
    """`grain == "row"`: a runner may feed any rows."""
    prompts = prompt_batch(["a", "bb", "a", "ccc"])
    whole, cache = open_cache().run(prompts), open_cache()
    parts = [cache.run(p) for p in prompts.split([1, 0, 2, 1])]
    assert TokenBatch.concat(parts).same(whole)


@pytest.mark.parametrize(("truncation", "cut"), [("left", slice(-4, None)), ("right", slice(0, 4))])
def test_long_prompts_are_cut_on_the_side_that_is_named(open_cache: Open, truncation: str, cut: slice) -> None:
    cache = open_cache(max_prompt_tokens=4, truncation=truncation)
    full = [BOS, *ids_of("abcdef")]
    for _ in range(2):
        assert ids(cache.run(prompt_batch(["abcdef", "abc", "a"]))) == [
            full[cut],
            [BOS, *ids_of("abc")],
            [BOS, *ids_of("a")],
        ]


def test_a_limit_that_is_not_reached_changes_nothing(open_cache: Open) -> None:
    prompts = prompt_batch(["<user>a", "bb"])
    assert ids(open_cache(max_prompt_tokens=4096).run(prompts)) == ids(open_cache().run(prompts))


def test_a_long_prompt_is_refused_by_row_and_lengths(open_cache: Open) -> None:
    cache = open_cache(max_prompt_tokens=4)
    cache.run(prompt_batch(["abc"]))
    for _ in range(2):  # also when it comes again
        with pytest.raises(
            ValueError, match=r"row 41 has 7 tokens, tokenizer_cache\.max_prompt_tokens is 4 \(and 1 more"
        ):
            cache.run(prompt_batch(["abc", "abcdef", "abcdefg"], first_row=40))
    assert ids(cache.run(prompt_batch(["abc"]))) == [[BOS, *ids_of("abc")]]


def test_metrics_are_of_training_only(open_cache: Open) -> None:
    cache = open_cache()
    cache.run(prompt_batch(["a", "b"], purpose="eval"))
    assert cache.ctx.meter.drain() == {}
    cache.run(prompt_batch(["c"]))
    measured = summarise(cache.ctx.meter.drain())
    assert set(measured) == {"tokenizer_cache/hit_ratio", "tokenizer_cache/bytes", "tokenizer_cache/evictions"}
    assert measured["tokenizer_cache/hit_ratio"] == 0


def test_a_key_names_the_ids_in_the_runs_arena_or_nothing(open_cache: Open) -> None:
    """What other processes of the run find under the key of a row are the row's ids."""
    cache = open_cache()
    for prompts in (["a", "bb", "a"], ["bb", "c"]):
        batch = cache.run(prompt_batch(prompts))
        arena = Arena.of_run(cache.ctx.run_dir)
        for key, wanted in zip(batch.prompt_key, ids(batch), strict=True):
            if key.any():
                assert arena is not None
                [found] = arena.get_many([key.tobytes()])
                assert found is not None
                assert found.tolist() == wanted
    keys = [k.tobytes() for k in batch.prompt_key]
    assert len(set(keys)) in (1, 2)  # none, or one a prompt


def test_advice_is_a_sentence_each(open_cache: Open) -> None:
    cache = open_cache()
    assert cache.advice() == []
    cache.run(prompt_batch(["a"]))
    assert all(isinstance(a, str) and a and "\n" not in a for a in cache.advice())


def test_there_is_no_state(open_cache: Open) -> None:
    cache = open_cache()
    cache.run(prompt_batch(["a"]))
    assert cache.state_dict() == {}
    other = open_cache()
    other.load_state_dict({})
    assert other.run(prompt_batch(["a"])).same(cache.run(prompt_batch(["a"])))


def test_the_plan_finds_what_cannot_work(entry: Entry, folder: Path) -> None:
    def where(facts: dict[str, Any], **settings: Any) -> list[str]:
        cls: Any = entry.cls
        cache = cls(entry.config(**settings), HfModel(HfModelConfig(path=str(folder))))
        return [p.where for p in cache.check(plan_facts("tokenizer_cache", **facts))]

    assert where({}) == where({"context_length": 128, "chat_prompts": True, "chat_template": True}) == []
    assert where({}, truncation="middle") == ["tokenizer_cache.truncation"]
    assert where({"context_length": 128}, max_prompt_tokens=127) == []
    assert where({"context_length": 128}, max_prompt_tokens=128) == ["tokenizer_cache.max_prompt_tokens"]
    assert where({"chat_prompts": True, "chat_template": False}) == ["tokenizer_cache"]


def test_a_prompt_without_tokens_is_refused(entry: Entry, tmp_path: Path, make_context: Callable[..., Context]) -> None:
    cls: Any = entry.cls
    cache = cls(entry.config(), HfModel(HfModelConfig(path=str(write_tokenizer(tmp_path / "t", adds_bos=False)))))
    cache.open(make_context("tokenizer_cache"))
    with pytest.raises(ValueError, match="row 1 has no tokens"):
        cache.run(prompt_batch(["a", ""]))
    cache.close()
