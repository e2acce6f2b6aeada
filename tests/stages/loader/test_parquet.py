"""Parquet files as a loader reads them: the same rows, and the same words about bad ones, as from JSONL."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stages.loader import FieldNames
from stages.loader.file_loader import FileLoader
from stages.loader.mmap import MmapLoader, MmapLoaderConfig
from stages.loader.parquet import ParquetLoader, ParquetLoaderConfig
from stages.loader.rows import DataError
from stages.model.hf import HfModel, HfModelConfig
from stages.records import PromptBatch
from tests.builders import plan_facts

Opened = Callable[..., FileLoader]

VERL = FieldNames(ground_truth="reward_model.ground_truth")
VERL_ROWS = [
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "system", "content": "é\u2028"}, {"role": "user", "content": f"{i} + 1 = ?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(i + 1)},
        "extra_info": {"index": i, "split": "train", "weights": [i / 3, 1e300], "answer": None},
    }
    for i in range(300)
]
CHAT = pa.list_(pa.struct({"role": pa.string(), "content": pa.large_string()}))


@pytest.fixture
def opened(tiny_model: Path, make_context: Callable[..., Any]) -> Iterator[Opened]:
    """`opened(path, **settings)`: an open loader for a Parquet or JSONL file, of all its rows in their order."""
    loaders: list[FileLoader] = []

    def open_(path: Path, **settings: Any) -> FileLoader:
        parquet = path.suffix == ".parquet"
        cls, config = (ParquetLoader, ParquetLoaderConfig) if parquet else (MmapLoader, MmapLoaderConfig)
        cfg: Any = config(**{"path": str(path), "batch_size": 0, "shuffle": False} | settings)
        loaders.append(cls(cfg, HfModel(HfModelConfig(path=str(tiny_model)))))
        loaders[-1].open(make_context("loader"))
        return loaders[-1]

    yield open_
    for loader in loaders:
        loader.close()


def write_both(folder: Path, rows: Sequence[dict[str, Any]], schema: pa.Schema | None = None) -> tuple[Path, Path]:
    """The same rows as Parquet, in groups of 70, and as JSONL."""
    table = pa.Table.from_pylist(list(rows), schema)
    parquet, jsonl = folder / "a.parquet", folder / "a.jsonl"
    pq.write_table(table, parquet, row_group_size=70)
    jsonl.write_text("".join(json.dumps(r) + "\n" for r in table.to_pylist()))
    return parquet, jsonl


def test_verls_layout_gives_the_bytes_of_jsonl(opened: Opened, tmp_path: Path) -> None:
    paths = write_both(tmp_path, VERL_ROWS)
    for settings in ({}, {"limit": 71}, {"skip": 70, "batch_size": 90}):
        parquet, jsonl = (opened(p, fields=VERL, **settings).run() for p in paths)
        assert parquet.same(jsonl)
    batch: PromptBatch = opened(paths[0], fields=VERL).run()
    assert batch.prompt.json(7) == VERL_ROWS[7]["prompt"]
    assert batch.ground_truth.json(7) == "8"
    assert batch.data_source.text(7) == "openai/gsm8k"
    assert batch.extra.json(7) == VERL_ROWS[7]["extra_info"]


def test_plain_columns_shuffled_give_the_bytes_of_jsonl(opened: Opened, tmp_path: Path) -> None:
    paths = write_both(tmp_path, [{"prompt": f"p{i}", "answer": i} for i in range(300)])
    parquet, jsonl = (opened(p, batch_size=32, shuffle=True, chat=True) for p in paths)
    for _ in range(10):
        assert parquet.run().same(jsonl.run())


def test_rows_that_do_not_fit_into_the_cache(opened: Opened, tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": f"{i}" * 1000}], "answer": "x"} for i in range(300)]
    parquet, jsonl = write_both(tmp_path, rows, pa.schema({"prompt": CHAT, "answer": pa.large_string()}))
    small, expected = opened(parquet, cache_bytes=1000, shuffle=True), opened(jsonl, shuffle=True)
    assert small.run().same(expected.run())


BAD = [
    pytest.param([{"prompt": None, "answer": "a"}], {"prompt": pa.string()}, id="null"),
    pytest.param([{"prompt": ""}, {"prompt": " \n"}], {"prompt": pa.string()}, id="empty"),
    pytest.param([{"prompt": []}], {"prompt": CHAT}, id="no messages"),
    pytest.param([{"prompt": [None]}], {"prompt": CHAT}, id="no message"),
    pytest.param([{"prompt": [{"role": None, "content": "a"}]}], {"prompt": CHAT}, id="no role"),
    pytest.param([{"prompt": [{"role": "user", "content": ""}]}], {"prompt": CHAT}, id="empty messages"),
    pytest.param([{"question": "q"}], {"question": pa.string()}, id="another key"),
    pytest.param([{"prompt": 5}], {"prompt": pa.int32()}, id="number"),
    pytest.param([{"prompt": 5.5}], {"prompt": pa.float64()}, id="fraction"),
    pytest.param([{"prompt": True}], {"prompt": pa.bool_()}, id="true"),
    pytest.param([{"prompt": {"a": "b"}}], {"prompt": pa.struct({"a": pa.string()})}, id="object"),
    pytest.param([{"prompt": ["a"]}], {"prompt": pa.list_(pa.string())}, id="list of text"),
    pytest.param([{"prompt": "p", "answer": None}], {"prompt": pa.string()}, id="no answer"),
    pytest.param(
        [{"prompt": "p", "data_source": 5}], {"prompt": pa.string(), "data_source": pa.int64()}, id="data source"
    ),
    pytest.param(
        [{"prompt": "p", "extra_info": ["a"]}],
        {"prompt": pa.string(), "extra_info": pa.list_(pa.string())},
        id="extra",
    ),
]


@pytest.mark.parametrize(("rows", "types"), BAD)
def test_bad_rows_are_told_in_the_words_of_jsonl(
    opened: Opened, tmp_path: Path, rows: list[Any], types: dict[str, Any]
) -> None:
    schema = pa.schema({**types, "answer": pa.string()})
    told: list[list[str]] = []
    for path in write_both(tmp_path, [{"answer": "a"} | row for row in rows], schema):
        with pytest.raises(DataError) as e:
            opened(path)
        told.append([line.partition(": ")[2] for line in str(e.value).splitlines()[1:]])
    ours, jsonl = told
    assert ours == jsonl
    assert len(ours) == len(rows)


def test_the_place_of_a_bad_row_is_its_number(opened: Opened, tmp_path: Path) -> None:
    pq.write_table(
        pa.table({"prompt": ["a", "b", "", "d", None], "answer": [*"abcde"]}),
        path := tmp_path / "a.parquet",
        row_group_size=2,
    )
    with pytest.raises(DataError) as e:
        opened(path)
    assert str(e.value).splitlines() == [
        f"2 of 5 rows of {path} cannot be used:",
        f"  {path}, row 3: the prompt (key 'prompt') is empty",
        f"  {path}, row 5: key 'prompt' is null",
    ]


def test_a_fraction_that_json_does_not_have(opened: Opened, tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["a", "b"], "answer": [0.5, float("nan")]}), path := tmp_path / "a.parquet")
    with pytest.raises(DataError, match="row 2: column 'answer' holds nan"):
        opened(path)


def test_a_row_group_that_fails_fails_the_start(opened: Opened, tmp_path: Path) -> None:
    table = pa.Table.from_pylist(VERL_ROWS)
    pq.write_table(table, path := tmp_path / "a.parquet", row_group_size=100, write_page_checksum=True)
    meta = pq.ParquetFile(path).metadata.row_group(1)
    [column] = [meta.column(i) for i in range(meta.num_columns) if meta.column(i).path_in_schema.endswith("content")]
    data = bytearray(path.read_bytes())
    data[column.data_page_offset + 100] ^= 0xFF
    path.write_bytes(data)
    for settings in ({}, {"on_bad_row": "skip"}):
        with pytest.raises(DataError, match=f"row group 2 of {path} cannot be read"):
            opened(path, fields=VERL, **settings)


def test_what_is_known_of_the_rows_is_kept(opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second start decodes nothing."""
    from stages.loader.row_groups import RowGroups

    pq.write_table(pa.Table.from_pylist(VERL_ROWS), path := tmp_path / "a.parquet", row_group_size=100)
    decoded: list[int] = []
    decode = RowGroups._decode
    monkeypatch.setattr(RowGroups, "_decode", lambda self, group: decoded.append(group) or decode(self, group))
    opened(path, fields=VERL, batch_size=4, prefetch=0).close()
    assert decoded == [0, 1, 2]
    opened(path, fields=VERL, batch_size=4, prefetch=0)
    assert decoded == [0, 1, 2]
    assert (tmp_path / "a.parquet.hridx").exists()


@pytest.mark.parametrize("content", [b"", b'{"prompt": "p"}\n', b"PAR1" + bytes(100), b"\x1f\x8b" + bytes(9)])
def test_other_files_are_refused(opened: Opened, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(content)
    with pytest.raises(DataError, match=str(path)):
        opened(path)


def test_the_plan_says_which_content_is_needed(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "a").write_text('{"prompt": "p"}\n')
    model = HfModel(HfModelConfig(path=str(tiny_model)))
    [problem] = ParquetLoader(ParquetLoaderConfig(path=str(tmp_path / "a")), model).check(plan_facts("loader"))
    assert "Parquet is needed" in problem.what
