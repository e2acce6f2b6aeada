"""Prompts that cross to another process by name, through a real arena: equal to the last byte, or sent whole."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.context import Context
from pipeline.metrics import summarise
from pipeline.placement import ProcessStage
from pipeline.records import Ragged, Rows, Unresolved
from pipeline.registry import PartSpec
from stages.arena import Arena
from stages.by_reference import NamedPrompts
from stages.model.hf import HfModel, HfModelConfig
from stages.records import RolloutBatch, TokenBatch
from stages.reward.rule import RuleReward, RuleRewardConfig
from stages.rollout.torch import TorchRollout, TorchRolloutConfig
from stages.sampler.torch import TorchSampler, TorchSamplerConfig
from tests.builders import rollout_batch, token_batch

PROMPTS = [list(range(10 * i, 10 * i + 5 + i)) for i in range(1, 7)]
KEYS = [bytes([i]) * 16 for i in range(1, 7)]


@pytest.fixture
def ctx(make_context: Callable[..., Context]) -> Context:
    return make_context("node")


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    """That of the run directory, with all prompts but the last two."""
    made = Arena.create(2**20)
    made.publish(tmp_path)
    made.put_many([(k, np.array(p, np.int32)) for k, p in zip(KEYS[:4], PROMPTS[:4], strict=True)])
    yield made
    made.close()


def tokens(rows: int = 4, keys: list[bytes] | None = None) -> TokenBatch:
    return token_batch(PROMPTS[:rows], keys=(KEYS if keys is None else keys)[:rows])


def rollouts() -> RolloutBatch:
    responses = [[50 + i, 51] for i in range(12)]
    return rollout_batch(PROMPTS[:4], responses, n=3, keys=KEYS[:4], answers=["1", "2", "3", "4"])


def crossed(packed: Any, ctx: Context) -> Rows:
    return pickle.loads(pickle.dumps(packed)).unpack(ctx)


@pytest.mark.parametrize("rows", [tokens(), rollouts(), rollouts().take([7, 2, 7, 0])], ids=["tokens", "n", "some"])
def test_it_comes_out_as_it_went_in(arena: Arena, ctx: Context, rows: TokenBatch | RolloutBatch) -> None:
    packed: Any = rows.pack(ctx)
    assert isinstance(packed, NamedPrompts)
    assert packed.named == len(rows)
    assert len(packed.rest.prompt_ids.values) == 0, "no ids are sent"
    assert crossed(packed, ctx).same(rows)


def test_a_row_without_a_key_is_sent(arena: Arena, ctx: Context) -> None:
    given = tokens(keys=[KEYS[0], bytes(16), KEYS[2], bytes(16)])
    packed: Any = given.pack(ctx)
    assert packed.named == 2
    assert [r.tolist() for r in packed.rest.prompt_ids.rows()] == [[], PROMPTS[1], [], PROMPTS[3]]
    assert crossed(packed, ctx).same(given)


def test_where_nothing_can_be_named_the_record_itself_is_sent(tmp_path: Path, ctx: Context) -> None:
    given = tokens()
    assert given.pack(ctx) is given, "there is no arena"
    arena = Arena.create(2**20)
    arena.publish(tmp_path)
    unnamed = token_batch(PROMPTS)
    assert unnamed.pack(ctx) is unnamed
    assert (unnamed.named, unnamed.unpack(ctx)) == (0, unnamed)
    assert len(tokens(0).pack(ctx).unpack(ctx)) == 0
    packed = given.pack(ctx)
    arena.close()
    with pytest.raises(Unresolved, match="no token arena"):
        crossed(packed, ctx)


def test_what_the_arena_does_not_hold_is_unresolved(arena: Arena, ctx: Context) -> None:
    with pytest.raises(Unresolved, match="2 of 6 prompts no more"):
        crossed(tokens(6).pack(ctx), ctx)


@pytest.mark.parametrize("ids", [[1, 2, 3, 4, 5, 6], [1, 2, 3]], ids=["other values", "another length"])
def test_ids_that_are_not_the_senders_are_not_taken(arena: Arena, ctx: Context, ids: list[int]) -> None:
    """A stage between that changes a prompt and keeps its key: what it made is what arrives."""
    changed = replace(tokens(), prompt_ids=Ragged.of([ids, *PROMPTS[1:4]], np.int32))
    with pytest.raises(Unresolved, match="other ids"):
        crossed(changed.pack(ctx), ctx)


def test_ids_of_another_type_are_not_taken(arena: Arena, ctx: Context) -> None:
    wide = replace(tokens(), prompt_ids=Ragged.of(PROMPTS[:4], np.int64))
    with pytest.raises(Unresolved):
        crossed(wide.pack(ctx), ctx)


def test_a_key_has_16_bytes_a_row() -> None:
    for key in (np.zeros((4, 8), np.uint8), np.zeros((4, 16), np.int8)):
        with pytest.raises(ValueError, match=r"prompt_key must be uint8 \[4, 16\]"):
            replace(tokens(), prompt_key=key)


# -- stages in processes -----------------------------------------------------------------------------------------


def reward_spec() -> PartSpec:
    return PartSpec("reward", RuleReward, RuleRewardConfig(timeout_s=60), {})


def rollout_spec(tiny_model: Path) -> PartSpec:
    parts = {
        "model": PartSpec("model", HfModel, HfModelConfig(path=str(tiny_model)), {}),
        "sampler": PartSpec("sampler", TorchSampler, TorchSamplerConfig(), {}),
    }
    return PartSpec("rollout", TorchRollout, TorchRolloutConfig(n=2, max_new_tokens=4), parts)


def in_a_process(spec: PartSpec, ctx: Context, *calls: dict[str, Any], between: Callable[[], Any]) -> tuple[Any, Any]:
    """What the stage gives, and how many rows went by name and again, call by call."""
    stage, made, counts = ProcessStage(spec), [], []
    try:
        stage.open(ctx)
        for records in calls:
            made.append(stage.run(**records))
            metrics = summarise(ctx.meter.drain())
            counts.append([metrics.get(f"{ctx.node}/{name}", 0) for name in ("by_reference", "sent_again")])
            between()
    finally:
        stage.close()
    return made, counts


def here(spec: PartSpec, ctx: Context, records: dict[str, Any]) -> Any:
    stage = spec.build()
    try:
        stage.open(ctx)
        return stage.run(**records)
    finally:
        stage.close()


def drive_out(arena: Arena) -> None:
    """Put so much that every entry has gone."""
    for i in range(3000):
        arena.put_many([(i.to_bytes(16, "big"), np.arange(200, dtype=np.int32))])
    assert arena.get_many(KEYS) == [None] * 6


@pytest.mark.parametrize("node", ["reward", pytest.param("rollout", marks=pytest.mark.slow)])
def test_a_stage_in_a_process_reads_prompts_from_the_arena(
    node: str, arena: Arena, make_context: Callable[..., Context], tiny_model: Path
) -> None:
    spec = reward_spec() if node == "reward" else rollout_spec(tiny_model)
    records: Any = {"rollouts": rollouts()} if node == "reward" else {"tokens": tokens()}
    expected = here(spec, make_context(node), records)
    rows = len(next(iter(records.values())))
    made, counts = in_a_process(spec, make_context(node), records, records, between=lambda: drive_out(arena))
    assert [m.same(expected) for m in made] == [True, True]
    assert counts == [[rows, 0], [0, rows]], "the second time, the arena has let them go"


def test_a_stage_in_a_process_without_an_arena(make_context: Callable[..., Context]) -> None:
    made, counts = in_a_process(reward_spec(), make_context("reward"), {"rollouts": rollouts()}, between=lambda: None)
    assert counts == [[0, 0]]
    assert made[0].same(here(reward_spec(), make_context("reward"), {"rollouts": rollouts()}))
