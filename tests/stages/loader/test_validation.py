"""Every row is looked at once: here or in other processes, with the same verdict."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from pipeline.process import ChildDied
from stages.loader import LoaderConfig, validation
from stages.loader.rows import DataError, RowParser
from stages.loader.text import TextFile
from stages.loader.validation import judge

GOOD, BAD = b'{"prompt": "p", "answer": "a"}\n', b'{"prompt": 1, "answer": "a"}\n'


@pytest.fixture
def parser() -> RowParser:
    return RowParser(LoaderConfig(path="x"), "loader")


def write(path: Path, rows: int, bad: set[int]) -> Path:
    path.write_bytes(b"".join(BAD if i in bad else GOOD for i in range(rows)))
    return path


@pytest.mark.parametrize("cores", [1, 3])
def test_every_bad_row_is_found(parser: RowParser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    monkeypatch.setattr(validation, "_LARGE", 1)
    bad = {0, 1, 8191, 8192, 20_000, 29_999}
    path = write(tmp_path / "a", 30_000, bad)
    source = TextFile.with_index(path, parser, "")
    verdict = judge(source, 30_000, parser.verdict_key(), "full", cores, "loader")
    assert verdict.bad.tolist() == sorted(bad)
    assert verdict.checked == 30_000
    source.close()
    again = TextFile.with_index(path, parser, "")
    known = again.known(parser.verdict_key(), 30_000)
    assert known is not None
    assert known.bad.tolist() == sorted(bad)
    part = judge(again, 8192, parser.verdict_key(), "full", cores, "loader")
    assert (part.checked, part.bad.tolist()) == (8192, [0, 1, 8191])
    again.close()


def test_more_rows_than_were_looked_at_are_looked_at(parser: RowParser, tmp_path: Path) -> None:
    path = write(tmp_path / "a", 100, {10, 60})
    for rows, bad in ((50, [10]), (20, [10]), (100, [10, 60]), (50, [10])):
        source = TextFile.with_index(path, parser, "")
        assert judge(source, rows, parser.verdict_key(), "full", 1, "loader").bad.tolist() == bad
        source.close()


def test_a_verdict_that_is_known_is_used_whatever_is_asked_for(parser: RowParser, tmp_path: Path) -> None:
    path = write(tmp_path / "a", 5000, {4001})
    source = TextFile.with_index(path, parser, "")
    assert judge(source, 5000, parser.verdict_key(), "sample", 1, "loader").bad.tolist() == []  # not one of the 1000
    assert judge(source, 5000, parser.verdict_key(), "off", 1, "loader").bad.tolist() == []
    assert judge(source, 5000, parser.verdict_key(), "full", 1, "loader").bad.tolist() == [4001]
    assert judge(source, 5000, parser.verdict_key(), "sample", 1, "loader").bad.tolist() == [4001]
    source.close()


def test_a_sample_is_spread_over_the_file(parser: RowParser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = TextFile.with_index(write(tmp_path / "a", 5000, set()), parser, "")
    asked: list[int] = []
    read = source.rows
    monkeypatch.setattr(source, "rows", lambda positions: asked.extend(positions) or read(positions))
    assert judge(source, 5000, parser.verdict_key(), "sample", 1, "loader").checked == 1000
    assert (asked[0], asked[-1], len(asked)) == (0, 4999, 1000)
    assert set(np.diff(asked).tolist()) <= {5, 6}
    source.close()


def test_an_error_in_another_process_is_raised_here(
    parser: RowParser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validation, "_LARGE", 1)
    path = write(tmp_path / "a", 30_000, set())
    source = TextFile.with_index(path, parser, "")
    os.replace(write(tmp_path / "b", 30_000, {3}), path)
    with pytest.raises(DataError, match="was changed while the run reads it"):
        judge(source, 30_000, parser.verdict_key(), "full", 2, "loader")
    source.close()


def test_a_process_that_dies_is_an_error(parser: RowParser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "_LARGE", 1)
    source = TextFile.with_index(write(tmp_path / "a", 30_000, set()), parser, "")
    monkeypatch.setattr(source, "recipe", lambda: os.abort)
    with pytest.raises(ChildDied, match=r"'loader validation [01]' ended by signal SIGABRT"):
        judge(source, 30_000, parser.verdict_key(), "full", 2, "loader")
    assert source.known(parser.verdict_key(), 1) is None
    source.close()
