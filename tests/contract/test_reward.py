"""What holds for every registered reward. A backend that needs settings gets them in `SETTINGS`, one that holds
components in `COMPONENTS`. One whose score the answer of the data file does not decide stands in `SEES_NO_ANSWER`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline import registry
from pipeline.context import Context
from pipeline.metrics import Meter, summarise
from pipeline.records import Ragged
from pipeline.registry import Entry
from stages.model.hf import HfModel, HfModelConfig
from stages.records import RewardBatch, RolloutBatch, Status
from tests.builders import rollout_batch
from tests.processes import wait_gone
from tests.stages.reward.support import children
from tests.tiny_models import save_classifier
from tests.tiny_tokenizers import EOS, ids_of

registry.discover("stages")
ENTRIES = registry.entries("reward")

USER_FILE = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    if ground_truth is None:
        return None
    score = float(solution_str == ground_truth)
    return {"score": score, "acc": score, "right" if score else "wrong": 1}
"""
SETTINGS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "function": lambda folder: {"path": str(folder / "user.py")},
    "model": lambda folder: {"path": str(folder / "judge"), "tokenizer": "policy"},
}
COMPONENTS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "model": lambda folder: {"model": HfModel(HfModelConfig(path=str(folder / "judge")))}
}
SEES_NO_ANSWER = {"model"}

ROWS = 12
RESPONSES = ["5", "7", "x", "5", "", "5", "9", "5", "5", "5", "1", "5"]
ANSWERS = ["5", "7", "5", None]
FAILED, LOST = 6, 8
"""Rows whose rollout is not OK."""


def rollouts(purpose: Any = "train") -> RolloutBatch:
    status = [Status.OK] * ROWS
    status[FAILED], status[LOST] = Status.FAILED, Status.FAILED
    ids = [[*ids_of(r), EOS] for r in RESPONSES]
    return rollout_batch([[7]] * 4, ids, n=3, responses=RESPONSES, answers=ANSWERS, status=status, purpose=purpose)


@pytest.fixture(params=ENTRIES, ids=lambda e: e.name)
def entry(request: pytest.FixtureRequest) -> Entry:
    return request.param


@pytest.fixture
def unscored(entry: Entry) -> list[int]:
    """Rows without a score: those whose prompt has no answer."""
    return [] if entry.name in SEES_NO_ANSWER else [9, 10, 11]


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_classifier(tmp_path_factory.mktemp("judge"))


def assert_same(one: RewardBatch, other: RewardBatch, exact: bool) -> None:
    """To the last bit; or but for what a model's sums lose when its rows are batched otherwise."""
    if exact:
        assert one.same(other)
        return
    assert dataclasses.replace(one, score=other.score).same(other)
    np.testing.assert_allclose(one.score, other.score, rtol=0, atol=1e-5)


@pytest.fixture
def make(
    entry: Entry, judge: Path, tmp_path: Path, make_context: Callable[..., Context]
) -> Iterator[Callable[..., Any]]:
    """Open instances, closed at the end. What is set for worker processes goes only to those who have some."""
    (tmp_path / "user.py").write_text(USER_FILE)
    (tmp_path / "judge").symlink_to(judge)
    made: list[Any] = []

    def make(**settings: Any) -> Any:
        needed, held = (table.get(entry.name, lambda _: {})(tmp_path) for table in (SETTINGS, COMPONENTS))
        known = {f.name for f in dataclasses.fields(entry.config)}
        given = needed | {k: v for k, v in settings.items() if k in known}
        stage: Any = entry.cls(entry.config(**given), **held)  # pyright: ignore[reportCallIssue]
        made.append(stage)
        stage.open(make_context("reward"))
        return stage

    yield make
    for stage in made:
        stage.close()


def test_settings_are_given_to_backends_that_exist() -> None:
    assert {*SETTINGS, *COMPONENTS, *SEES_NO_ANSWER} <= {e.name for e in ENTRIES}


def test_rows_come_back_as_they_came(make: Callable[..., Any]) -> None:
    given = rollouts()
    rewards: RewardBatch = make().run(given)
    np.testing.assert_array_equal(rewards.row_id, given.row_id)
    np.testing.assert_array_equal(rewards.group_id, given.group_id)
    assert rewards.step == given.step
    assert (rewards.score.dtype, rewards.accuracy.dtype, rewards.parts.dtype) == (np.float32,) * 3
    assert rewards.parts.shape == (ROWS, len(rewards.part_names))
    assert rewards.part_names == tuple(sorted(rewards.part_names))
    assert rewards.status.dtype == np.uint8


def test_each_row_gets_its_own_score(make: Callable[..., Any], entry: Entry) -> None:
    """In any order of the rows, and whoever their neighbours are."""
    reward, given = make(workers=2), rollouts()
    whole: RewardBatch = reward.run(given)
    scored = [i for i in range(ROWS) if whole.status[i] == Status.OK]
    if entry.name in SEES_NO_ANSWER:
        by_response = {r: {float(whole.score[i]) for i in scored if RESPONSES[i] == r} for r in RESPONSES}
        assert len({s for scores in by_response.values() for s in scores}) == len(set(RESPONSES) - {"9"})
    else:
        right = [ANSWERS[i // 3] == RESPONSES[i] for i in range(ROWS)]
        assert [bool(whole.accuracy[i]) for i in scored] == [right[i] for i in scored]
    order = np.random.default_rng(0).permutation(ROWS)
    assert reward.run(given.take(order)).same(whole.take(order))


@pytest.mark.parametrize("sizes", [[1] * ROWS, [5, 7], [0, 3, 9], [11, 1]])
def test_a_batch_cut_into_parts_gives_the_same_numbers(make: Callable[..., Any], sizes: list[int]) -> None:
    """To the last bit where a runner may cut it."""
    reward, given = make(), rollouts()
    whole, exact = reward.run(given), reward.grain == "row"
    metrics = summarise(reward.ctx.meter.drain())
    parts = [reward.run(part) for part in given.split(sizes)]
    assert_same(RewardBatch.concat(parts), whole, exact)
    assert summarise(reward.ctx.meter.drain()) == (metrics if exact else pytest.approx(metrics, abs=1e-5))


def test_a_row_without_a_score_says_why(make: Callable[..., Any], unscored: list[int]) -> None:
    given = rollouts()
    rewards: RewardBatch = make().run(given)
    for row in (FAILED, LOST):
        assert rewards.status[row] == given.status[row]
        assert rewards.reason.text(row) == given.reason.text(row) == "made so"
    assert [i for i in range(ROWS) if rewards.status[i] == Status.UNSCORED] == unscored
    for i in range(ROWS):
        ok = rewards.status[i] == Status.OK
        assert bool(rewards.reason.text(i)) == (not ok)
        assert np.isfinite(rewards.score[i]) == np.isfinite(rewards.accuracy[i]) == ok


def test_metrics_of_training(make: Callable[..., Any], unscored: list[int]) -> None:
    reward = make()
    rewards: RewardBatch = reward.run(rollouts())
    metrics = summarise(reward.ctx.meter.drain())
    ok = rewards.status == Status.OK
    assert metrics["reward/mean"] == pytest.approx(np.float64(rewards.score[ok]).mean(), rel=1e-12)
    assert metrics["reward/accuracy"] == pytest.approx(np.float64(rewards.accuracy[ok]).mean(), rel=1e-12)
    assert metrics["reward/unscored"] == len(unscored)
    for name, column in zip(rewards.part_names, rewards.parts.T, strict=True):
        assert metrics[f"reward/{name}/mean"] == pytest.approx(np.nanmean(np.float64(column)), rel=1e-12)
    assert {m.split("/")[0] for m in metrics} == {"reward"}


def test_metrics_of_an_evaluation(make: Callable[..., Any], unscored: list[int]) -> None:
    reward = make()
    rewards: RewardBatch = reward.run(rollouts("eval"))
    metrics = summarise(reward.ctx.meter.drain())
    assert set(metrics) == {"eval/accuracy", "eval/reward", "eval/unscored"}
    assert metrics["eval/accuracy"] == pytest.approx(np.nansum(rewards.accuracy) / ROWS)
    assert metrics["eval/unscored"] == np.isnan(rewards.score).sum() == len(unscored) + 2


def test_no_unscored_rows_are_logged_as_zero(make: Callable[..., Any]) -> None:
    reward = make()
    reward.run(rollouts().take(np.array([0, 1])))
    assert summarise(reward.ctx.meter.drain())["reward/unscored"] == 0


def test_a_batch_without_rows(make: Callable[..., Any]) -> None:
    assert len(make().run(rollouts().take(np.empty(0, np.int64)))) == 0


def test_the_target_picks_one_answer_of_several(make: Callable[..., Any], entry: Entry) -> None:
    """A reward that sees no answer takes the setting, which tasks bring along, and scores as without it."""
    answers = [{"first": "5", "second": "7"}] * 4
    given = dataclasses.replace(rollouts(), ground_truth=Ragged.jsons([a for a in answers for _ in range(3)]))
    first, second = make(target="first").run(given), make(target="second").run(given)
    if entry.name in SEES_NO_ANSWER:
        assert first.same(second)
        assert first.same(make().run(given))
        return
    ok = first.status == Status.OK
    assert ok.sum() == ROWS - 2
    assert first.accuracy[ok].tolist() == [float(RESPONSES[i] == "5") for i in np.flatnonzero(ok)]
    assert second.accuracy[ok].tolist() == [float(RESPONSES[i] == "7") for i in np.flatnonzero(ok)]
    with pytest.raises(ValueError, match="first, second"):
        make(target="third").run(given)


def test_state_round_trips(make: Callable[..., Any]) -> None:
    reward, other = make(), make()
    whole = reward.run(rollouts())
    other.load_state_dict(reward.state_dict())
    assert other.run(rollouts()).same(whole)


def test_the_input_is_not_written_to(make: Callable[..., Any]) -> None:
    given, untouched = rollouts(), rollouts()
    make().run(given)
    assert given.same(untouched)


def test_no_process_is_left(make: Callable[..., Any]) -> None:
    before = children()
    reward = make(workers=2)
    reward.run(rollouts())
    started = children() - before
    reward.close()
    reward.close()
    assert wait_gone(list(started), 3) == []
    assert children() == before


def test_a_meter_is_the_only_thing_it_writes_to(make: Callable[..., Any]) -> None:
    reward = make()
    reward.ctx.meter = Meter()
    reward.run(rollouts())
    assert reward.ctx.meter.drain()
    assert {p.name for p in reward.ctx.run_dir.iterdir()} <= {"run.log", "user.py", "judge"}
