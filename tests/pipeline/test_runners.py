"""Runners: `overlap` gives what `sync` gives, whatever the order and size of parts; it works while rows come."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Self

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import StageError
from pipeline.metrics import Samples, summarise
from pipeline.program import Program
from pipeline.records import Ragged, Rows
from pipeline.runner.overlap import Join
from tests.pipeline.conftest import toy
from tests.pipeline.stages_for_tests import NegateScorer, Numbers, Scores


def steps(tmp_path: Path, *overrides: str) -> list[tuple[dict[str, Rows], dict[str, float]]]:
    """Records and metrics (times left out) of each step."""
    out = []
    with Program(toy(*overrides), Path(mkdtemp(dir=tmp_path))) as program:
        for _, records in program.runner.steps(program, first=1, count=program.plan.root.run.steps):
            out.append((records, untimed(program.meter.drain())))
    return out


def untimed(samples: Samples) -> dict[str, float]:
    return {n: v for n, v in summarise(samples).items() if not n.startswith("time/")}


def assert_same(left: list[Any], right: list[Any]) -> None:
    assert len(left) == len(right) > 0
    for (records, metrics), (others, other_metrics) in zip(left, right, strict=True):
        assert list(records) == list(others)
        for node in records:
            assert records[node].same(others[node]), node
        np.testing.assert_equal(metrics, other_metrics)


def test_sync_follows_the_graph(tmp_path: Path) -> None:
    """The numbers of one step by hand, in float64."""
    [(records, metrics)] = steps(tmp_path, "run.steps=1", "scale.factor=3")
    value = records["source"].value  # type: ignore[attr-defined]
    np.testing.assert_array_equal(records["double"].value, value * 3)  # type: ignore[attr-defined]
    np.testing.assert_array_equal(records["second"].score, -value)  # type: ignore[attr-defined]
    score = -value * 3
    expected = score - score.reshape(-1, 2).mean(1).repeat(2) + value * 1.5
    np.testing.assert_allclose(records["judge"].score, expected, rtol=1e-15)  # type: ignore[attr-defined]
    assert metrics["learner/weight"] == pytest.approx(1 + 0.01 * np.tanh(expected).mean(), rel=1e-14)
    assert metrics["double/value"] == pytest.approx(value.mean(), rel=1e-15)


@pytest.mark.parametrize("seed", range(12))
def test_overlap_equals_sync(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape = [f"source.groups={rng.integers(0, 7)}", f"source.group_size={rng.integers(1, 4)}", "run.steps=3"]
    parts = [f"double.parts_seed={seed}", f"double.most={rng.integers(1, 9)}", f"second.delay_s={rng.random() / 100}"]
    parts += [f"double.delay_s={rng.random() / 500}", f"scorer.delay_s={rng.random() / 500}"]
    plain = steps(tmp_path, "double=streaming", *shape)
    assert_same(steps(tmp_path, "double=streaming", "runner=overlap", *shape, *parts), plain)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NamedScores(Scores):
    """Scores whose shared `names` differ from part to part; together they have all of them."""

    names: tuple[str, ...]

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self:  # pyright: ignore[reportIncompatibleMethodOverride]
        names = tuple(sorted({n for p in parts for n in p.names}))
        return super(NamedScores, cls).concat([replace(p, names=names) for p in parts])


def test_parts_are_joined_as_their_record_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As scores are, of which one streamed part has other reward parts than the next."""

    def run(self: NegateScorer, numbers: Numbers) -> NamedScores:
        ids, names = numbers.row_id, tuple(sorted({str(i) for i in numbers.row_id}))
        return NamedScores(step=numbers.step, row_id=ids, group_id=numbers.group_id, score=-numbers.value, names=names)

    monkeypatch.setattr(NegateScorer, "run", run)
    [(plain, _)] = steps(tmp_path, "double=streaming", "run.steps=1")
    [(streamed, _)] = steps(tmp_path, "double=streaming", "double.most=1", "runner=overlap", "run.steps=1")
    assert streamed["scorer"].names == ("0", "1", "2", "3", "4", "5")  # type: ignore[attr-defined]
    assert all(streamed[node].same(plain[node]) for node in plain)


def test_rows_flow_while_the_producer_works(tmp_path: Path, log: list[tuple[str, ...]]) -> None:
    """The scorer has scored, and the judge judged whole groups, before the stream has ended; sync does neither."""
    slow = ["double=streaming", "double.delay_s=0.05", "double.most=1", "source.groups=6", "run.steps=1"]
    for runner, early in (("overlap", True), ("sync", False)):
        log.clear()
        steps(tmp_path, f"runner={runner}", *slow)
        kinds = [e[0] for e in log]
        assert ("streamed" in kinds) == (runner == "overlap")
        end = kinds.index("streamed") if early else kinds.index("score")
        before = [e for e in log[:end] if e[:2] == ("score", "scorer")]
        assert (len(before) > 1) == early
        judged = [int(e[2]) for e in log if e[0] == "judge"]
        assert sum(judged) == 12
        assert all(rows % 2 == 0 for rows in judged)
        assert (any(e[0] == "judge" for e in log[:end]) and len(judged) > 1) == early


def test_a_consumer_runs_at_the_same_time_as_its_producer(tmp_path: Path) -> None:
    """By the clock: 8 parts of 40 ms and 8 scorings of 40 ms take far less than their sum."""
    slow = ["double=streaming", "double.delay_s=0.04", "double.most=1", "source.groups=8", "source.group_size=1"]
    slow += ["scorer.delay_s=0.04", "run.steps=1", "runner=overlap"]
    with Program(toy(*slow), tmp_path) as program:
        started = time.monotonic()
        next(program.runner.steps(program, first=1, count=1))
        elapsed = time.monotonic() - started
        metrics = summarise(program.meter.drain())
    busy = metrics["time/double_s"] + metrics["time/scorer_s"]
    assert busy > 0.5
    assert elapsed < 0.8 * busy
    assert metrics["time/wait_s"] > 0.2  # the judge and the learner had to wait


def test_sync_never_waits(tmp_path: Path) -> None:
    with Program(toy("run.steps=1"), tmp_path) as program:
        next(program.runner.steps(program, first=1, count=1))
        assert summarise(program.meter.drain())["time/wait_s"] == 0


@pytest.mark.parametrize(
    ("overrides", "node", "what"),
    [
        (["double.fail_after=2"], "double", "RuntimeError: the stream broke"),
        (["double.fail_after=0"], "double", "RuntimeError: the stream broke"),
        (["scorer.fail_at=3"], "scorer", "ValueError: cannot score row 3"),
        (["double.twice=true"], "double", "ValueError: Numbers has rows twice: [0]"),
    ],
)
def test_one_error_stops_the_step(tmp_path: Path, overrides: list[str], node: str, what: str) -> None:
    before = threading.active_count()
    with pytest.raises(StageError) as caught:
        steps(tmp_path, "double=streaming", "double.most=1", "runner=overlap", "double.delay_s=0.01", *overrides)
    assert (caught.value.node, caught.value.step, caught.value.what) == (node, 1, what)
    assert threading.active_count() == before, "a thread was left"


def test_when_all_nodes_fail_one_error_is_raised(tmp_path: Path) -> None:
    with pytest.raises(StageError, match="failed in step 1"):
        steps(tmp_path, "runner=overlap", "scorer.fail_at=0", "second.fail_at=0")


# -- the join ------------------------------------------------------------------------------------------------


def numbers(ids: list[int], size: int = 2) -> Numbers:
    at = np.array(ids, np.int64)
    notes = Ragged.texts(str(i) for i in ids)
    return Numbers(step=1, group_size=size, purpose="train", row_id=at, group_id=at // size, value=at * 1.5, note=notes)


def test_join_by_row() -> None:
    join = Join(["a", "b"], "row")
    assert join.add("a", numbers([3, 1])) is None
    ready = join.add("b", numbers([1, 2]))
    assert ready is not None
    assert {p: r.row_id.tolist() for p, r in ready.items()} == {"a": [1], "b": [1]}
    ready = join.add("b", numbers([3]))
    assert ready is not None
    assert {p: r.row_id.tolist() for p, r in ready.items()} == {"a": [3], "b": [3]}
    assert join.add("b", None) is None
    with pytest.raises(ValueError, match=r"rows \[2\] came on port 'b' but not on 'a'"):
        join.add("a", None)


def test_join_by_group_without_a_size_waits_for_all() -> None:
    join = Join(["a"], "group")
    assert join.add("a", numbers([0, 1])) is not None
    join = Join(["a"], "group")
    assert join.add("a", _sizeless(numbers([0, 1]))) is None
    ready = join.add("a", None)
    assert ready is not None
    assert ready["a"].row_id.tolist() == [0, 1]


def _sizeless(rows: Numbers) -> Numbers:
    return replace(rows, group_size=0)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), grain=st.sampled_from(["row", "group", "batch"]), rows=st.integers(0, 12))
def test_join_gives_every_row_once_and_whole_grains(data: st.DataObject, grain: Any, rows: int) -> None:
    """Parts of three ports, cut and interleaved at random."""
    rows -= rows % 2
    arrivals: list[tuple[str, Numbers | None]] = []
    streams = {p: _cut(data, data.draw(st.permutations(range(rows)))) for p in "abc"}
    while streams:
        port = data.draw(st.sampled_from(sorted(streams)))
        arrivals.append((port, streams[port].pop(0)))
        if arrivals[-1][1] is None:
            del streams[port]
    join, given_out = Join(list("abc"), grain), []
    for port, part in arrivals:
        if ready := join.add(port, part):
            assert all(r.row_id.tolist() == ready["a"].row_id.tolist() for r in ready.values())
            assert np.all(np.diff(ready["a"].row_id) > 0)
            if grain == "group":
                assert np.all(np.unique(ready["a"].group_id, return_counts=True)[1] == 2)
            given_out.append(ready["a"].row_id.tolist())
    assert sorted(i for ids in given_out for i in ids) == list(range(rows))
    assert given_out, "a consumer of an empty batch is called, too"
    if grain == "batch":
        assert given_out == [list(range(rows))]


def _cut(data: st.DataObject, ids: list[int]) -> list[Numbers | None]:
    parts: list[Numbers | None] = []
    while ids or not parts:
        size = data.draw(st.integers(1, 4))
        parts.append(numbers(ids[:size]))
        ids = ids[size:]
    return [*parts, None]
