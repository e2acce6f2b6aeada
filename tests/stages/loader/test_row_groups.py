"""Rows of a Parquet file by position, whatever its types, its size and what fits into memory."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stages.loader import row_groups
from stages.loader.row_groups import RowGroups
from stages.loader.rows import BadRow, DataError

ROWS = [
    {
        "prompt": [{"role": "user", "content": f"what is {i}?"}, {"role": "assistant", "content": ""}][: 1 + i % 2],
        "reward_model": {"style": "rule", "ground_truth": str(i)},
        "extra_info": {"index": i, "tags": ["a"] * (i % 3), "none": None},
        "weight": i / 4,
    }
    for i in range(1000)
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    pq.write_table(pa.Table.from_pylist(ROWS), path := tmp_path / "a.parquet", row_group_size=130)
    return path


def column(path: Path, values: list[Any], kind: pa.DataType) -> list[Any]:
    """What comes back of a column of this type."""
    pq.write_table(pa.table({"x": pa.array(values, kind)}), path)
    return [row if isinstance(row, BadRow) else row["x"] for row in RowGroups(path).take(range(len(values)))]


@pytest.mark.parametrize("cache_bytes", [1 << 26, 20_000, 0], ids=["memory", "part on disk", "disk"])
def test_any_row_in_any_order(file: Path, cache_bytes: int) -> None:
    groups = RowGroups(file, cache_bytes=cache_bytes)
    assert len(groups) == len(ROWS)
    wanted = [*range(len(ROWS)), *random.Random(0).choices(range(len(ROWS)), k=500), *range(300, 100, -1)]
    assert groups.take(wanted) == [ROWS[i] for i in wanted]
    assert groups.take([]) == []
    assert groups._bytes <= cache_bytes


def test_lists_are_lists_and_objects_are_dicts(file: Path) -> None:
    [row] = RowGroups(file).take([7])
    assert isinstance(row, dict)
    assert type(row["prompt"]) is list
    assert {type(m) for m in row["prompt"]} == {dict}
    assert type(row["extra_info"]["tags"]) is list


def test_only_columns_that_are_asked_for_are_read(file: Path) -> None:
    groups = RowGroups(file, ["prompt", "reward_model.ground_truth", "extra_info.index.x", "missing", "other.part"])
    expected = {"prompt": ROWS[5]["prompt"], "reward_model": {"ground_truth": "5"}, "extra_info": ROWS[5]["extra_info"]}
    assert groups.take([5]) == [expected | {"weight": None}]
    assert RowGroups(file, ["missing"]).take([5, 6]) == [dict.fromkeys(ROWS[5])] * 2


def test_a_row_group_is_decoded_when_a_row_of_it_is_wanted_and_once(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[int] = []
    decode = RowGroups._decode
    monkeypatch.setattr(RowGroups, "_decode", lambda self, group: decoded.append(group) or decode(self, group))
    for cache_bytes in (1 << 26, 0):
        groups = RowGroups(file, cache_bytes=cache_bytes)
        assert decoded == []
        groups.take([131, 5, 140])
        assert decoded == [0, 1]
        groups.take([999, 6])
        groups.take(range(131))
        assert decoded == [0, 1, 7]
        decoded.clear()


def test_without_a_disk_the_oldest_are_dropped(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    groups = RowGroups(file, cache_bytes=30_000)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert groups.take(range(len(ROWS))) == ROWS
    assert [r.message for r in caplog.records if "No space left on device" in r.message] != []
    assert len(caplog.records) == 1
    assert groups._bytes <= 30_000 + max(size for *_, size in groups._decoded.values())


NOT_TEXT = b"ab\xac"


@pytest.mark.parametrize(
    ("values", "kind", "expected"),
    [
        ([1, None], pa.int8(), [1, None]),
        ([2**64 - 1], pa.uint64(), [2**64 - 1]),
        ([0.5], pa.float32(), [0.5]),
        ([True], pa.bool_(), [True]),
        (["a"], pa.large_string(), ["a"]),
        (["a", None], pa.string_view(), ["a", None]),
        (["a", "b", "a"], pa.dictionary(pa.int32(), pa.string()), ["a", "b", "a"]),
        ([["a"], None], pa.large_list(pa.large_string()), [["a"], None]),
        ([["a", "b"]], pa.list_(pa.string(), 2), [["a", "b"]]),
        ([[("k", 1.5), ("l", None)]], pa.map_(pa.string(), pa.float64()), [{"k": 1.5, "l": None}]),
        (["{\"a\": [1]}", None], pa.json_(), [{"a": [1]}, None]),
        ([date(2024, 2, 1)], pa.date32(), ["2024-02-01"]),
        ([datetime(2024, 2, 1, 3, 4, 5)], pa.timestamp("us"), ["2024-02-01T03:04:05"]),
        ([Decimal("1.10")], pa.decimal128(5, 2), ["1.10"]),
        ([b"text", None], pa.binary(), ["text", None]),
        ([{"a": [b"x"]}], pa.struct({"a": pa.list_(pa.binary())}), [{"a": ["x"]}]),
        ([None], pa.null(), [None]),
    ],
    ids=str,
)  # fmt: skip
def test_values_become_what_json_has(tmp_path: Path, values: list[Any], kind: pa.DataType, expected: list[Any]) -> None:
    assert column(tmp_path / "a", values, kind) == expected


@pytest.mark.parametrize(
    ("values", "kind", "told"),
    [
        ([1.0, float("nan")], pa.float64(), "column 'x' holds nan, which JSON does not have"),
        ([{"a": 1.0}, {"a": float("-inf")}], pa.struct({"a": pa.float32()}), "column 'x' holds -inf"),
        ([b"good", NOT_TEXT], pa.binary(), "is not UTF-8: byte 0xac in column 'x'"),
        ([[("k", 1)], [("k", 1), ("k", 2)]], pa.map_(pa.string(), pa.int64()), "a map in column 'x' has a key twice"),
        ([[], [(1, 1)]], pa.map_(pa.int64(), pa.int64()), "has keys that are not text"),
        (["1", "{"], pa.json_(), "column 'x' is not JSON"),
    ],
    ids=str,
)
def test_values_without_a_form_in_json_are_bad_rows(
    tmp_path: Path, values: list[Any], kind: pa.DataType, told: str
) -> None:
    good, bad = column(tmp_path / "a", values, kind)
    assert not isinstance(good, BadRow)
    assert told in str(bad)
    assert isinstance(bad, BadRow)


def test_text_that_is_none_is_a_bad_row(tmp_path: Path) -> None:
    """The type says UTF-8; nothing has checked it."""
    broken = pa.array(["ok", "xyz"]).buffers()
    text = pa.Array.from_buffers(pa.string(), 2, [None, broken[1], pa.py_buffer(b"ok" + NOT_TEXT)])
    pq.write_table(pa.table({"x": text}), path := tmp_path / "a")
    good, bad = RowGroups(path).take([0, 1])
    assert good == {"x": "ok"}
    assert "is not UTF-8: byte 0xac in column 'x'" in str(bad)


def test_the_name_of_a_column_may_hold_a_dot(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a.b": ["x"], "a": [{"b": "y", "c": "z"}]}), path := tmp_path / "a")
    assert RowGroups(path, ["a.b", "a.c"]).take([0]) == [{"a.b": "x", "a": {"b": "y", "c": "z"}}]


def test_a_column_that_stands_twice(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_arrays([pa.array([1]), pa.array([2])], ["x", "x"]), path := tmp_path / "a")
    with pytest.raises(DataError, match="has column 'x' twice"):
        RowGroups(path)


def test_nested_deeply(tmp_path: Path) -> None:
    """As deep as Arrow goes, which is less deep than rows may be."""
    value: Any = 1
    for _ in range(40):
        value = [value]
    pq.write_table(pa.table({"x": [value]}), path := tmp_path / "a")
    assert RowGroups(path).take([0]) == [{"x": value}]
    for _ in range(80):
        value = [value]
    pq.write_table(pa.table({"x": [value]}), path)
    with pytest.raises(DataError, match="too deeply nested"):
        RowGroups(path)


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda data: b"", id="empty"),
        pytest.param(lambda data: data[:-1], id="cut by a byte"),
        pytest.param(lambda data: data[: len(data) // 2], id="cut in half"),
        pytest.param(lambda data: data[:4] + b"\xff" * 200 + data[-8:], id="another end"),
        pytest.param(lambda data: b"no such thing", id="text"),
    ],
)
def test_no_whole_parquet_file(file: Path, spoil: Callable[[bytes], bytes]) -> None:
    file.write_bytes(spoil(file.read_bytes()))
    with pytest.raises(DataError, match=f"{file} cannot be read as Parquet"):
        RowGroups(file)


def test_a_row_group_that_cannot_be_read_fails(tmp_path: Path) -> None:
    """And is not skipped: the rows after it would get other numbers."""
    pq.write_table(pa.Table.from_pylist(ROWS), path := tmp_path / "a", row_group_size=250, write_page_checksum=True)
    meta = pq.ParquetFile(path).metadata.row_group(2).column(0)
    at = (meta.dictionary_page_offset or meta.data_page_offset) + 60
    data = bytearray(path.read_bytes())
    data[at : at + 8] = bytes(x ^ 0xFF for x in data[at : at + 8])
    path.write_bytes(data)
    groups = RowGroups(path)
    assert groups.take([0, 499, 999]) == [ROWS[0], ROWS[499], ROWS[999]]
    for _ in range(2):
        with pytest.raises(DataError, match=f"row group 3 of {path} cannot be read"):
            groups.take([0, 500])


def test_a_file_that_changes(file: Path) -> None:
    groups = RowGroups(file)
    groups.take([0])
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(DataError, match="was changed while the run reads it"):
        groups.take([999])


def test_no_permission_and_no_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read: No such file"):
        RowGroups(tmp_path / "none")


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()], ids=str)
def test_long_texts_in_few_rows(tmp_path: Path, kind: pa.DataType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece holds few of them, whatever a row group holds."""
    monkeypatch.setattr(row_groups, "_PIECE_BYTES", 1 << 20)
    texts = [chr(97 + i % 26) * 300_000 + str(i) for i in range(40)]
    chats = pa.array([[{"content": t}] for t in texts], pa.list_(pa.struct({"content": kind})))
    pq.write_table(pa.table({"x": pa.array(texts, kind), "chat": chats}), path := tmp_path / "a", use_dictionary=False)
    groups = RowGroups(path, cache_bytes=0)
    assert groups.take([39, 0, 17]) == [{"x": texts[i], "chat": [{"content": texts[i]}]} for i in (39, 0, 17)]
    assert len(groups._decoded[0][0]) > 10


@pytest.mark.slow
def test_a_column_beyond_two_gibibytes_in_one_row_group(tmp_path: Path) -> None:
    """Nested text of 2.3 GiB, which 32-bit offsets cannot reach (rllm-org/rllm 84, PrimeIntellect-ai/verifiers 230)."""
    size, rows = 8 << 20, 300
    kind = pa.list_(pa.struct({"role": pa.string(), "content": pa.string()}))
    schema = pa.schema({"prompt": kind})
    path = tmp_path / "a.parquet"
    with pq.ParquetWriter(path, schema, compression="zstd", use_dictionary=False) as writer:

        def batch(first: int) -> pa.RecordBatch:
            chats = [[{"role": "user", "content": f"{i:03d}" + "a" * (size - 3)}] for i in range(first, first + 20)]
            return pa.RecordBatch.from_pylist([{"prompt": c} for c in chats], schema)

        writer.write_table(pa.Table.from_batches([batch(i) for i in range(0, rows, 20)]), row_group_size=rows)
    groups = RowGroups(path, ["prompt"])
    assert pq.ParquetFile(path).num_row_groups == 1
    for i in (299, 0, 260):
        [row] = groups.take([i])
        assert isinstance(row, dict)
        text = row["prompt"][0]["content"]
        assert (text[:3], len(text)) == (f"{i:03d}", size)
    assert groups._bytes <= 1 << 26
