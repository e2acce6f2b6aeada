"""Faults of other loaders, as public reports have them (../shared/cases/bug-bank.md, area A): they cannot occur here.

Those that are about one part stand in its tests: 8 (several frames) with the packed files, 10 (no last newline) with
several files, 11 (half a record), 12 (CRLF) and 15 (32-bit offsets) with the index, 16 to 18 with Parquet.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stages.loader import FieldNames
from stages.loader.file_loader import FileLoader
from stages.loader.files import GZIP, ZSTD
from stages.loader.rows import DataError
from stages.records import PromptBatch
from tests.loader_files import ENTRIES, FORMATS, TEXTS, Format, answers, numbered, prompts

Open = Callable[..., FileLoader]
BOM = b"\xef\xbb\xbf"


@pytest.fixture(params=FORMATS, ids=str)
def form(request: pytest.FixtureRequest) -> Format:
    return request.param


@pytest.fixture(params=TEXTS, ids=str)
def text(request: pytest.FixtureRequest) -> Format:
    return request.param


def batch_of(open_loader: Open, form: Format, path: Path, **settings: Any) -> PromptBatch:
    return open_loader(form.entry, path, batch_size=0, shuffle=False, **settings).run()


def refusal(open_loader: Open, form: Format, path: Path, **settings: Any) -> str:
    with pytest.raises(DataError) as e:
        open_loader(form.entry, path, batch_size=1, **settings)
    return str(e.value)


def lines(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(r).encode() + b"\n" for r in rows)


def extras(batch: PromptBatch) -> list[Any]:
    return [batch.extra.json(i) for i in range(len(batch))]


def test_2_a_byte_order_mark_changes_no_row(text: Format, open_loader: Open, tmp_path: Path) -> None:
    rows = [{"prompt": "p", "answer": "1", "extra_info": {k: 1}} for k in "ab"]
    for mark in (b"", BOM):
        path = tmp_path / f"a{len(mark)}"
        path.write_bytes(text.pack(mark + lines(rows)))
        assert extras(batch_of(open_loader, text, path)) == [{"a": 1}, {"b": 1}]


@pytest.mark.parametrize("count", [1, 3, 6])
def test_3_no_row_is_lost_to_a_byte_order_mark(text: Format, open_loader: Open, tmp_path: Path, count: int) -> None:
    path = tmp_path / "a"
    path.write_bytes(text.pack(BOM + lines(numbered(count))))
    assert prompts(batch_of(open_loader, text, path)) == [f"p{i}" for i in range(count)]


def test_3_a_mark_elsewhere_is_no_mark(text: Format, open_loader: Open, tmp_path: Path) -> None:
    """Of two files that were joined: it belongs to no line, and JSON does not allow it."""
    path = tmp_path / "a"
    path.write_bytes(text.pack(lines(numbered(2)) + BOM + lines(numbered(2))))
    assert f"1 of 4 rows of {path} cannot be used:\n  {path}:3 (byte" in refusal(open_loader, text, path)


def test_4_blank_lines_lose_no_row(text: Format, open_loader: Open, tmp_path: Path) -> None:
    first, second = lines(numbered(1)), lines(numbered(1, first=1))
    path = tmp_path / "a"
    path.write_bytes(text.pack(first + b"\n  \t\n" + second))
    assert answers(batch_of(open_loader, text, path)) == ["0", "1"]


@pytest.mark.parametrize(
    ("content", "line", "reason"),
    [
        (b'{"prompt": "p", "answer": "1"}\n\n{"prompt": "secret"', 3, "is not JSON"),
        (b'{"prompt": "p", "answer": "1"}\n[1,2]\n', 2, "an object is needed, not a list"),
        (b'{"prompt": "p", "answer": "1"}\n"secret"\n', 2, "an object is needed, not text"),
        (b'{"prompt": "p", "answer": "1"}\nnull\n', 2, "an object is needed, not null"),
    ],
)
def test_5_errors_tell_file_and_line_and_no_content(
    text: Format, open_loader: Open, tmp_path: Path, content: bytes, line: int, reason: str
) -> None:
    path = tmp_path / "a"
    path.write_bytes(text.pack(content))
    message = refusal(open_loader, text, path)
    assert f"{path}:{line} (byte" in message
    assert reason in message
    assert "secret" not in message


def test_6_one_bad_byte_among_many_rows_is_found(text: Format, open_loader: Open, tmp_path: Path) -> None:
    rows = lines(numbered(1000)).split(b"\n")
    rows[699] = b'{"prompt": "p\xac", "answer": "699"}'
    path = tmp_path / "a"
    path.write_bytes(text.pack(b"\n".join(rows)))
    message = refusal(open_loader, text, path)
    assert f"{path}:700 (byte {len(b'x'.join(rows[:699])) + 1}): is not UTF-8: byte 0xac at byte 14" in message
    kept = answers(batch_of(open_loader, text, path, on_bad_row="skip"))
    assert kept == [str(i) for i in range(1000) if i != 699]


def test_9_a_row_longer_than_any_block(form: Format, open_loader: Open, tmp_path: Path) -> None:
    """A block of the reader is 1 MiB at most: the row begins in one and ends in another."""
    texts = ["x", "a" * (5 << 20), "y" * 700_000, "z" * 700_000, "w"]
    path = form.write(tmp_path / "a", [{"prompt": t, "answer": i} for i, t in enumerate(texts)])
    assert prompts(batch_of(open_loader, form, path)) == texts


@pytest.mark.slow
@pytest.mark.parametrize("form", [f for f in FORMATS if f.kind not in (GZIP, ZSTD)], ids=str)
def test_9_a_row_of_100_megabytes(form: Format, open_loader: Open, tmp_path: Path) -> None:
    texts = ["x", "a" * 100_000_000, "y"]
    path = form.write(tmp_path / "a", [{"prompt": t, "answer": i} for i, t in enumerate(texts)])
    assert prompts(batch_of(open_loader, form, path)) == texts


def test_13_an_empty_file_is_told_of_in_words(open_loader: Open, tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.touch()
    for form in FORMATS:
        assert refusal(open_loader, form, path) == f"{path} is empty"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"question": "q", "answer": "1"}, "has no key 'prompt' (loader.fields.prompt); its keys are: 'question'"),
        ({"prompt": None, "answer": "1"}, "key 'prompt' is null"),
        ({"prompt": "", "answer": "1"}, "the prompt (key 'prompt') is empty"),
        ({"prompt": 7, "answer": "1"}, "must be text or a list of chat messages, not a number"),
        ({"prompt": {"role": "user", "content": "x"}, "answer": "1"}, "must be text or a list of chat messages, not"),
        ({"prompt": [{"role": "user", "content": ""}], "answer": "1"}, "is a chat of empty messages"),
        ({"prompt": [[{"role": "user", "content": "x"}]], "answer": "1"}, "message 0 of the chat must be an object"),
        ({"prompt": [{"role": "user", "content": 5}], "answer": "1"}, "needs a text 'content', not a number"),
    ],
    ids=lambda x: json.dumps(x)[:40] if isinstance(x, dict) else "",
)
def test_19_rows_without_a_prompt_never_train(
    form: Format, open_loader: Open, tmp_path: Path, row: dict[str, Any], reason: str
) -> None:
    path = form.write(tmp_path / "a", [row])
    assert reason in refusal(open_loader, form, path)


def test_20_a_key_that_stands_twice_is_refused_by_all(text: Format, open_loader: Open, tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(text.pack(b'{"prompt":"a","prompt":"b","answer":"1"}\n'))
    assert f"{path}:1 (byte 0): key 'prompt' stands twice in one object" in refusal(open_loader, text, path)


def test_21_the_order_of_keys_decides_nothing(text: Format, open_loader: Open, tmp_path: Path) -> None:
    fields = FieldNames(extra="meta")
    path = tmp_path / "a"
    rows = [{"meta": {"c": 8, "b": 5}, "prompt": "p", "answer": "1"}, {"answer": "2", "prompt": "q", "meta": {"b": 1}}]
    path.write_bytes(text.pack(lines(rows)))
    batch = batch_of(open_loader, text, path, fields=fields)
    assert extras(batch) == [{"c": 8, "b": 5}, {"b": 1}]
    assert (prompts(batch), answers(batch)) == (["p", "q"], ["1", "2"])


def test_22_side_files_of_archives_and_editors_are_no_data(
    form: Format, open_loader: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    form.write(tmp_path / "train.jsonl", numbered(3))
    for name in ("._train.jsonl", ".train.jsonl.swp", "train.jsonl.tmp"):
        (tmp_path / name).write_bytes(b"\x00\x05\x16\x07 not a row")
    assert answers(batch_of(open_loader, form, tmp_path / "*.jsonl")) == ["0", "1", "2"]
    assert f"loader.path leaves out: {tmp_path / '._train.jsonl'}" in caplog.text
    assert answers(batch_of(open_loader, form, tmp_path / "*.jsonl")) == ["0", "1", "2"]  # beside an index, too


def test_23_a_batch_larger_than_the_file_is_an_error(form: Format, open_loader: Open, tmp_path: Path) -> None:
    path = form.write(tmp_path / "a", numbered(7))
    with pytest.raises(DataError, match=r"loader.batch_size is 8, but .* gives 7 rows"):
        open_loader(form.entry, path, batch_size=8)


def test_every_loader_takes_part() -> None:
    assert {f.entry.name for f in FORMATS} == {e.name for e in ENTRIES}
