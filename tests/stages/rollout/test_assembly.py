"""Settings, rows, records, metrics and plan-time problems that all rollouts have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from pipeline.config import RootConfig
from pipeline.metrics import Meter, summarise
from pipeline.plan import Facts
from stages.model.hf import HfModel, HfModelConfig
from stages.records import Finish, RolloutBatch, Sampling, Status, TokenBatch
from stages.rollout import RolloutConfig
from stages.rollout.assembly import (
    Draft,
    assemble,
    expand,
    measure,
    require_room,
    resolve,
    settings_problems,
)
from tests.builders import rollout_batch, token_batch


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_model)


def draft(row: int, ids: list[int], finish: Finish = Finish.STOP, version: int = 0, reason: str = "") -> Draft:
    log_probs = [-0.5 * (i + 1) for i in range(len(ids))]
    return Draft(
        row=row,
        ids=ids,
        log_probs=log_probs,
        finish=finish,
        version_min=version,
        version_max=version + 1,
        reason=reason,
    )


# -- resolve and expand ----------------------------------------------------------------------------------------


def test_a_batch_changes_only_what_it_brings_and_zero_counts() -> None:
    cfg = RolloutConfig(n=4, temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, max_new_tokens=32)
    own = resolve(cfg, Sampling())
    assert (own.n, own.max_new_tokens) == (4, 32)
    p = own.params
    assert (p.temperature, p.top_k, p.top_p, p.min_p) == (0.7, 5, 0.9, 0.1)
    brought = resolve(cfg, Sampling(n=1, temperature=0, top_k=0, min_p=0, max_new_tokens=7))
    assert (brought.n, brought.max_new_tokens) == (1, 7)
    p = brought.params
    assert (p.temperature, p.top_k, p.top_p, p.min_p) == (0, 0, 0.9, 0)


def test_rows_are_numbered_by_group_and_sample() -> None:
    tokens = token_batch([[5], [6], [7]], first_row=10).take(np.array([2, 0, 1]))
    rows = expand(tokens, 2)
    assert rows.row_id.tolist() == [20, 21, 22, 23, 24, 25]
    assert rows.group_id.tolist() == [10, 10, 11, 11, 12, 12]
    assert rows.prompt.tolist() == [1, 1, 2, 2, 0, 0]


def test_seeds_depend_on_node_purpose_step_and_row(make_context: Any) -> None:
    tokens = token_batch([[5], [6]], step=3)
    rows, ctx = expand(tokens, 2), make_context("policy")
    seeds = rows.seeds(ctx, tokens)
    assert np.array_equal(seeds, ctx.seed("policy/train", 3, np.array([0, 1, 2, 3])))
    evaluated = token_batch([[5], [6]], step=3, purpose="eval")
    others = [
        rows.seeds(ctx, token_batch([[5], [6]], step=4)),
        rows.seeds(ctx, evaluated),
        rows.seeds(make_context("judge"), tokens),
        rows.seeds(make_context("policy", seed=1), tokens),
    ]
    assert len(np.unique(np.concatenate([seeds, *others]))) == 20


# -- assemble --------------------------------------------------------------------------------------------------


def made(tokenizer: Any) -> tuple[TokenBatch, list[Draft], Any]:
    ids = tokenizer(["12=", "345="])["input_ids"]
    tokens = token_batch(ids, ["12=", "345="], [1, {"a": 2}], extra=[{"k": 1}, {"k": 2}], step=9, first_row=3)
    seven, eight = tokenizer("78")["input_ids"]
    drafts = [
        draft(3, [], Finish.FAILED, 6, "it broke"),
        draft(0, [seven, eight, 2], Finish.STOP, 5),
        draft(2, [eight], Finish.LENGTH, 6),
        draft(1, [seven, 2], Finish.STOP, 5),
    ]

    def build(some: list[Draft]) -> RolloutBatch:
        return assemble(
            tokens, expand(tokens, 2), some, resolve(RolloutConfig(n=2, temperature=0.7), Sampling()), tokenizer
        )

    return tokens, drafts, build


def test_a_record_is_in_order_of_rows_whatever_the_order_of_drafts(tokenizer: Any) -> None:
    tokens, drafts, build = made(tokenizer)
    out = build(drafts)
    assert out.step == 9
    assert out.row_id.tolist() == [6, 7, 8, 9]
    assert out.group_id.tolist() == [3, 3, 4, 4]
    assert out.group_size == 2
    assert out.temperature == 0.7
    assert [out.response.text(i) for i in range(4)] == ["78", "7", "8", ""]
    assert out.finish.tolist() == [Finish.STOP, Finish.STOP, Finish.LENGTH, Finish.FAILED]
    assert out.status.tolist() == [Status.OK, Status.OK, Status.OK, Status.FAILED]
    assert [out.reason.text(i) for i in range(4)] == ["", "", "", "it broke"]
    assert out.response_ids.lengths.tolist() == [3, 2, 1, 0]
    assert out.response_ids.values.dtype == np.int32
    assert out.log_probs[0].tolist() == [-0.5, -1.0, -1.5]
    assert out.log_probs.values.dtype == np.float32
    assert out.loss_mask.values.all()
    assert out.loss_mask.values.dtype == bool
    assert not out.turn.values.any()
    assert out.turn.values.dtype == np.int16
    assert out.version_min.tolist() == [5, 5, 6, 6]
    assert out.version_max.tolist() == [6, 6, 7, 7]
    for i, prompt in enumerate([0, 0, 1, 1]):
        assert out.prompt_ids[i].tolist() == tokens.prompt_ids[prompt].tolist()
        assert out.prompt.json(i) == tokens.prompt.json(prompt)
        assert out.ground_truth.json(i) == [1, {"a": 2}][prompt]
        assert out.extra.json(i) == {"k": prompt + 1}
        assert out.data_source.text(i) == "test"


def test_parts_put_together_are_the_whole(tokenizer: Any) -> None:
    _, drafts, build = made(tokenizer)
    parts = [build(drafts[:1]), build([]), build(drafts[1:3]), build(drafts[3:])]
    joined = RolloutBatch.concat(parts)
    assert joined.align(np.sort(joined.row_id)).same(build(drafts))


def test_a_draft_says_why_it_failed_and_has_a_log_prob_a_token() -> None:
    with pytest.raises(ValueError, match="finish FAILED with reason ''"):
        draft(0, [1], Finish.FAILED)
    with pytest.raises(ValueError, match="finish STOP with reason 'why'"):
        draft(0, [1], Finish.STOP, reason="why")
    with pytest.raises(ValueError, match="2 tokens but 1 log-probs"):
        Draft(row=0, ids=[1, 2], log_probs=[0.0], finish=Finish.STOP, version_min=0, version_max=0)


# -- metrics ---------------------------------------------------------------------------------------------------


def lengths(purpose: Any = "train") -> RolloutBatch:
    rows = [[3] * 10, [3] * 64, [3] * 5]
    return rollout_batch(
        [[1]] * 3,
        rows,
        finish=[Finish.STOP, Finish.LENGTH, Finish.FAILED],
        status=[Status.OK, Status.OK, Status.FAILED],
        purpose=purpose,
    )


def test_metrics_count_finished_and_cut_rows() -> None:
    """trl issue 3476: lengths 10 and 64 have the mean 37, and half of the rows is cut."""
    meter = Meter()
    measure(meter, lengths(), seconds=0.5)
    got = summarise(meter.drain())
    assert got["rollout/length_mean"] == 37
    assert got["rollout/length_max"] == 64
    assert got["rollout/truncated_ratio"] == 0.5
    assert got["rollout/failed"] == 1
    assert got["rollout/tokens_per_s"] == 79 / 0.5


def test_metrics_of_parts_are_those_of_the_whole() -> None:
    whole, parts = Meter(), Meter()
    measure(whole, lengths(), 3.0)
    for part in lengths().split([1, 2]):
        measure(parts, part, 1.5)
    assert summarise(parts.drain()) == summarise(whole.drain())


def test_evaluation_is_not_measured() -> None:
    meter = Meter()
    measure(meter, lengths("eval"), 1.0)
    assert meter.drain() == {}


# -- problems --------------------------------------------------------------------------------------------------


def problems(tiny_model: Path, known: dict[str, Any] | None = None, **cfg: Any) -> list[tuple[str, str]]:
    facts = Facts(key="rollout", root=RootConfig(), values=known or {})
    model = HfModel(HfModelConfig(path=str(tiny_model)))
    found = list(settings_problems(RolloutConfig(**cfg), model, facts))
    assert all(p.hint for p in found)
    return [(p.where, p.level) for p in found]


def test_sensible_settings_have_no_problem(tiny_model: Path) -> None:
    assert problems(tiny_model) == []
    assert problems(tiny_model, temperature=0.0, n=1) == []
    assert problems(tiny_model, {"max_prompt_tokens": 64}, max_new_tokens=64) == []


def test_contradictions_are_problems(tiny_model: Path) -> None:
    assert problems(tiny_model, temperature=0.0, n=2) == [("rollout.n", "error")]
    assert problems(tiny_model, top_k=1, n=2) == [("rollout.n", "error")]
    assert problems(tiny_model, temperature=0.0, top_p=0.5, n=1) == [("rollout.temperature", "warning")]
    assert problems(tiny_model, temperature=float("inf")) == [("rollout.temperature", "error")]
    assert problems(tiny_model, max_new_tokens=128) == [("rollout.max_new_tokens", "error")]
    assert problems(tiny_model, {"max_prompt_tokens": 65}, max_new_tokens=64) == [("rollout.max_new_tokens", "error")]


@pytest.mark.parametrize("temperature", [1e-39, 0.0099, 100.1, 1e38, float("nan")])
def test_a_temperature_that_breaks_float32_is_an_error(tiny_model: Path, temperature: float) -> None:
    assert problems(tiny_model, temperature=temperature) == [("rollout.temperature", "error")]


@pytest.mark.parametrize("temperature", [0.01, 100.0])
def test_the_ends_of_the_range_are_allowed(tiny_model: Path, temperature: float) -> None:
    assert problems(tiny_model, temperature=temperature) == []


def test_prompts_that_leave_no_room_are_named() -> None:
    tokens = token_batch([[1] * 6, [1] * 5, [1] * 8], first_row=20)
    settings = resolve(RolloutConfig(max_new_tokens=4), Sampling())
    require_room(tokens, settings, None)
    require_room(tokens, settings, 12)
    with pytest.raises(ValueError, match=r"2 prompts .* 9 positions .* has 8 tokens \(rows \[20, 22\]\).* to 1,"):
        require_room(tokens, settings, 9)
