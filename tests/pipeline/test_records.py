"""Properties of ragged columns and records: split and concat are exact inverses, rows keep their content."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.records import Ragged, Record, Rows, Snapshot, offsets_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Extra:
    top: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample(Rows):
    """One field of each kind."""

    purpose: Literal["train", "eval"]
    scale: float
    name: str
    deep: bool
    names: tuple[str, ...]
    extra: Extra
    score: np.ndarray
    grid: np.ndarray
    tokens: Ragged
    flags: Ragged


rows_of_ints = st.lists(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5), max_size=8)


@st.composite
def samples(draw: st.DrawFn, least: int = 0) -> Sample:
    tokens = draw(st.lists(st.lists(st.integers(-5, 99), max_size=4), min_size=least, max_size=9))
    size = len(tokens)
    ids = draw(st.permutations(range(100, 100 + size)))
    scores = draw(st.lists(st.floats(width=32, allow_nan=True), min_size=size, max_size=size))
    return Sample(
        step=draw(st.integers(0, 9)),
        group_size=2,
        row_id=np.array(ids, np.int64),
        group_id=np.array(ids, np.int64) // 2,
        purpose="train",
        scale=0.5,
        name="x",
        deep=True,
        names=("a", "b"),
        extra=Extra(top=3),
        score=np.array(scores, np.float32),
        grid=np.arange(3 * size, dtype=np.int16).reshape(size, 3),
        tokens=Ragged.of(tokens, np.int32),
        flags=Ragged.of([[t > 3 for t in row] for row in tokens], np.bool_),
    )


def sizes_of(draw: Any, total: int) -> list[int]:
    """Sizes of at least one part, zeros among them, that add up."""
    cuts = sorted(draw(st.lists(st.integers(0, total), max_size=5)))
    return [b - a for a, b in pairwise([0, *cuts, total])]


# -- Ragged --------------------------------------------------------------------------------------------------


@given(rows_of_ints)
def test_ragged_holds_its_rows(rows: list[list[int]]) -> None:
    ragged = Ragged.of(rows, np.int32)
    assert [r.tolist() for r in ragged.rows()] == rows
    assert len(ragged) == len(rows)
    assert ragged.lengths.tolist() == [len(r) for r in rows]
    assert ragged.values.tolist() == [v for r in rows for v in r]
    assert ragged.row_of_value().tolist() == [i for i, r in enumerate(rows) for _ in r]
    assert (ragged.values.dtype, ragged.offsets.dtype) == (np.int32, np.int64)


@given(rows_of_ints, st.data())
def test_ragged_take_is_indexing_of_lists(rows: list[list[int]], data: st.DataObject) -> None:
    index = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=12)) if rows else []
    assert [r.tolist() for r in Ragged.of(rows, np.int32).take(index).rows()] == [rows[i] for i in index]


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=6), max_size=6))
def test_text_and_json_come_back(texts: list[str]) -> None:
    as_text, as_json = Ragged.texts(texts), Ragged.jsons({"t": t, "n": [1, None]} for t in texts)
    assert [as_text.text(i) for i in range(len(texts))] == texts
    assert [as_json.json(i) for i in range(len(texts))] == [{"t": t, "n": [1, None]} for t in texts]


def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(UnicodeEncodeError):
        Ragged.texts(["\ud800"])


@pytest.mark.parametrize(
    ("values", "offsets", "what"),
    [
        (np.zeros(3), np.array([0, 3], np.int32), "int64"),
        (np.zeros((3, 1)), np.array([0, 3]), "values"),
        (np.zeros(3), np.empty(0, np.int64), "offsets"),
        (np.array(["a", None], object), np.array([0, 2]), "plain numbers"),
        (np.zeros(3), np.array([0, 2]), "rise from 0 to 3"),
        (np.zeros(3), np.array([1, 3]), "rise"),
        (np.zeros(3), np.array([0, 2, 1, 3]), "rise"),
    ],
)
def test_ragged_refuses(values: np.ndarray, offsets: np.ndarray, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        Ragged(values, offsets)


def test_rows_outside_are_refused() -> None:
    ragged = Ragged.of([[1], [2, 3]], np.int32)
    for row in (-1, 2):
        with pytest.raises(IndexError):
            ragged[row]
    with pytest.raises(IndexError):
        ragged.take([2])
    with pytest.raises(TypeError, match="not by bool"):
        ragged.take(np.array([True, False]))


def test_offsets_of() -> None:
    assert offsets_of([2, 0, 3]).tolist() == [0, 2, 2, 5]
    assert offsets_of([]).tolist() == [0]


# -- Rows ----------------------------------------------------------------------------------------------------


@given(samples(), st.data())
def test_concat_undoes_split(sample: Sample, data: st.DataObject) -> None:
    sizes = sizes_of(data.draw, len(sample))
    parts = sample.split(sizes)
    assert [len(p) for p in parts] == sizes
    assert Sample.concat(parts).same(sample)


@given(st.lists(samples(), min_size=1, max_size=4))
def test_split_undoes_concat(parts: list[Sample]) -> None:
    parts = [replace(p, step=3) for p in parts]
    back = Sample.concat(parts).split([len(p) for p in parts])
    assert all(a.same(b) for a, b in zip(parts, back, strict=True))


@given(samples(least=1), st.data())
def test_take_keeps_rows_together(sample: Sample, data: st.DataObject) -> None:
    index = data.draw(st.lists(st.integers(0, len(sample) - 1), max_size=12))
    taken = sample.take(index)
    assert taken.shared() == sample.shared()
    for new, old in enumerate(index):
        assert taken.row_id[new] == sample.row_id[old]
        assert taken.grid[new].tolist() == sample.grid[old].tolist()
        assert taken.tokens[new].tolist() == sample.tokens[old].tolist()
        assert taken.score[new].tobytes() == sample.score[old].tobytes()


@given(samples(), st.randoms(use_true_random=False))
def test_align_undoes_a_permutation(sample: Sample, random: Any) -> None:
    order = list(range(len(sample)))
    random.shuffle(order)
    assert sample.take(order).align(sample.row_id).same(sample)
    ordered = sample.in_order()
    assert ordered.row_id.tolist() == sorted(sample.row_id.tolist())
    assert ordered.same(sample.align(np.sort(sample.row_id)))


def test_align_names_missing_rows_and_in_order_double_ones() -> None:
    sample = samples_of(3)
    with pytest.raises(KeyError, match=r"Sample has no rows \[7\]"):
        sample.align(np.array([1, 7]))
    with pytest.raises(ValueError, match=r"Sample has rows twice: \[1\]"):
        sample.take([1, 0, 1]).in_order()
    assert sample.in_order() is sample


@given(samples(), st.data())
def test_same_sees_every_change(sample: Sample, data: st.DataObject) -> None:
    assert sample.same(pickle.loads(pickle.dumps(sample)))
    changed: list[Rows] = [
        replace(sample, step=sample.step + 1),
        replace(sample, extra=Extra(top=4)),
        replace(sample, score=sample.score.astype(np.float64)),
        replace(sample, grid=sample.grid.reshape(len(sample), 3, 1)),
        Rows(step=sample.step, group_size=2, row_id=sample.row_id, group_id=sample.group_id),
    ]
    if len(sample):
        flipped = sample.score.copy()
        flipped.view(np.uint8)[data.draw(st.integers(0, flipped.nbytes - 1))] ^= 1
        longer = Ragged.of([*(r.tolist() for r in sample.tokens.rows()[:-1]), [7] * 9], np.int32)
        changed += [replace(sample, score=flipped), replace(sample, tokens=longer)]
    assert not any(sample.same(c) or c.same(sample) for c in changed)


def samples_of(size: int, **changes: Any) -> Sample:
    at = np.arange(size)
    text = Ragged.of([[i] for i in at], np.int32)
    fields: dict[str, Any] = {"step": 1, "row_id": at, "group_id": at, "purpose": "eval", "scale": 1.0, "name": "x"}
    fields |= {
        "deep": False,
        "names": (),
        "extra": Extra(),
        "score": np.zeros(size, np.float32),
        "grid": np.zeros((size, 2)),
    }
    return Sample(**(fields | {"tokens": text, "flags": text} | changes))


@pytest.mark.parametrize(
    ("field", "value", "what"),
    [
        ("score", [0.0, 0.0], "score must be ndarray, got list"),
        ("score", Ragged.of([[1], [2]], np.int32), "score must be ndarray, got Ragged"),
        ("score", np.array([None, 1]), "score must be ndarray, got object array"),
        ("tokens", np.zeros(2), "tokens must be Ragged, got float64 array"),
        ("step", np.int64(1), "step must be int, got int64"),
        ("step", True, "step must be int, got bool"),
        ("scale", "1", "scale must be float, got str"),
        ("name", 3, "name must be str, got int"),
        ("deep", 1, "deep must be bool, got int"),
        ("extra", {"top": 1}, "extra must be Extra, got dict"),
    ],
)
def test_a_field_must_be_what_its_annotation_says(field: str, value: Any, what: str) -> None:
    with pytest.raises(TypeError, match=f"Sample.{what}"):
        samples_of(2, **{field: value})


def test_an_int_may_stand_for_a_float() -> None:
    assert samples_of(1, scale=2).scale == 2


@pytest.mark.parametrize(
    ("field", "value", "what"),
    [
        ("row_id", np.arange(2, dtype=np.int32), "row_id must be int64"),
        ("group_id", np.zeros((2, 1), np.int64), "group_id must be int64"),
        ("score", np.zeros(3, np.float32), "score has 3 rows, row_id has 2"),
        ("flags", Ragged.of([[1]], np.int32), "flags has 1 rows, row_id has 2"),
    ],
)
def test_columns_must_have_the_rows(field: str, value: Any, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        samples_of(2, **{field: value})


def test_split_and_concat_refuse() -> None:
    sample = samples_of(3)
    for sizes in ([1, 1], [4], [4, -1], []):
        with pytest.raises(ValueError, match="do not add up to 3"):
            sample.split(sizes)
    with pytest.raises(ValueError, match="zero parts"):
        Sample.concat([])
    with pytest.raises(ValueError, match="parts of Sample differ"):
        Sample.concat([sample, replace(sample, step=2)])
    with pytest.raises(ValueError, match="dtype of score: float32, float64"):
        Sample.concat([sample, replace(sample, score=np.zeros(3))])


def test_records_are_frozen_and_a_snapshot_is_checked() -> None:
    with pytest.raises(AttributeError):
        samples_of(1).step = 2  # type: ignore[misc]
    snapshot = Snapshot(version=1, manifest=(("w", "<f4", (1,), 0, 4),), data=np.zeros(4, np.uint8))
    assert snapshot.same(pickle.loads(pickle.dumps(snapshot)))
    with pytest.raises(TypeError, match=r"Snapshot\.data"):
        Snapshot(version=1, manifest=(), data=b"")  # type: ignore[arg-type]
    assert isinstance(snapshot, Record)
