"""Medians, spread and drift of a comparison, against formulas written down anew."""

from __future__ import annotations

import statistics
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.compare.drift import drift, rollouts
from pipeline.compare.measure import MEASURES, Measure, Summary, against, in_order, measure_of, summary, values
from pipeline.compare.words import change, spread
from pipeline.kept import Column
from pipeline.metrics import steps_of
from pipeline.records import Ragged

TIME = Measure("t", "t", "s", "lower")
SPEED = Measure("t", "t", "tok/s", "higher", digits=0)
REWARD = Measure("r", "r", "", "higher", by="difference")

NUMBERS = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30)


# -- medians and spread ------------------------------------------------------------------------------------------


@given(NUMBERS)
def test_the_summary_is_median_and_quartiles(found: list[float]) -> None:
    """Python's own `quantiles(..., method="inclusive")` is definition 7 of Hyndman and Fan."""
    made = summary(found)
    low, middle, high = statistics.quantiles(found, n=4, method="inclusive") if len(found) > 1 else found * 3
    np.testing.assert_allclose([made.low, made.median, made.high], [low, middle, high], rtol=1e-12, atol=1e-9)
    assert made.count == len(found)


def test_an_empty_summary_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing"):
        summary([])


def test_only_steps_after_the_warm_up_count_and_a_run_has_one_peak() -> None:
    rows = [
        {"step": 0, "policy_version": 0, "memory/peak_gb": 9.0, "eval/accuracy": 0.1},
        {"step": 1, "time/step_s": 50.0, "reward/mean": 0.0, "memory/peak_gb": 1.0},
        {"step": 2, "time/step_s": 2.0, "reward/mean": None, "memory/peak_gb": 1.5, "time/eval_s": 4.0},
        {"step": 3, "time/step_s": 3.0, "reward/mean": 0.5, "memory/peak_gb": 2.0, "eval/accuracy": 0.7},
    ]
    assert values(rows, warmup=1) == {
        "time/step_s": [2.0, 3.0],
        "reward/mean": [0.5],
        "eval/accuracy": [0.7],
        "memory/peak_gb": [2.0],
    }
    assert values(rows, warmup=0)["time/step_s"] == [50.0, 2.0, 3.0]
    assert values(rows, warmup=3) == {}


def test_a_line_cut_short_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "tim')
    assert steps_of(tmp_path) == [{"step": 1}]
    assert steps_of(tmp_path / "nowhere") == []


def test_every_metric_of_the_pitch_is_shown_once_and_in_words() -> None:
    names = {
        "time/step_s": "time of a step",
        "time/rollout_s": "time of rollout",
        "time/eval_s": None,
        "rollout/tokens_per_s": "tokens generated",
        "trainer/tokens_per_s": "tokens learned from, trainer",
        "time/wait_s": "nodes waiting for rows",
        "loader/wait_s": "waiting in loader",
        "tokenizer_cache/hit_ratio": "cache hits, tokenizer_cache",
        "reward/mean": "reward",
        "memory/peak_gb": "peak host memory, all processes",
        "policy/kl": None,
    }
    assert {name: (of := measure_of(name)) and of[1] for name in names} == names
    assert in_order(["reward/mean", "policy/kl", "time/b_s", "time/a_s", "time/step_s", "time/b_s"]) == [
        *("time/step_s", "time/b_s", "time/a_s", "reward/mean")
    ]
    assert len({m.pattern for m in MEASURES}) == len(MEASURES)


@pytest.mark.parametrize(
    ("measure", "base", "other", "ratio", "verdict"),
    [
        (TIME, (1.0, 2.0, 3.0, 9), (0.4, 0.5, 0.6, 9), 0.25, "better"),
        (TIME, (1.0, 2.0, 3.0, 9), (4.0, 5.0, 6.0, 9), 2.5, "worse"),
        (TIME, (1.0, 2.0, 3.0, 9), (3.0, 5.0, 6.0, 9), 2.5, "alike"),
        (TIME, (1.0, 2.0, 3.0, 2), (4.0, 5.0, 6.0, 9), 2.5, "alike"),
        (TIME, (0.0, 0.0, 0.0, 9), (4.0, 5.0, 6.0, 9), None, "worse"),
        (SPEED, (1.0, 2.0, 3.0, 9), (4.0, 5.0, 6.0, 9), 2.5, "better"),
        (SPEED, (1.0, 2.0, 3.0, 9), (0.4, 0.5, 0.6, 9), 0.25, "worse"),
        (REWARD, (-3.0, -2.0, -1.0, 9), (1.0, 2.0, 3.0, 9), 4.0, "better"),
    ],
)
def test_what_is_better_is_said_where_the_quartiles_do_not_touch(measure, base, other, ratio, verdict) -> None:
    def made(low: float, median: float, high: float, count: int) -> Summary:
        return Summary(median=median, low=low, high=high, count=count)

    found = against(measure, made(*base), made(*other))
    assert (found.change, found.verdict) == (ratio, verdict)


def test_numbers_are_written_for_people() -> None:
    assert spread(TIME, Summary(0.4123, 0.40, 0.43, 4)) == "0.412 (0.400 to 0.430)"
    assert spread(TIME, Summary(0.00412, 0.0039, 0.0044, 4)) == "4.1 ms (3.9 to 4.4)"
    assert spread(TIME, Summary(0.0, 0.0, 0.0, 4)) == "0.000"
    assert spread(SPEED, Summary(27611.2, 25530, 30736, 4)) == "27,611 (25,530 to 30,736)"
    low, base = Summary(0.5, 0.4, 0.6, 4), Summary(2.0, 1.9, 2.1, 4)
    assert change(TIME, against(TIME, base, low)) == "0.25x better"
    assert change(REWARD, against(REWARD, base, low)) == "-1.500 worse"
    assert change(REWARD, against(REWARD, base, base)) == "the same"


# -- drift -------------------------------------------------------------------------------------------------------


def record(ids: list[int], prompts: list[list[int]], tokens: list[list[int]], log_probs: list[list[float]]):
    return {
        "row_id": np.array(ids),
        "prompt_ids": Ragged.of(prompts, np.int32),
        "response_ids": Ragged.of(tokens, np.int32),
        "log_probs": Ragged.of(log_probs, np.float32),
    }


def test_drift_is_over_the_common_prefix_of_the_same_prompts() -> None:
    base = record(
        [0, 1, 2, 3], [[5], [5], [6], [7]], [[1, 2, 3], [1, 2], [4], [9]], [[-1, -2, -3], [-1, -1], [-2], [-0.5]]
    )
    other = record(
        [3, 2, 1, 0],
        [[7], [8], [5], [5]],  # row 2 has another prompt
        [[9, 9], [4], [1, 2], [1, 7, 3]],  # row 3 is longer, row 0 leaves the path after one token
        [[-0.25, -4], [-7], [-1.5, float("nan")], [-1.125, -9, -9]],
    )
    found = drift(base, other)
    # common and told: row 0 token 0 (0.125), row 1 token 0 (0.5), row 3 token 0 (0.25); row 1 token 1 is NaN
    assert found.mean == pytest.approx((0.125 + 0.5 + 0.25) / 3, rel=1e-12)
    assert found.most == 0.5
    assert (found.tokens, found.all_tokens) == (3, 3 + 2 + 1)
    assert (found.equal, found.rows) == (1, 3)


def test_without_a_token_in_common_there_is_no_number() -> None:
    found = drift(record([0], [[5]], [[1, 2]], [[-1, -2]]), record([0], [[5]], [[3, 2]], [[-1, -2]]))
    assert (found.mean, found.most, found.tokens, found.all_tokens, found.equal, found.rows) == (None, None, 0, 2, 0, 1)
    nothing = drift(record([0], [[5]], [[1]], [[-1]]), record([1], [[5]], [[1]], [[-1]]))
    assert (nothing.mean, nothing.rows) == (None, 0)


def plain_drift(base: dict[str, Column], other: dict[str, Column]) -> list[float]:
    """Token by token."""
    found = []
    for i, row in enumerate(base["row_id"]):  # type: ignore[arg-type]
        for j, twin in enumerate(other["row_id"]):  # type: ignore[arg-type]
            if row != twin or base["prompt_ids"][i].tolist() != other["prompt_ids"][j].tolist():
                continue
            for a, b, p, q in zip(
                *(base["response_ids"][i], other["response_ids"][j], base["log_probs"][i], other["log_probs"][j]),
                strict=False,
            ):
                if a != b:
                    break
                found.append(abs(float(p) - float(q)))
    return found


ROWS = st.lists(st.tuples(st.integers(0, 1), st.lists(st.tuples(st.integers(0, 2), st.floats(-9, 0)), max_size=6)))


@given(ROWS, ROWS)
def test_drift_is_what_a_walk_over_the_tokens_finds(one, two) -> None:
    base, other = (
        record(
            list(range(len(rows))),
            [[prompt] for prompt, _ in rows],
            [[token for token, _ in pairs] for _, pairs in rows],
            [[log_prob for _, log_prob in pairs] for _, pairs in rows],
        )
        for rows in (one, two)
    )
    found, expected = drift(base, other), plain_drift(base, other)
    assert found.tokens == len(expected)
    if expected:
        assert found.mean == pytest.approx(sum(expected) / len(expected), abs=1e-12)
        assert found.most == max(expected)
    else:
        assert found.mean is None


def test_the_record_with_tokens_is_found_by_its_columns(tmp_path: Path) -> None:
    folder = tmp_path / "records" / "1"
    folder.mkdir(parents=True)
    made = record([4], [[5]], [[1]], [[-1.5]])
    np.savez(folder / "loader.npz", row_id=np.array([4]))
    assert rollouts(tmp_path, 1) is None
    arrays = {"row_id": np.array([4])}
    for name in ("prompt_ids", "response_ids", "log_probs"):
        column = made[name]
        assert isinstance(column, Ragged)
        arrays |= {f"{name}.values": column.values, f"{name}.offsets": column.offsets}
    np.savez(folder / "zzz.npz", **arrays)
    found = rollouts(tmp_path, 1)
    assert found is not None
    assert found["log_probs"][0].tolist() == [-1.5]  # type: ignore[index]
