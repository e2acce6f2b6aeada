"""Files that are not what they seem: changed under the reader's hands, named twice, indexed wrongly."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline import registry
from pipeline.registry import Entry
from stages.loader.file_loader import FileLoader
from stages.loader.files import TEXT
from stages.loader.rows import DataError
from tests.loader_files import answers, reads, write

registry.discover("stages.loader")
OF_TEXT = [e for e in registry.entries("loader") if TEXT in reads(e)]
Open = Callable[..., FileLoader]


@pytest.fixture(params=OF_TEXT, ids=lambda e: e.name)
def entry(request: pytest.FixtureRequest) -> Entry:
    return request.param


def test_a_file_that_grows_while_it_is_opened_is_refused_by_name(
    entry: Entry, open_loader: Open, tmp_path: Path
) -> None:
    """And no index of half a file is kept: complete, it is read whole."""
    path = write(tmp_path / "a.jsonl", 1000)
    stop = threading.Event()

    def grow() -> None:
        with path.open("ab", buffering=0) as file:
            while not stop.is_set():
                file.write(b'{"prompt": "p", "answer": "a"}\n')
                time.sleep(0.001)

    writer = threading.Thread(target=grow)
    writer.start()
    try:
        for _ in range(5):
            with pytest.raises(DataError, match=r"a\.jsonl (is being written to|was changed)"):
                open_loader(entry, path, batch_size=8).run()
    finally:
        stop.set()
        writer.join()
    rows = path.read_bytes().count(b"\n")
    assert len(open_loader(entry, path, batch_size=0).run()) == rows


@pytest.mark.parametrize("second", ["a.jsonl", "folder/../a.jsonl", "link.jsonl"])
def test_a_file_that_is_named_twice_is_refused(entry: Entry, open_loader: Open, tmp_path: Path, second: str) -> None:
    path = write(tmp_path / "a.jsonl", 10)
    (tmp_path / "folder").mkdir()
    (tmp_path / "link.jsonl").symlink_to(path)
    with pytest.raises(DataError, match="twice"):
        open_loader(entry, [path, tmp_path / second], batch_size=2)


def test_bad_rows_that_are_skipped_stop_nothing(entry: Entry, open_loader: Open, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("[]\n" * 5 + "".join(f'{{"prompt": "p", "answer": "{i}"}}\n' for i in range(6)))
    batch = open_loader(entry, path, batch_size=6, skip=5, shuffle=False).run()
    assert answers(batch) == [str(i) for i in range(6)]
    with pytest.raises(DataError, match="1 of 11 rows"):
        open_loader(entry, path, batch_size=6, skip=4)


def test_a_limit_below_all_prompts_says_so_beside_bad_rows(entry: Entry, open_loader: Open, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", 10)
    path.write_text("[]\n" + path.read_text())
    with pytest.raises(DataError, match="max_prompt_tokens is 1, and every prompt has more tokens"):
        open_loader(entry, path, batch_size=2, on_bad_row="skip", max_prompt_tokens=1)


@pytest.mark.parametrize("validate", ["full", "off"])
def test_a_damaged_offset_is_blamed_on_the_index(open_loader: Open, tmp_path: Path, validate: str) -> None:
    """Two rows taken for one are no bad row of the data."""
    path = write(tmp_path / "a.jsonl", 50)
    kept = tmp_path / "a.jsonl.hridx"
    for entry in OF_TEXT:
        settings: dict[str, Any] = {"batch_size": 50, "shuffle": False, "validate": validate, "prefetch": 0}
        open_loader(entry, path, **settings).run()
        if not kept.exists():
            continue  # a loader without an index
        data = bytearray(kept.read_bytes())
        data[4096 + 8 * 20 : 4096 + 8 * 21] = data[4096 + 8 * 19 : 4096 + 8 * 20]  # row 20 begins where row 19 does
        kept.write_bytes(data)
        with pytest.raises(DataError, match=r"the index of .* does not fit it; remove .*hridx"):
            open_loader(entry, path, **settings | {"on_bad_row": "skip"}).run()
        return
    pytest.fail("no loader keeps an index")


def test_a_fifo_in_place_of_the_index_holds_nobody_up(open_loader: Open, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", 10)
    os.mkfifo(tmp_path / "a.jsonl.hridx")
    for entry in OF_TEXT:
        assert len(open_loader(entry, path, batch_size=10).run()) == 10
