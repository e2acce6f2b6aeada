"""What every loader must do, and that all of them do the same, whatever the format of the file."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.context import Context
from pipeline.metrics import summarise
from pipeline.registry import Entry
from stages.loader import FieldNames, SamplingOverride
from stages.loader.file_loader import FileLoader
from stages.loader.files import TEXT
from stages.loader.rows import DataError
from stages.records import PromptBatch, Sampling
from tests.builders import plan_facts
from tests.loader_files import ENTRIES, FORMATS, PLAIN, ROW, TEXTS, Format, answers, numbered, prompts, reads, write

Open = Callable[..., FileLoader]


@pytest.fixture(params=FORMATS, ids=str)
def form(request: pytest.FixtureRequest) -> Format:
    return request.param


@pytest.fixture(params=TEXTS, ids=str)
def text(request: pytest.FixtureRequest) -> Format:
    return request.param


@pytest.fixture(params=PLAIN, ids=lambda e: e.name)
def entry(request: pytest.FixtureRequest) -> Entry:
    """Loaders of plain text."""
    return request.param


def whole(open_loader: Open, entry: Entry, path: Any, **settings: Any) -> PromptBatch:
    """All rows, in the order of the files."""
    return open_loader(entry, path, batch_size=0, shuffle=False, **settings).run()


def opening_error(open_loader: Open, entry: Entry, path: Any, **settings: Any) -> str:
    with pytest.raises(DataError) as e:
        open_loader(entry, path, **settings)
    return str(e.value)


# -- rows and their order ------------------------------------------------------------------------------------


def test_rows_are_those_of_the_file(entry: Entry, open_loader: Open, root: Path) -> None:
    path = root / "data" / "digits" / "heldout.jsonl"
    batch = whole(open_loader, entry, path, purpose="eval")
    expected = [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
    assert prompts(batch) == [r["prompt"] for r in expected]
    assert answers(batch) == [r["answer"] for r in expected]
    assert (batch.purpose, batch.group_size, batch.step) == ("eval", 1, 1)
    assert batch.row_id.tolist() == batch.group_id.tolist() == list(range(len(expected)))


def test_every_row_comes_once_an_epoch_and_batches_are_never_short(
    form: Format, open_loader: Open, tmp_path: Path
) -> None:
    loader = open_loader(form.entry, form.write(tmp_path / "a", numbered(10)), batch_size=4)
    batches = [loader.run() for _ in range(5)]
    seen = [int(a) for b in batches for a in answers(b)]
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
    assert seen[:10] != seen[10:]
    assert [len(b) for b in batches] == [4] * 5
    assert np.concatenate([b.row_id for b in batches]).tolist() == list(range(20))
    assert [b.step for b in batches] == [1, 2, 3, 4, 5]


def test_order_follows_from_seed_and_node(form: Format, open_loader: Open, tmp_path: Path) -> None:
    path = form.write(tmp_path / "a", numbered(50))
    first, again = (answers(open_loader(form.entry, path, batch_size=50).run()) for _ in range(2))
    assert first == again
    assert first != answers(open_loader(form.entry, path, seed=1, batch_size=50).run())
    assert first != answers(open_loader(form.entry, path, node="other", batch_size=50).run())
    assert first != [str(i) for i in range(50)]


def test_all_loaders_give_the_same_batches(open_loader: Open, root: Path, tmp_path: Path) -> None:
    assert len(FORMATS) > len(ENTRIES) > 2
    lines = (root / "data" / "digits" / "train.jsonl").read_bytes().split(b"\n")[:300]
    rows = [json.loads(line) for line in lines]
    settings = {"batch_size": 100, "chat": True, "system_prompt": "s"}
    first, *others = (open_loader(f.entry, f.write(tmp_path / str(f), rows), seed=3, **settings) for f in FORMATS)
    for _ in range(5):  # 500 prompts: over the end of the first epoch
        batch = first.run()
        for other in others:
            assert other.run().same(batch)


def test_shards_together_are_one_large_loader(form: Format, open_loader: Open, tmp_path: Path) -> None:
    """Their batches, one after the other, are the batch of one loader; also over the end of an epoch."""
    path = form.write(tmp_path / "a", numbered(17))
    large = open_loader(form.entry, path, batch_size=6)
    shards = [open_loader(form.entry, path, batch_size=2, shards=3, shard=r) for r in range(3)]
    for _ in range(7):
        parts = [s.run() for s in shards]
        assert PromptBatch.concat(parts).same(large.run())
    assert shards[0].state_dict() == shards[2].state_dict()


def test_the_same_order_in_each_way_to_share_it(form: Format, open_loader: Open, tmp_path: Path) -> None:
    """12 prompts a step, by 1, 2, 3, 4, 6 or 12 loaders."""
    path = form.write(tmp_path / "a", numbered(25))
    seen = []
    for shards in (1, 2, 3, 4, 6, 12):
        sizes = {"batch_size": 12 // shards, "shards": shards}
        loaders = [open_loader(form.entry, path, shard=r, **sizes) for r in range(shards)]
        seen.append([a for _ in range(3) for loader in loaders for a in answers(loader.run())])
    assert all(s == seen[0] for s in seen)


# -- resuming ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"shards": 2, "shard": 1}, {"prefetch": 0}, {"prefetch": 5}], ids=str)
def test_a_resumed_loader_goes_on_exactly(
    form: Format, open_loader: Open, tmp_path: Path, settings: dict[str, Any]
) -> None:
    path = form.write(tmp_path / "a", numbered(10))
    loader = open_loader(form.entry, path, batch_size=4, **settings)
    for _ in range(3):
        loader.run()
    state = json.loads(json.dumps(loader.state_dict()))
    other = open_loader(form.entry, path, batch_size=4, **settings)
    other.run()
    other.load_state_dict(state)
    assert other.state_dict() == loader.state_dict() == state
    for _ in range(4):
        assert other.run().same(loader.run())


def test_any_position_is_reached_without_walking_there(form: Format, open_loader: Open, tmp_path: Path) -> None:
    path = form.write(tmp_path / "a", numbered(10))
    loader = open_loader(form.entry, path, batch_size=5)
    loader.load_state_dict(loader.state_dict() | {"calls": 2 * 10**12, "position": 10**13})
    seen = answers(loader.run()) + answers(loader.run())
    assert sorted(map(int, seen)) == list(range(10))


def test_a_state_of_another_file_or_batch_is_refused(form: Format, open_loader: Open, tmp_path: Path) -> None:
    path = form.write(tmp_path / "a", numbered(10))
    state = open_loader(form.entry, path, batch_size=4).state_dict()

    def refused(message: str, path: Path = path, **settings: Any) -> None:
        with pytest.raises(ValueError, match=message):
            open_loader(form.entry, path, **({"batch_size": 4} | settings)).load_state_dict(state)

    refused("batch_size = 4 and has 5 now", batch_size=5)
    refused("shards = 1 and has 2 now", shards=2)
    refused("order = seed", seed=1)
    refused("order = seed .* and has that of the file now", shuffle=False)
    refused("rows = 10 and has 9 now", form.write(tmp_path / "b", numbered(9)))
    refused("content = ", form.write(tmp_path / "c", numbered(10, first=1)))
    copy = tmp_path / "copy"
    copy.write_bytes(path.read_bytes())
    open_loader(form.entry, copy, batch_size=4).load_state_dict(state)  # the same, wherever it lies


# -- several files -------------------------------------------------------------------------------------------


def test_several_files_are_read_as_one(form: Format, open_loader: Open, tmp_path: Path) -> None:
    one = form.write(tmp_path / "one", numbered(9))
    parts = [form.write(tmp_path / f"part-{i}", numbered(n, f)) for i, (n, f) in enumerate([(2, 0), (4, 2), (3, 6)])]
    for path in (parts, tmp_path / "part-*", [parts[0], tmp_path / "part-[12]"]):
        assert answers(whole(open_loader, form.entry, path)) == [str(i) for i in range(9)]
    shuffled = open_loader(form.entry, tmp_path / "part-*", batch_size=5)
    single = open_loader(form.entry, one, batch_size=5)
    for _ in range(6):
        assert shuffled.run().same(single.run())


def test_skip_and_limit_count_through_all_files(form: Format, open_loader: Open, tmp_path: Path) -> None:
    for i in range(4):
        form.write(tmp_path / f"part-{i}", numbered(3, 3 * i))
    expected = [str(i) for i in range(12)]
    for skip, limit in itertools.product((0, 1, 3, 5, 10), (1, 2, 3, 4, 7)):
        batch = whole(open_loader, form.entry, tmp_path / "part-*", skip=skip, limit=limit)
        assert answers(batch) == expected[skip : skip + limit]


def test_files_that_no_row_is_wanted_of_are_not_read(text: Format, open_loader: Open, tmp_path: Path) -> None:
    first = text.write(tmp_path / "a", numbered(3))
    (tmp_path / "b").write_bytes(text.pack(b"not JSON\n"))
    assert answers(whole(open_loader, text.entry, [first, tmp_path / "b"], limit=3)) == ["0", "1", "2"]


def test_joined_files_stay_apart_where_a_line_does_not_end(text: Format, open_loader: Open, tmp_path: Path) -> None:
    """Modalities/modalities issue 395: the last row of one file, glued to the first of the next."""
    rows = [json.dumps(r).encode() for r in numbered(4)]
    (tmp_path / "a").write_bytes(text.pack(rows[0] + b"\n" + rows[1]))
    (tmp_path / "b").write_bytes(text.pack(rows[2] + b"\n" + rows[3] + b"\n"))
    assert answers(whole(open_loader, text.entry, [tmp_path / "a", tmp_path / "b"])) == ["0", "1", "2", "3"]


def test_bad_rows_of_several_files_are_told_together(text: Format, open_loader: Open, tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).write_bytes(text.pack(ROW + b"\n[]\n" * 4))
    lines = opening_error(open_loader, text.entry, tmp_path / "[abc]").split("\n")
    assert lines[0] == f"12 of 15 rows of {tmp_path / 'a'} and 2 more cannot be used; the first 10:"
    assert [Path(line.split(":")[0].strip()).name for line in lines[1:]] == [*"aaaabbbbcc"]


# -- lines ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(ROW + b"\n" + ROW + b"\n", id="plain"),
        pytest.param(ROW + b"\n" + ROW, id="no newline at the end"),
        pytest.param(ROW + b"\r\n" + ROW + b"\r\n", id="carriage returns"),
        pytest.param(ROW + b"\r\n" + ROW + b"\n", id="mixed ends"),
        pytest.param(b"\xef\xbb\xbf" + ROW + b"\n" + ROW, id="byte order mark"),
        pytest.param(b"\xef\xbb\xbf\r\n\n" + ROW + b"\n" + ROW, id="byte order mark on a blank line"),
        pytest.param(b"\n \t\n" + ROW + b"\n\r\n\n" + ROW + b"\n \n\n", id="blank lines"),
        pytest.param(b"  " + ROW + b" \n\t" + ROW + b"\t", id="indented"),
        pytest.param(b" " * 100 + b"\n" + b" " * 100 + ROW + b"\n" + b"\t" * 100 + b"\r\n" + ROW, id="much space"),
    ],
)
def test_the_same_two_rows_however_lines_end(text: Format, open_loader: Open, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(text.pack(content))
    batch = whole(open_loader, text.entry, path)
    assert prompts(batch) == ["p", "p"]
    assert answers(batch) == ["a", "a"]


def test_separators_inside_text_do_not_end_a_row(text: Format, open_loader: Open, tmp_path: Path) -> None:
    odd = "a\u2028b\u2029c\x85d\x0be\x0cf\rg\nh\x00i\U0001f600"
    rows = [{"prompt": odd, "answer": odd}, {"prompt": "next", "answer": "n"}]
    path = tmp_path / "a.jsonl"
    path.write_bytes(text.pack("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows).encode()))
    assert prompts(whole(open_loader, text.entry, path)) == [odd, "next"]


def test_a_very_long_row(form: Format, open_loader: Open, tmp_path: Path) -> None:
    long = "a" * 5_000_000
    path = form.write(tmp_path / "a", [{"prompt": p, "answer": 1} for p in ("x", long, "y")])
    assert prompts(whole(open_loader, form.entry, path)) == ["x", long, "y"]


# -- bad rows ------------------------------------------------------------------------------------------------


def test_all_bad_rows_are_found_at_once_with_their_places(text: Format, open_loader: Open, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    bad = ROW + b'\n\n[1]\n{"prompt": "p"}\r\n' + ROW + b'\n{"prompt": "\xac"}\n{"prompt": "p", "ans'
    path.write_bytes(text.pack(bad))
    lines = opening_error(open_loader, text.entry, path).split("\n")
    assert lines[0] == f"4 of 6 rows of {path} cannot be used:"
    assert lines[1] == f"  {path}:3 (byte 32): an object is needed, not a list"
    assert lines[2].startswith(f"  {path}:4 (byte 36): has no key 'answer'")
    assert lines[3] == f"  {path}:6 (byte 84): is not UTF-8: byte 0xac at byte 13 of the line"
    assert lines[4].startswith(f"  {path}:7 (byte 100): is not JSON")
    assert lines[4].endswith("(the file ends here without a newline: is it cut short?)")


@pytest.mark.parametrize("depth", [700, 5000])
def test_rows_nested_too_deeply_are_bad_rows(text: Format, open_loader: Open, tmp_path: Path, depth: int) -> None:
    """Deeper than Python recurses, and deeper than the parser goes. What the writer can write again is read."""
    path = tmp_path / "a.jsonl"
    objects, lists = (o * depth + b"1" + c * depth for o, c in ((b'{"a":', b"}"), (b"[", b"]")))
    row = b'{"prompt": "p", "answer": %s}\n'
    path.write_bytes(text.pack(ROW + b"\n" + row % objects + row % lists))
    lines = opening_error(open_loader, text.entry, path).split("\n")
    assert lines[0] == f"2 of 3 rows of {path} cannot be used:"
    assert lines[1].startswith(f"  {path}:2 (byte {len(ROW) + 1}): is nested too deeply: at most 128")
    assert lines[2].startswith(f"  {path}:3 (byte {len(ROW) + 1 + len(row % objects)}): is nested too deeply")
    fits, over = (b"[" * d + b"]" * d for d in (127, 128))  # in an object
    path.write_bytes(text.pack(row % fits))
    assert answers(open_loader(text.entry, path, batch_size=1).run()) == [json.loads(fits)]
    path.write_bytes(text.pack(row % over))
    assert "is nested too deeply" in opening_error(open_loader, text.entry, path)


def test_of_many_bad_rows_ten_are_listed(text: Format, open_loader: Open, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(text.pack(b"{}\n" * 1000 + ROW))
    for _ in range(2):  # by looking, and by what was kept
        lines = opening_error(open_loader, text.entry, path).split("\n")
        assert lines[0] == f"1000 of 1001 rows of {path} cannot be used; the first 10:"
        assert len(lines) == 11


def test_all_loaders_refuse_with_the_same_words(open_loader: Open, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for content in (b"\n \n", ROW + b'\nnull\n{"prompt": 1}\n{"a": 1, "a": 2}', b"\xff" * 9, ROW + b'\n\n{"prompt'):
        said = set()
        for f in TEXTS:
            path.write_bytes(f.pack(content))
            said.add(opening_error(open_loader, f.entry, path))
        assert len(said) == 1
    path.write_bytes(b"")
    assert {opening_error(open_loader, e, path) for e in ENTRIES} == {f"{path} is empty"}


def test_rows_without_a_prompt_are_refused_in_every_format(form: Format, open_loader: Open, tmp_path: Path) -> None:
    """NVlabs/Tool-N1 issue 3: every prompt was null, and training started."""
    for prompt, reason in ((None, "key 'prompt' is null"), ("", "is empty"), ([], "a chat without messages")):
        path = form.write(tmp_path / "a", [*numbered(2), {"prompt": prompt, "answer": "1"}][2:])
        if prompt == [] and form.kind not in {f.kind for f in TEXTS}:
            continue  # an empty list has no type in a table of its own
        message = opening_error(open_loader, form.entry, path, batch_size=1)
        assert reason in message
        assert re.search(r"(:1 \(byte 0\)|row 1): ", message)
    path = form.write(tmp_path / "a", [{"question": "q", "answer": "1"}])
    message = opening_error(open_loader, form.entry, path, batch_size=1)
    assert "has no key 'prompt' (loader.fields.prompt); its keys are: 'question', 'answer'" in message


def test_bad_rows_are_left_out_and_listed(form: Format, open_loader: Open, tmp_path: Path) -> None:
    rows = [{"prompt": "" if i % 4 == 1 else f"p{i}", "answer": str(i)} for i in range(10)]
    path = form.write(tmp_path / "a", rows)
    for run in ("first", "again"):
        run_dir = tmp_path / run
        run_dir.mkdir()
        batch = whole(open_loader, form.entry, path, on_bad_row="skip", run_dir=run_dir)
        assert answers(batch) == [str(i) for i in range(10) if i % 4 != 1]
        listed = [json.loads(line) for line in (run_dir / "bad_rows.jsonl").read_text().splitlines()]
        assert [r["line"] if "line" in r else r["row"] for r in listed] == [2, 6, 10]
        assert {(r["file"], r["loader"], r["reason"]) for r in listed} == {
            (str(path), "loader", "the prompt (key 'prompt') is empty")
        }


@pytest.mark.parametrize("validate", ["full", "sample", "off"])
def test_the_order_is_the_same_when_a_bad_row_is_known(
    form: Format, open_loader: Open, tmp_path: Path, validate: str
) -> None:
    """What is left out leaves a hole: the other rows stand where they stood, whoever found it, in every shard."""
    good = numbered(31)
    bad = [r | {"prompt": ""} if i in (3, 4, 17) else r for i, r in enumerate(good)]
    before = open_loader(form.entry, form.write(tmp_path / "good", good), batch_size=31)
    expected = [a for _ in range(3) for a in answers(before.run()) if a not in ("3", "4", "17")]
    path = form.write(tmp_path / "bad", bad)
    settings = {"on_bad_row": "skip", "validate": validate}
    loader = open_loader(form.entry, path, batch_size=6, **settings)
    assert [a for _ in range(14) for a in answers(loader.run())] == expected
    shards = [open_loader(form.entry, path, batch_size=3, shards=2, shard=r, **settings) for r in range(2)]
    assert [a for _ in range(14) for s in shards for a in answers(s.run())] == expected


def test_a_loader_resumes_behind_rows_that_are_left_out(form: Format, open_loader: Open, tmp_path: Path) -> None:
    rows = [r | {"prompt": ""} if i % 3 == 0 else r for i, r in enumerate(numbered(20))]
    path = form.write(tmp_path / "a", rows)
    loader = open_loader(form.entry, path, batch_size=4, on_bad_row="skip")
    for _ in range(4):
        loader.run()
    state = json.loads(json.dumps(loader.state_dict()))
    expected = loader.run()
    for validate in ("full", "off"):
        other = open_loader(form.entry, path, batch_size=4, on_bad_row="skip", validate=validate)
        other.load_state_dict(state)
        assert other.run().same(expected)


def test_a_sample_finds_what_is_common_and_off_finds_nothing(form: Format, open_loader: Open, tmp_path: Path) -> None:
    rows = [{"prompt": "", "answer": str(i)} if i >= 1500 else r for i, r in enumerate(numbered(3000))]
    path = form.write(tmp_path / "a", rows)
    assert "500 of 1000 rows" in opening_error(open_loader, form.entry, path, validate="sample")
    loader = open_loader(form.entry, path, validate="off", shuffle=False, batch_size=750)
    assert len(loader.run()) == len(loader.run()) == 750
    for _ in range(2):  # and again, if it is asked again
        with pytest.raises(DataError, match=r"(:1501 \(byte \d+\)|row 1501): the prompt .* is empty"):
            loader.run()


def test_too_few_rows_that_can_be_used(form: Format, open_loader: Open, tmp_path: Path) -> None:
    rows = [r | {"prompt": ""} if i else r for i, r in enumerate(numbered(5))]
    path = form.write(tmp_path / "a", rows)
    settings = {"on_bad_row": "skip", "batch_size": 2}
    message = opening_error(open_loader, form.entry, path, **settings)
    assert f"of 5 rows of {path} fewer can be used than a batch has, 2" in message
    loader = open_loader(form.entry, path, validate="off", **settings)
    with pytest.raises(DataError, match="fewer can be used than a batch has, 2"):
        loader.run()


def test_a_verdict_is_of_the_settings_and_of_the_content(form: Format, open_loader: Open, tmp_path: Path) -> None:
    path = form.write(tmp_path / "a", [{"prompt": "p", "answer": "1", "other": ""}])
    fields = FieldNames(prompt="other")
    assert "is empty" in opening_error(open_loader, form.entry, path, batch_size=1, fields=fields)
    assert len(open_loader(form.entry, path, batch_size=1).run()) == 1
    assert "is empty" in opening_error(open_loader, form.entry, path, batch_size=1, fields=fields)
    form.write(path, [{"prompt": "", "answer": "1", "other": "p"}])
    assert len(open_loader(form.entry, path, batch_size=1, fields=fields).run()) == 1
    assert "is empty" in opening_error(open_loader, form.entry, path, batch_size=1)


# -- files ---------------------------------------------------------------------------------------------------


def test_files_without_rows(text: Format, open_loader: Open, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(text.pack(b"\n\r\n"))
    assert opening_error(open_loader, text.entry, path) == f"{path} has no rows, only blank lines"


def test_empty_files_beside_others_are_told_of(
    text: Format, open_loader: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """mandiant/flare-floss issue 788."""
    empty, blank = tmp_path / "a", tmp_path / "b"
    empty.touch()
    blank.write_bytes(text.pack(b"\n\n"))
    good = text.write(tmp_path / "c", numbered(2))
    assert answers(whole(open_loader, text.entry, [empty, blank, good])) == ["0", "1"]
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == [
        f"{empty} is empty",
        f"{blank} has no rows, only blank lines",
    ]
    assert opening_error(open_loader, text.entry, [empty]) == f"{empty} is empty"


@pytest.mark.parametrize("any_entry", ENTRIES, ids=lambda e: e.name)
def test_what_is_no_file_is_refused_without_waiting(any_entry: Entry, open_loader: Open, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    assert "is a directory; a file is needed" in opening_error(open_loader, any_entry, tmp_path)
    assert "is not a regular file" in opening_error(open_loader, any_entry, fifo)
    assert f"there is no file {tmp_path / 'none'}" in opening_error(open_loader, any_entry, tmp_path / "none")
    assert f"no file matches '{tmp_path}/n*'" in opening_error(open_loader, any_entry, f"{tmp_path}/n*")


@pytest.mark.parametrize("any_entry", ENTRIES, ids=lambda e: e.name)
def test_a_file_without_permission_is_refused(any_entry: Entry, open_loader: Open, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", 2)
    path.chmod(0)
    is_root = os.geteuid() == 0
    try:
        if is_root:  # who may read everything: look as somebody else
            os.seteuid(65534)
        assert "Permission denied" in opening_error(open_loader, any_entry, path)
    finally:
        if is_root:
            os.seteuid(0)


def test_packed_files_are_read_by_what_they_hold(text: Format, open_loader: Open, tmp_path: Path) -> None:
    """huggingface/datasets issue 6851: gzip content under the name of plain text, and the other way round."""
    for name in ("train.jsonl", "train.jsonl.gz", "train.zst", "train"):
        assert answers(whole(open_loader, text.entry, text.write(tmp_path / name, numbered(3)))) == ["0", "1", "2"]


@pytest.mark.parametrize("form", [f for f in TEXTS if f.kind != TEXT], ids=str)
def test_a_loader_that_cannot_unpack_says_how_to(
    form: Format, open_loader: Open, build_loader: Callable[..., FileLoader], tmp_path: Path
) -> None:
    path = form.write(tmp_path / "train.jsonl.x", numbered(3))
    unable = [e for e in PLAIN if form.kind not in reads(e)]
    assert unable
    for entry in unable:
        message = opening_error(open_loader, entry, path)
        assert f"{path} holds {form.kind} content; unpack it first: " in message
        [problem] = build_loader(entry, path).check(plan_facts("loader"))
        assert problem.where == "loader.path"
        assert str(form.entry) in problem.hint  # a loader that can
        command = message.split("unpack it first: ")[1]
        unpacked = Path(command.split(" > ")[1])
        if subprocess.run(["sh", "-c", f"command -v {command.split()[0]}"], capture_output=True).returncode == 0:
            subprocess.run(["sh", "-c", command], check=True)  # the command does what it says
            assert answers(whole(open_loader, entry, unpacked)) == ["0", "1", "2"]
            unpacked.unlink()


# -- files that change ---------------------------------------------------------------------------------------

CHANGES = {
    "truncated": "os.truncate(path, 10)",
    "emptied": "open(path, 'w').close()",
    "replaced": "os.replace(path + '.other', path)",
    "appended": "open(path, 'ab').write(b'x')",
    "overwritten": "f = open(path, 'r+b'); f.write(b'#' * 64); f.close()",
}

READS_ON = """
import os, sys
from pathlib import Path
from pipeline import registry
from pipeline.context import Context
from stages.loader.rows import DataError
from stages.model.hf import HfModel, HfModelConfig
registry.discover("stages.loader")
name, model, folder = sys.argv[1:4]
[entry] = [e for e in registry.entries("loader") if e.name == name]
for what, change in zip(sys.argv[4::2], sys.argv[5::2]):
    path = f"{folder}/{what}"
    loader = entry.cls(entry.config(path=path, batch_size=50), HfModel(HfModelConfig(path=model)))
    loader.open(Context(node="loader", run_seed=0, run_dir=Path(folder)))
    loader.run()
    exec(change)
    for _ in range(2):
        try:
            loader.run()
            print("nothing was noticed")
        except DataError as e:
            print(e, flush=True)
    loader.close()
"""


def test_a_file_that_changes_while_it_is_read_is_an_error_and_no_signal(
    form: Format, root: Path, tiny_model: Path, tmp_path: Path
) -> None:
    """In a process of its own: pages of a mapping that are gone would end it by SIGBUS."""
    rows = [{"prompt": "x" * 3000 + str(i), "answer": str(i)} for i in range(1000)]
    for what in CHANGES:
        form.write(tmp_path / what, rows)
        form.write(tmp_path / f"{what}.other", numbered(1000))
    changes = itertools.chain(*CHANGES.items())
    command = [sys.executable, "-c", READS_ON, form.entry.name, str(tiny_model), str(tmp_path), *changes]
    run = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    expected = [f"{tmp_path / what} was changed while the run reads it" for what in CHANGES for _ in range(2)]
    assert run.stdout.splitlines() == expected


def test_a_file_that_is_removed_is_read_to_the_end(form: Format, open_loader: Open, tmp_path: Path) -> None:
    """The open file is still what it was."""
    path = form.write(tmp_path / "a", numbered(40))
    loader = open_loader(form.entry, path, batch_size=10, shuffle=False, prefetch=0)
    first = answers(loader.run())
    path.unlink()
    assert first + [a for _ in range(3) for a in answers(loader.run())] == [str(i) for i in range(40)]


def test_a_changed_file_is_read_anew_by_the_next_run(form: Format, open_loader: Open, tmp_path: Path) -> None:
    path = form.write(tmp_path / "a", numbered(5))
    assert answers(whole(open_loader, form.entry, path)) == [*"01234"]
    form.write(path, numbered(5, first=3))  # as long as before
    assert answers(whole(open_loader, form.entry, path)) == [*"34567"]
    form.write(path, numbered(2))
    assert answers(whole(open_loader, form.entry, path)) == [*"01"]


# -- settings ------------------------------------------------------------------------------------------------


def test_a_batch_larger_than_the_file_names_both(form: Format, open_loader: Open, tmp_path: Path) -> None:
    path = form.write(tmp_path / "a", numbered(7))
    message = opening_error(open_loader, form.entry, path, batch_size=8)
    assert "loader.batch_size is 8" in message
    assert "gives 7 rows" in message
    assert "loader.skip 0, limit 5" in opening_error(open_loader, form.entry, path, batch_size=6, limit=5)
    message = opening_error(open_loader, form.entry, path, batch_size=4, shards=2)
    assert "loader.batch_size is 4 with loader.shards 2, but" in message


def test_only_the_first_rows_if_limited(text: Format, open_loader: Open, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(text.pack(write(path, 7).read_bytes() + b"not looked at"))
    loader = open_loader(text.entry, path, batch_size=3, limit=3)
    assert sorted(answers(loader.run())) == sorted(answers(loader.run())) == ["0", "1", "2"]
    assert "1 of 8 rows" in opening_error(open_loader, text.entry, path, batch_size=3)


def test_skipped_rows_are_left_to_others(form: Format, open_loader: Open, tmp_path: Path) -> None:
    """`skip` k and `limit` k cut one file into two sets that share no row."""
    path = form.write(tmp_path / "a", numbered(7))
    rest = open_loader(form.entry, path, batch_size=5, skip=2)
    first = open_loader(form.entry, path, batch_size=2, limit=2)
    assert sorted(answers(rest.run())) == ["2", "3", "4", "5", "6"]
    assert sorted(answers(first.run())) == ["0", "1"]
    assert sorted(answers(open_loader(form.entry, path, batch_size=3, skip=1, limit=3).run())) == ["1", "2", "3"]
    assert "loader.skip is 7" in opening_error(open_loader, form.entry, path, batch_size=1, skip=7)


def test_sampling_and_purpose_travel_with_the_batch(form: Format, open_loader: Open, tmp_path: Path) -> None:
    path = form.write(tmp_path / "a", numbered(2))
    override = SamplingOverride(n=1, temperature=0, top_k=5, top_p=0.9, min_p=0.1, max_new_tokens=3)
    batch = open_loader(form.entry, path, batch_size=2, purpose="eval", sampling=override).run()
    assert batch.sampling == Sampling(n=1, temperature=0, top_k=5, top_p=0.9, min_p=0.1, max_new_tokens=3)
    assert open_loader(form.entry, path, batch_size=2).run().sampling == Sampling()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_speed_is_measured_for_training_only(form: Format, open_loader: Open, tmp_path: Path, prefetch: int) -> None:
    path = form.write(tmp_path / "a", numbered(2))
    train, evaluation = (
        open_loader(form.entry, path, batch_size=2, purpose=p, prefetch=prefetch) for p in ("train", "eval")
    )
    train.run()
    evaluation.run()
    measured = summarise(train.ctx.meter.drain())
    assert set(measured) == {"loader/rows_per_s", "loader/wait_s"}
    assert measured["loader/rows_per_s"] > 0
    assert measured["loader/wait_s"] >= 0
    assert evaluation.ctx.meter.drain() == {}


def test_batches_are_prepared_ahead(form: Format, open_loader: Open, tmp_path: Path) -> None:
    """Up to `prefetch` of them, for training; what was handed out decides the state."""
    path = form.write(tmp_path / "a", numbered(20))
    ahead, none, evaluation = (
        open_loader(form.entry, path, batch_size=2, **s)
        for s in ({"prefetch": 3}, {"prefetch": 0}, {"prefetch": 3, "purpose": "eval"})
    )
    give_up = time.monotonic() + 20
    while ahead._ahead.calls < 3 and time.monotonic() < give_up:
        time.sleep(0.01)
    time.sleep(0.05)
    assert (ahead._ahead.calls, none._ahead.calls, evaluation._ahead.calls) == (3, 0, 0)
    assert ahead.state_dict() == none.state_dict()
    for _ in range(5):
        assert ahead.run().same(none.run())
        assert ahead.state_dict() == none.state_dict()


def test_no_thread_is_left_behind(form: Format, open_loader: Open, tmp_path: Path) -> None:
    before = set(threading.enumerate())
    loader = open_loader(form.entry, form.write(tmp_path / "a", numbered(20)), batch_size=2)
    loader.run()
    loader.load_state_dict(loader.state_dict())
    loader.run()
    loader.close()
    assert [t.name for t in set(threading.enumerate()) - before if "prefetch" in t.name] == []


@pytest.mark.parametrize("any_entry", ENTRIES, ids=lambda e: e.name)
def test_the_plan_finds_what_is_wrong_without_reading(
    any_entry: Entry, build_loader: Callable[..., FileLoader], tmp_path: Path
) -> None:
    good = next(f for f in FORMATS if f.entry is any_entry).write(tmp_path / "a", numbered(2))
    assert list(build_loader(any_entry, good).check(plan_facts("loader"))) == []
    bad = build_loader(any_entry, tmp_path / "none", purpose="test", fields=FieldNames(prompt=""))
    problems = {p.where: f"{p.what} {p.hint}" for p in bad.check(plan_facts("eval_loader"))}
    assert set(problems) == {"eval_loader.path", "eval_loader.purpose", "eval_loader.fields.prompt"}
    assert "there is no file" in problems["eval_loader.path"]
    assert "allowed: eval, train" in problems["eval_loader.purpose"]
    cold = build_loader(any_entry, good, sampling=SamplingOverride(temperature=1e-39))
    found = [p for p in cold.check(plan_facts("loader")) if p.where == "loader.sampling.temperature"]
    assert [(p.what, p.level) for p in found] == [("1e-39 is not allowed", "error")]


@pytest.mark.parametrize(
    ("settings", "where", "told"),
    [
        ({"validate": "fulll"}, "validate", "did you mean 'full'? allowed: full, off, sample"),
        ({"on_bad_row": "ignore"}, "on_bad_row", "allowed: skip, stop"),
        ({"shards": 2, "shard": 2}, "shard", "2 is not allowed"),
        ({"shards": 2, "batch_size": 0}, "batch_size", "shards cannot share"),
        ({"batch_size": 0, "on_bad_row": "skip", "validate": "off"}, "batch_size", "set loader.validate=full"),
        ({"index_dir": "/dev/null"}, "index_dir", "/dev/null is not a folder"),
        ({"index_dir": "/dev/null/below"}, "index_dir", "/dev/null is not a folder"),
    ],
    ids=lambda x: str(x) if isinstance(x, dict) else "",
)
def test_settings_that_are_refused(
    build_loader: Callable[..., FileLoader], tmp_path: Path, settings: dict[str, Any], where: str, told: str
) -> None:
    for f in FORMATS:
        path = f.write(tmp_path / str(f), numbered(2))
        [problem] = build_loader(f.entry, path, **settings).check(plan_facts("loader"))
        assert problem.where == f"loader.{where}"
        assert told in f"{problem.what} {problem.hint}"


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ([], "is an empty list"),
        ([3], "'3' is not the name of a file"),
        (None, "'None' is not the name of a file"),
        ("", "'' is not the name of a file"),
        ({"a": 1}, "is not the name of a file"),
        (["{a}", "{a}"], "twice"),
        (["{a}", "{folder}/*"], "twice"),
        ("{folder}/*.none", "no file matches"),
        (["{a}", "{folder}/none"], "there is no file"),
    ],
    ids=str,
)
def test_paths_that_are_refused(
    any_entry: Entry, build_loader: Callable[..., FileLoader], tmp_path: Path, path: Any, told: str
) -> None:
    a = next(f for f in FORMATS if f.entry is any_entry).write(tmp_path / "a", numbered(2))

    def fill(p: Any) -> Any:
        return p.format(a=a, folder=tmp_path) if isinstance(p, str) else p

    loader = build_loader(any_entry, a)
    loader.cfg.path = [fill(p) for p in path] if isinstance(path, list) else fill(path)
    [problem] = loader.check(plan_facts("loader"))
    assert problem.where == "loader.path"
    assert told in problem.what


@pytest.fixture(params=ENTRIES, ids=lambda e: e.name)
def any_entry(request: pytest.FixtureRequest) -> Entry:
    return request.param


def test_facts(any_entry: Entry, build_loader: Callable[..., FileLoader]) -> None:
    assert build_loader(any_entry, "x", batch_size=5, chat=True).facts() == {
        "prompts_per_step": 5,
        "chat_prompts": True,
    }
    assert build_loader(any_entry, "x", batch_size=0).facts() == {}
    assert build_loader(any_entry, "x", batch_size=0, max_prompt_tokens=7).facts() == {
        "max_prompt_tokens": 7,
        "loader_max_prompt_tokens": 7,
    }


def test_a_relative_path_is_looked_for_here_then_in_the_checkout(
    entry: Entry, open_loader: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("data/digits/heldout.jsonl")
    assert len(open_loader(entry, path, batch_size=0).run()) == 512
    assert len(open_loader(entry, "data/digits/held*.jsonl", batch_size=0).run()) == 512
    path.parent.mkdir(parents=True)
    write(path, 2)
    assert len(open_loader(entry, path, batch_size=0).run()) == 2
    assert len(open_loader(entry, "data/digits/held*.jsonl", batch_size=0).run()) == 2


def test_a_loader_closes_after_a_failed_open(
    any_entry: Entry, build_loader: Callable[..., FileLoader], make_context: Callable[..., Context], tmp_path: Path
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"nonsense\n")
    before = len(os.listdir("/proc/self/fd"))
    loader = build_loader(any_entry, path)
    with pytest.raises(DataError):
        loader.open(make_context("loader"))
    loader.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_closing_gives_every_descriptor_back(form: Format, open_loader: Open, tmp_path: Path) -> None:
    paths = [form.write(tmp_path / name, numbered(8)) for name in "ab"]
    open_loader(form.entry, paths, batch_size=2).close()  # what is imported now may keep descriptors
    before = len(os.listdir("/proc/self/fd"))
    loader = open_loader(form.entry, paths, batch_size=2)
    loader.run()
    loader.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_gsm8k(entry: Entry, open_loader: Open, shared: Path) -> None:
    path = shared / "data" / "gsm8k" / "test.jsonl"
    fields = FieldNames(prompt="question", ground_truth_after="####")
    batch = whole(open_loader, entry, path, chat=True, fields=fields)
    rows = [json.loads(line) for line in path.read_bytes().split(b"\n") if line]
    assert answers(batch) == [r["answer"].split("####")[-1].strip() for r in rows]
    assert batch.prompt.json(0) == [{"role": "user", "content": rows[0]["question"]}]


# -- held-out rows -------------------------------------------------------------------------------------------


@pytest.fixture
def problems(any_entry: Entry, build_loader: Callable[..., FileLoader]) -> Callable[..., list[str]]:
    """Where the plan finds something wrong with `own`, beside `other`."""

    def find(own: dict[str, Any], other: dict[str, Any] | None = None, *, evaluates: bool) -> list[str]:
        loaders = {"own": own} | ({"other": other} if other is not None else {})
        nodes = {name: build_loader(any_entry, **settings) for name, settings in loaders.items()}
        return [p.where for p in nodes["own"].check(plan_facts("own", evaluates=evaluates, nodes=nodes))]

    return find


def test_the_wiring_and_the_settings_of_a_loader_agree(
    form: Format, build_loader: Callable[..., FileLoader], tmp_path: Path
) -> None:
    """Evaluation is of held-out rows, is called so, and only it may override how prompts are sampled."""
    path = form.write(tmp_path / "a", numbered(9))

    def loader(**settings: Any) -> Any:
        return build_loader(form.entry, path, **settings)

    def problems(own: Any, *, evaluates: bool, **others: Any) -> list[str]:
        facts = plan_facts("own", evaluates=evaluates, nodes={"own": own, **others})
        return [p.where for p in own.check(facts)]

    held_out, rest = loader(purpose="eval", limit=3), loader(skip=3)
    assert not problems(held_out, evaluates=True, train=rest)
    assert not problems(rest, evaluates=False, eval_loader=held_out)
    for leaking in (loader(), loader(skip=2), loader(limit=1)):
        assert problems(held_out, evaluates=True, train=leaking) == ["own.path"]
    assert problems(loader(purpose="eval", skip=3), evaluates=True, train=rest) == ["own.path"]
    assert problems(held_out, evaluates=False) == ["own.purpose"]
    assert problems(rest, evaluates=True) == ["own.purpose"]
    override = SamplingOverride(n=3)
    assert problems(loader(sampling=override), evaluates=False) == ["own.sampling"]


def test_held_out_rows_are_told_apart_over_several_files(
    any_entry: Entry, problems: Callable[..., list[str]], tmp_path: Path
) -> None:
    form = next(f for f in FORMATS if f.entry is any_entry)
    a, b, c = (form.write(tmp_path / name, numbered(9)) for name in ("a", "b", "c"))
    (tmp_path / "link").symlink_to(a)
    os.link(a, tmp_path / "hard")
    both, every = [a, b], tmp_path / "[abc]"

    def leaks(train: dict[str, Any], **own: Any) -> bool:
        found = problems(own | {"purpose": "eval"}, train, evaluates=True)
        assert found in ([], ["own.path"])
        return bool(found)

    assert not leaks({"path": both}, path=c)
    assert leaks({"path": both}, path=b)
    assert leaks({"path": every}, path=c)
    assert leaks({"path": a}, path=tmp_path / "link")
    assert leaks({"path": a}, path=tmp_path / "hard")
    assert not leaks({"path": both, "skip": 3}, path=both, limit=3)
    assert leaks({"path": both, "skip": 2}, path=both, limit=3)
    assert not leaks({"path": every, "skip": 3}, path=[a, b, c], limit=3)  # the same files by other words
    assert leaks({"path": [b, a], "skip": 3}, path=[a, b], limit=3)  # other rows are skipped
