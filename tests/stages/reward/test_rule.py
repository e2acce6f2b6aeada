"""The parts of the rule reward, their sum, and what a plan says about its settings."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config import RootConfig
from pipeline.context import Context
from pipeline.metrics import summarise
from pipeline.plan import Facts
from stages.records import RewardBatch, Status
from stages.reward.rule import RuleReward, RuleRewardConfig, RuleWeights
from stages.reward.rules import RuleScorer, contains, exact, maths_verify, number, numbers, numeric, regex
from stages.reward.workers import Unscorable
from tests.builders import rollout_batch
from tests.stages.reward.support import sample


def scorer(pattern: str = "", min_tokens: int = 0, max_tokens: int = 0, **weights: float) -> RuleScorer:
    return RuleScorer(weights, pattern, min_tokens, max_tokens)


# -- the parts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "answer", "part"),
    [
        ("1337", "1337", 1),
        (" 1337\n", "1337", 1),
        ("1337", " 1337 ", 1),
        ("13 37", "1337", 0),
        ("144", "0144", 0),  # text is compared as text
        ("18.0", "18", 0),
        ("18", 18, 1),
        ("18.0", 18, 1),  # a number as a number
        ("18", 18.0, 1),
        ("so 18", 18, 0),
        ("true", True, 1),
        ("", "x", 0),
        ("α", "α", 1),
    ],
)
def test_exact(response: str, answer: Any, part: float) -> None:
    assert exact(sample(response, answer)) == part


@pytest.mark.parametrize(
    ("response", "answer", "part"),
    [
        ("the answer is 18", "18", 1),
        ("18.0", "18", 1),
        ("18.", "18", 1),
        ("18.5", "18", 0),
        ("first 18, then 19", "18", 0),
        ("it costs $1,234.50", "1234.5", 1),
        ("it costs $1,234.50.", 1234.5, 1),
        ("1,234", "1,234", 1),
        ("options 1,2,3", "3", 1),
        ("-5", "-5", 1),
        ("-5", "5", 0),
        ("-$5", "-5", 1),
        ("$-5", "-5", 1),
        ("\u22125", "-5", 1),
        ("8-3", "3", 1),  # the minus is an operation
        ("x=-3", "-3", 1),
        (".5", "0.5", 1),
        ("1.5e3", "1500", 1),
        ("0.1", 0.1, 1),
        ("0.1000000000000000055511151231257827", 0.1, 0),  # exact, not to a float's precision
        ("1e999999", "1e999999", 1),
        ("no number", "18", 0),
        ("", "0", 0),
        ("18", "$18", 1),
    ],
)
def test_numeric(response: str, answer: Any, part: float) -> None:
    assert numeric(sample(response, answer)) == part


@given(st.decimals(allow_nan=False, allow_infinity=False, places=3), st.text(alphabet="abc :=\n", max_size=8))
def test_any_decimal_is_read_back_exactly_also_with_commas(value: Decimal, words: str) -> None:
    plain, grouped = f"{value:f}", f"{value:,f}"
    assert number(plain) == number(grouped) == value
    assert numbers(f"1 {words} {grouped} {words}")[-1] == value


@pytest.mark.parametrize("answer", ["eighteen", "18 apples", ""])
def test_numeric_needs_an_answer_that_is_a_number(answer: str) -> None:
    with pytest.raises(Unscorable, match="is not a number"):
        numeric(sample("18", answer))


def test_contains() -> None:
    assert contains(sample("it is Paris.", "Paris")) == 1
    assert contains(sample("it is paris.", "Paris")) == 0
    assert contains(sample("it is 18", 18)) == 1
    with pytest.raises(Unscorable, match="empty text"):
        contains(sample("anything", ""))


@pytest.mark.parametrize(
    ("pattern", "response", "answer", "part"),
    [
        (r"####", "so #### 5", "6", 1),
        (r"####", "so 5", "5", 0),
        (r"^\d+$", "so 5", "5", 0),
        (r"#### (?P<answer>\S+)", "so #### 5", "5", 1),
        (r"#### (?P<answer>\S+)", "so #### 5.0", "5", 1),
        (r"#### (?P<answer>\S+)", "so #### 6", "5", 0),
        (r"#### (?P<answer>\S+)", "so 5", "5", 0),
        (r"<a>(?P<answer>.*)</a>", "<a> Paris </a>", "Paris", 1),
        (r"x|(?P<answer>y)", "x", "5", 0),
    ],
)
def test_regex(pattern: str, response: str, answer: str, part: float) -> None:
    assert regex(pattern)(sample(response, answer)) == part


@pytest.mark.parametrize(("tokens", "part"), [(0, 0), (2, 0), (3, 1), (5, 1), (6, 0)])
def test_length(tokens: int, part: float) -> None:
    assert scorer(length=1, min_tokens=3, max_tokens=5)(sample("x", "y", tokens=tokens)).score == part


def test_length_without_a_largest() -> None:
    assert scorer(length=1, min_tokens=3)(sample("x", "y", tokens=10_000)).score == 1


@pytest.fixture(scope="module")
def maths() -> Callable[..., float]:
    return maths_verify()


@pytest.mark.parametrize(
    ("response", "answer", "part"),
    [
        ("the answer is 72", "72", 1),
        ("the answer is 72", 72, 1),
        ("the answer is 73", "72", 0),
        (r"\boxed{1234}", "1,234", 1),
        (r"so $\frac{1}{2}$", "0.5", 1),
        ("0.5", r"\frac{1}{2}", 1),
        ("0.5", r"$\frac{1}{2}$", 1),
        (r"$x = 3 + \sqrt{4}$", "5", 1),
        (r"$2(x+1)$", "2x+2", 1),
        (r"$2(x+1)$", "2x+3", 0),
        ("no idea", "72", 0),
        ("", "72", 0),
    ],
)
def test_maths_verify(maths: Callable[..., float], response: str, answer: Any, part: float) -> None:
    assert maths(sample(response, answer)) == part


def test_maths_verify_needs_an_answer_it_can_read(maths: Callable[..., float]) -> None:
    with pytest.raises(Unscorable, match="cannot read the answer"):
        maths(sample("72", ""))


@pytest.mark.parametrize("answer", [None, [1, 2]])
def test_an_answer_that_is_neither_text_nor_number_is_not_guessed(answer: Any) -> None:
    with pytest.raises(Unscorable, match="neither text nor a number"):
        scorer(exact=1)(sample("1", answer))


def test_several_answers_ask_for_a_target() -> None:
    with pytest.raises(Unscorable, match=r"copy, sort\): reward\.target"):
        scorer(exact=1)(sample("1", {"copy": "1", "sort": "1"}))


# -- the sum -------------------------------------------------------------------------------------------------


@given(
    st.fixed_dictionaries({}, optional={n: st.floats(-3, 3).filter(bool) for n in ("exact", "numeric", "contains")}),
    st.sampled_from(["5", "so 5", "5 or 6", "x"]),
)
def test_the_score_is_the_weighted_sum_of_its_parts(weights: dict[str, float], response: str) -> None:
    if not weights:
        return
    expected = {
        "exact": response == "5",
        "numeric": response in ("5", "so 5"),
        "contains": "5" in response,
    }
    outcome = RuleScorer(weights, "", 0, 0)(sample(response, "5"))
    assert outcome.parts == {n: float(expected[n]) for n in weights}
    assert outcome.score == pytest.approx(sum(w * expected[n] for n, w in weights.items()), abs=1e-12)
    counted = [n for n, w in weights.items() if w > 0]
    assert outcome.accuracy == float(all(expected[n] for n in counted or weights))


def test_length_does_not_decide_accuracy_unless_it_is_alone() -> None:
    assert scorer(exact=1, length=0.1, max_tokens=1)(sample("5", "5", tokens=9)).accuracy == 1
    assert scorer(length=1, max_tokens=1)(sample("5", "5", tokens=9)).accuracy == 0


# -- the stage -----------------------------------------------------------------------------------------------


def score(ctx: Context, cfg: RuleRewardConfig, *args: Any, **kwargs: Any) -> RewardBatch:
    reward = RuleReward(cfg)
    try:
        reward.open(ctx)
        return reward.run(rollout_batch(*args, **kwargs))
    finally:
        reward.close()


def f32(values: Any) -> np.ndarray:
    return np.asarray(values, np.float32)


def texts(rewards: RewardBatch) -> list[str]:
    return [rewards.reason.text(i) for i in range(len(rewards))]


def test_records_and_metrics_of_a_step(make_context: Callable[..., Context]) -> None:
    ctx = make_context("reward")
    cfg = RuleRewardConfig(target="sort", weights=RuleWeights(exact=1, length=0.5), max_tokens=2)
    answers = [{"sort": "12", "copy": "21"}, {"sort": "34"}, {"copy": "5"}]
    status = [Status.OK, Status.OK, Status.OK, Status.FAILED, Status.OK, Status.OK]
    rewards = score(
        ctx, cfg, [[1]] * 3, [[1, 2], [1, 2, 3], [1], [], [1], [1]], n=2, answers=answers, status=status,
        responses=["12", "12", "43", "", "5", "5"], step=7,
    )  # fmt: skip
    assert rewards.step == 7
    assert rewards.row_id.tolist() == [0, 1, 2, 3, 4, 5]
    assert rewards.group_id.tolist() == [0, 0, 1, 1, 2, 2]
    nan = np.nan
    np.testing.assert_array_equal(rewards.score, f32([1.5, 1, 0.5, nan, nan, nan]))
    np.testing.assert_array_equal(rewards.accuracy, f32([1, 1, 0, nan, nan, nan]))
    assert rewards.part_names == ("exact", "length")
    np.testing.assert_array_equal(rewards.parts, f32([[1, 1], [1, 0], [0, 1]] + [[nan, nan]] * 3))
    assert rewards.status.tolist() == [0, 0, 0, Status.FAILED, Status.UNSCORED, Status.UNSCORED]
    lack = "no answer 'sort': the ground truth is an object with copy"
    assert texts(rewards) == ["", "", "", "made so", lack, lack]
    assert summarise(ctx.meter.drain()) == {
        "reward/mean": 1.0,
        "reward/accuracy": pytest.approx(2 / 3),
        "reward/unscored": 2,
        "reward/exact/mean": pytest.approx(2 / 3),
        "reward/length/mean": pytest.approx(2 / 3),
    }


def test_in_an_evaluation_a_row_without_a_score_is_not_right(make_context: Callable[..., Context]) -> None:
    ctx = make_context("reward")
    answers = ["1", "2", None, "4"]
    status = [Status.OK, Status.OK, Status.OK, Status.FAILED]
    score(
        ctx, RuleRewardConfig(), [[1]] * 4, [[1]] * 4, answers=answers, responses=["1", "x", "3", "4"], status=status,
        purpose="eval",
    )  # fmt: skip
    assert summarise(ctx.meter.drain()) == {"eval/accuracy": 0.25, "eval/reward": 0.5, "eval/unscored": 2}


@pytest.mark.parametrize(
    ("answer", "says"),
    [({"copy": "1", "sort": "1"}, "an object with copy, sort"), ("1", "a text"), (1, "a number"), (None, "a null")],
)
def test_a_target_that_no_row_has_is_an_error_that_names_what_there_is(
    make_context: Callable[..., Context], answer: Any, says: str
) -> None:
    with pytest.raises(ValueError, match=rf"reward\.target=sotr: none .* is {says}\. Set reward\.target"):
        score(make_context("reward"), RuleRewardConfig(target="sotr"), [[1]] * 4, [[1]] * 4, answers=[answer] * 4)


def test_numbers_and_text_of_the_data_file_are_told_apart(make_context: Callable[..., Context]) -> None:
    rewards = score(
        make_context("reward"), RuleRewardConfig(), [[1]] * 3, [[1]] * 3, answers=[18, "18", "018"],
        responses=["18.0", "18.0", "018"],
    )  # fmt: skip
    assert rewards.score.tolist() == [1, 0, 1]


def test_a_pattern_that_backtracks_for_ever_costs_its_row_only(make_context: Callable[..., Context]) -> None:
    cfg = RuleRewardConfig(weights=RuleWeights(exact=0, regex=1), pattern=r"^(a+)+$", timeout_s=0.7)
    responses = ["aaa", "a" * 60 + "b", "aab"]
    rewards = score(make_context("reward"), cfg, [[1]] * 3, [[1]] * 3, responses=responses)
    assert texts(rewards) == ["", "timed out after 0.7 s", ""]
    np.testing.assert_array_equal(rewards.score, f32([1, np.nan, 0]))


def test_a_power_tower_in_the_response_does_not_hang_the_step(make_context: Callable[..., Context]) -> None:
    """huggingface/Math-Verify issue 65."""
    cfg = RuleRewardConfig(weights=RuleWeights(exact=0, maths_verify=1), timeout_s=1)
    started = time.monotonic()
    responses = ["$5$", "$9^{9^{9^{9}}}$", "$6$"]
    rewards = score(make_context("reward"), cfg, [[1]] * 3, [[1]] * 3, answers=["5"] * 3, responses=responses)
    assert time.monotonic() - started < 20
    assert (rewards.score[0], rewards.score[2]) == (1, 0)
    assert texts(rewards)[1] == "timed out after 1 s"


def test_gsm8k_answers_are_read_as_the_data_set_has_them(shared: Path, make_context: Callable[..., Context]) -> None:
    lines = (shared / "data" / "gsm8k" / "train.jsonl").read_text().splitlines()[:60]
    solutions = [json.loads(line)["answer"] for line in lines]
    answers = [s.split("####")[-1].strip() for s in solutions]
    cfg = RuleRewardConfig(weights=RuleWeights(exact=0, numeric=1, maths_verify=1))
    rewards = score(make_context("reward"), cfg, [[1]] * 60, [[1]] * 60, answers=answers, responses=solutions)
    assert rewards.score.tolist() == [2.0] * 60


def test_parts_put_together_name_what_the_whole_names() -> None:
    """RewardBatch.concat: which parts a score has may differ from row to row."""
    common: dict[str, Any] = {"step": 1, "accuracy": f32([1]), "status": np.asarray([0], np.uint8)}
    reason = rollout_batch([[1]], [[1]]).reason
    a, b = (
        RewardBatch(
            **common, row_id=np.asarray([i]), group_id=np.asarray([i]), score=f32([i]), part_names=(name,),
            parts=f32([[i]]), reason=reason,
        )
        for i, name in enumerate(("tone", "form"))
    )  # fmt: skip
    whole = RewardBatch.concat([a, b])
    assert whole.part_names == ("form", "tone")
    np.testing.assert_array_equal(whole.parts, f32([[np.nan, 0], [1, np.nan]]))


# -- the plan ------------------------------------------------------------------------------------------------


def problems(**settings: Any) -> list[tuple[str, str, str]]:
    facts = Facts(key="judge", root=RootConfig())
    return [(p.where, p.what, p.level) for p in RuleReward(RuleRewardConfig(**settings)).check(facts)]


def test_the_default_has_no_problem() -> None:
    assert problems() == []


@pytest.mark.parametrize(
    ("settings", "where", "what", "level"),
    [
        ({"weights": RuleWeights(exact=0)}, "weights", "all 0", "error"),
        ({"weights": RuleWeights(exact=float("nan"))}, "weights.exact", "nan is not allowed", "error"),
        ({"weights": RuleWeights(regex=1)}, "pattern", "must be given", "error"),
        ({"weights": RuleWeights(regex=1), "pattern": "(a"}, "pattern", "'(a' is not a regular expression", "error"),
        ({"pattern": "a"}, "pattern", "has no effect", "warning"),
        ({"weights": RuleWeights(length=1)}, "weights.length", "has no limits", "error"),
        ({"min_tokens": 9}, "min_tokens", "has no effect, since weights.length is 0", "warning"),
        ({"max_tokens": 9}, "max_tokens", "has no effect, since weights.length is 0", "warning"),
        (
            {"weights": RuleWeights(length=1), "min_tokens": 9, "max_tokens": 3},
            "min_tokens",
            "9 is not allowed",
            "error",
        ),
    ],
)
def test_settings_that_cannot_be_meant(settings: dict[str, Any], where: str, what: str, level: str) -> None:
    [(at, said, how)] = problems(**settings)
    assert (at, how) == (f"judge.{where}", level)
    assert what in said
