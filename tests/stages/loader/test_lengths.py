"""The length filter: which rows it leaves out, when it counts, and what it keeps."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline import progress
from pipeline.metrics import summarise
from pipeline.progress import Board
from stages.loader import lengths
from stages.loader.file_loader import FileLoader
from stages.loader.length_file import BLOCK, LengthFile
from stages.loader.lengths import Counter, count_missing
from stages.loader.rows import DataError
from stages.model.hf import HfModel, HfModelConfig
from tests.loader_files import FORMATS, PLAIN, Format, answers, numbered
from tests.tiny_tokenizers import ids_of, write_tokenizer

Opened = Callable[..., FileLoader]


@pytest.fixture(params=FORMATS, ids=str)
def form(request: pytest.FixtureRequest) -> Format:
    return request.param


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The folder of a tokenizer: a byte is a token, and a chat's message has one more for its role."""
    return write_tokenizer(tmp_path / "model", adds_bos=False)


@pytest.fixture
def opened(model: Path, make_context: Callable[..., Any]) -> Iterator[Opened]:
    """`opened(form, path, **settings)`: an open loader."""
    loaders: list[FileLoader] = []

    def open_(form: Format, path: Any, *, folder: Path = model, **settings: Any) -> FileLoader:
        cls: Any = form.entry.cls
        given = [str(p) for p in path] if isinstance(path, list) else str(path)
        config = form.entry.config(path=given, **{"batch_size": 4} | settings)
        loaders.append(cls(config, HfModel(HfModelConfig(path=str(folder)))))
        loaders[-1].open(make_context("loader"))
        return loaders[-1]

    yield open_
    for loader in loaders:
        loader.close()


@pytest.fixture
def no_tokenizer(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on, loading a tokenizer in this process is a failure."""

    def refuse(self: HfModel) -> Any:
        raise AssertionError("a tokenizer is loaded")

    return lambda: monkeypatch.setattr(HfModel, "tokenizer", refuse)


def words(lengths: list[int]) -> list[dict[str, Any]]:
    return [{"prompt": "x" * n, "answer": str(i)} for i, n in enumerate(lengths)]


LENGTHS = [3, 50, 7, 8, 9, 1, 80, 8, 2, 10]
KEPT = [str(i) for i, n in enumerate(LENGTHS) if n <= 8]


def test_longer_prompts_are_left_out(form: Format, opened: Opened, tmp_path: Path) -> None:
    path = form.write(tmp_path / "a", words(LENGTHS))
    batch = opened(form, path, batch_size=0, shuffle=False, max_prompt_tokens=8).run()
    assert answers(batch) == KEPT
    batch = opened(form, path, batch_size=0, shuffle=False, max_prompt_tokens=80).run()
    assert len(batch) == len(LENGTHS)


def test_the_others_come_in_the_order_they_have_without_it(form: Format, opened: Opened, tmp_path: Path) -> None:
    path = form.write(tmp_path / "a", words(LENGTHS))
    plain, filtered = (opened(form, path, batch_size=2, **s) for s in ({}, {"max_prompt_tokens": 8}))
    expected = [a for _ in range(10) for a in answers(plain.run()) if a in KEPT]
    assert [a for _ in range(6) for a in answers(filtered.run())] == expected[:12]


def test_resuming_goes_on_exactly(form: Format, opened: Opened, tmp_path: Path) -> None:
    path = form.write(tmp_path / "a", words(LENGTHS))
    loader, other = (opened(form, path, batch_size=4, max_prompt_tokens=8) for _ in range(2))
    for _ in range(3):
        loader.run()
    other.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    for _ in range(3):
        assert other.run().same(loader.run())


@pytest.mark.parametrize(
    ("settings", "more"),
    [
        ({}, 0),
        ({"chat": True}, 2),  # <user>, <assistant>
        ({"system_prompt": "s" * 50}, 53),  # and <system>
    ],
    ids=["text", "chat", "system prompt"],
)
def test_what_counts_is_the_prompt_as_it_is_rendered(
    form: Format, opened: Opened, tmp_path: Path, settings: dict[str, Any], more: int
) -> None:
    """With system prompt, template and special tokens (verl-project/verl 2069)."""
    path = form.write(tmp_path / "a", words([10, 11]))
    for limit, expected in ((10 + more, ["0"]), (11 + more, ["0", "1"])):
        loader = opened(form, path, batch_size=0, shuffle=False, max_prompt_tokens=limit, **settings)
        assert answers(loader.run()) == expected
        loader.close()


def test_bytes_are_not_characters(form: Format, opened: Opened, tmp_path: Path) -> None:
    texts = ["é", "ab", "abc", "\U0001f600"]
    assert [len(ids_of(t)) for t in texts] == [2, 2, 3, 4]
    path = form.write(tmp_path / "a", [{"prompt": t, "answer": str(i)} for i, t in enumerate(texts)])
    assert answers(opened(form, path, batch_size=0, shuffle=False, max_prompt_tokens=2).run()) == ["0", "1"]


def test_how_many_are_left_out_is_measured_and_logged(
    form: Format, opened: Opened, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = form.write(tmp_path / "a", words(LENGTHS))
    with caplog.at_level(logging.INFO, "headrace"):
        loader = opened(form, path, batch_size=3, max_prompt_tokens=8)
    assert "loader.max_prompt_tokens is 8: 4 of 10 prompts are longer and left out" in caplog.text
    seen = []
    for _ in range(4):  # 12 rows that fit: two epochs, up to the last one that fits
        loader.run()
        seen.append(summarise(loader.ctx.meter.drain())["loader/too_long"])
    rest = opened(form, path, batch_size=10, prefetch=0)
    [first, second] = [answers(rest.run()) for _ in range(2)]
    after_last = len(second) - 1 - max(i for i, a in enumerate(second) if a in KEPT)
    assert sum(seen) == 8 - after_last
    assert set(first) == set(second)
    opened(form, path, batch_size=3).run()
    assert "loader/too_long" not in loader.ctx.meter.drain()


def test_nothing_is_measured_where_nothing_is_filtered(form: Format, opened: Opened, tmp_path: Path) -> None:
    loader = opened(form, form.write(tmp_path / "a", words(LENGTHS)))
    loader.run()
    assert "loader/too_long" not in loader.ctx.meter.drain()


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("batch_size", [0, 4])
def test_if_all_are_longer_the_error_names_the_limit_and_the_shortest(
    form: Format, opened: Opened, tmp_path: Path, prefetch: int, batch_size: int
) -> None:
    path = form.write(tmp_path / "a", words([1, *LENGTHS[1:5], 6]))
    told = "loader.max_prompt_tokens is 5, and every prompt has more tokens; the shortest has 6"
    for _ in range(2):
        with pytest.raises(DataError, match=told):  # the first row is skipped, and does not count
            opened(form, path, max_prompt_tokens=5, skip=1, batch_size=batch_size, prefetch=prefetch)


def test_fewer_than_a_batch_fit(form: Format, opened: Opened, tmp_path: Path) -> None:
    loader = opened(form, form.write(tmp_path / "a", words(LENGTHS)), batch_size=7, max_prompt_tokens=8)
    with pytest.raises(DataError, match=r"fewer can be used than a batch has, 7.*max_prompt_tokens is 8"):
        loader.run()


def test_the_next_start_loads_no_tokenizer(
    form: Format, opened: Opened, tmp_path: Path, no_tokenizer: Callable[[], None]
) -> None:
    path = form.write(tmp_path / "a", words(LENGTHS))
    first = opened(form, path, max_prompt_tokens=8)
    no_tokenizer()
    for limit in (8, 9):  # counts do not depend on the limit
        again = opened(form, path, max_prompt_tokens=limit)
        for _ in range(5):
            again.run()
    assert first.run().same(opened(form, path, max_prompt_tokens=8).run())


def test_counts_are_made_anew_where_something_else_decides_them(
    form: Format, opened: Opened, tmp_path: Path, model: Path
) -> None:
    """Content of the file, system prompt, tokenizer: each has counts of its own."""
    path = form.write(tmp_path / "a", words([5, 6, 7, 8]))

    def kept(limit: int, **settings: Any) -> list[str]:
        return answers(opened(form, path, batch_size=0, shuffle=False, max_prompt_tokens=limit, **settings).run())

    assert kept(6) == ["0", "1"]
    assert kept(11, system_prompt="abc") == ["0"]
    assert kept(12, system_prompt="abcd") == ["0"]
    other = write_tokenizer(tmp_path / "other", adds_bos=True)
    assert kept(7, folder=other) == ["0", "1"]
    assert kept(6) == ["0", "1"]
    form.write(path, words([8, 7, 6, 5]))
    assert kept(6) == ["2", "3"]


def test_bad_rows_are_left_out_as_such(form: Format, opened: Opened, tmp_path: Path) -> None:
    rows = words(LENGTHS)
    rows[2]["prompt"] = " "
    loader = opened(
        form,
        form.write(tmp_path / "a", rows),
        batch_size=0,
        shuffle=False,
        max_prompt_tokens=8,
        on_bad_row="skip",
    )
    assert answers(loader.run()) == [a for a in KEPT if a != "2"]


def test_several_files(form: Format, opened: Opened, tmp_path: Path) -> None:
    paths = [form.write(tmp_path / name, words(n)) for name, n in (("a", LENGTHS), ("b", [9, 8, 30]))]
    loader = opened(form, paths, batch_size=0, shuffle=False, max_prompt_tokens=8)
    assert answers(loader.run()) == [*KEPT, "1"]
    loader = opened(form, paths, batch_size=0, shuffle=False, max_prompt_tokens=8, skip=4, limit=8)
    assert answers(loader.run()) == [*(a for a in KEPT if int(a) >= 4), "1"]


def test_a_prompt_that_the_template_refuses_is_named(form: Format, opened: Opened, tmp_path: Path, model: Path) -> None:
    template = "{{ raise_exception('no such role') if messages[0].role == 'tool' }}{{ messages[0].content }}"
    (model / "chat_template.jinja").write_text(template)
    rows = [{"prompt": [{"role": r, "content": "c"}], "answer": "a"} for r in ("user", "user", "tool", "user")]
    path = form.write(tmp_path / "a", rows)
    with pytest.raises(DataError, match=rf"{path}[:,].*3.*refuses a prompt with roles tool: no such role"):
        opened(form, path, prefetch=0, max_prompt_tokens=8).run()


# -- in the background ---------------------------------------------------------------------------------------

MANY = 3 * BLOCK
PERIOD = [5, 40, 12, 30, 20]
"""Lengths that repeat: of five rows, three fit into 20."""


@pytest.fixture(scope="session")
def large(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return "".join(json.dumps(r) + "\n" for r in words([PERIOD[i % 5] for i in range(MANY)])).encode()


@pytest.fixture
def large_file(tmp_path: Path, large: bytes) -> Path:
    path = tmp_path / "large.jsonl"
    path.write_bytes(large)
    return path


MAPPED = next(Format(e, "text") for e in PLAIN if e.name == "mmap")


def wait_until(done: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 100
    while not done():
        assert time.monotonic() < give_up
        time.sleep(0.05)


def fits_expected(rows: np.ndarray) -> np.ndarray:
    return np.array([PERIOD[r % 5] <= 20 for r in rows.tolist()])


def test_training_runs_while_others_count(
    opened: Opened,
    large_file: Path,
    no_tokenizer: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked: list[int] = []
    count = lengths.PromptCounter.count
    monkeypatch.setattr(lengths.PromptCounter, "count", lambda self, rows: asked.append(len(rows)) or count(self, rows))
    loader = opened(MAPPED, large_file, batch_size=32, max_prompt_tokens=20, prefetch=0)
    first = loader.run()
    assert all(PERIOD[int(a) % 5] <= 20 for a in answers(first))
    assert 0 < sum(asked) < 1000  # in this process: what the batch needed, and no more
    filter_ = loader._lengths
    assert filter_ is not None
    [file] = filter_._files
    [worker] = file._workers
    wait_until(lambda: os.getpriority(os.PRIO_PROCESS, worker.pid) == 19)
    wait_until(file.complete)
    no_tokenizer()
    with caplog.at_level(logging.INFO, "headrace"):
        wait_until(lambda: bool(loader.run()) and not file._workers)
    assert f"{MANY * 2 // 5} of {MANY} prompts are longer" in caplog.text
    rows = np.arange(MANY)
    assert np.array_equal(filter_.fits(rows), fits_expected(rows))

    started = time.perf_counter()
    again = opened(MAPPED, large_file, batch_size=32, max_prompt_tokens=20)
    assert time.perf_counter() - started < 1
    assert again.run().same(first)


def test_a_worker_that_fails_does_not_stop_the_run(
    opened: Opened, large_file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loader = opened(MAPPED, large_file, batch_size=32, max_prompt_tokens=20, prefetch=0)
    assert loader._lengths is not None
    [file] = loader._lengths._files
    [worker] = file._workers
    worker.kill()
    with caplog.at_level(logging.WARNING, "headrace"):
        for _ in range(3):
            assert all(PERIOD[int(a) % 5] <= 20 for a in answers(loader.run()))
    assert caplog.text.count("are made only as they are needed from now on") == 1


def test_only_rows_that_can_be_asked_for_are_counted(opened: Opened, large_file: Path) -> None:
    loader = opened(MAPPED, large_file, batch_size=32, max_prompt_tokens=20, skip=BLOCK + 5, limit=500)
    assert loader._lengths is not None
    [file] = loader._lengths._files
    assert file.complete()
    assert not file._workers
    assert file._file.unknown(range(MANY)) == [0, 2]


def test_closing_ends_the_workers(opened: Opened, large_file: Path) -> None:
    loader = opened(MAPPED, large_file, max_prompt_tokens=20)
    assert loader._lengths is not None
    [worker] = loader._lengths._files[0]._workers
    loader.close()
    assert not worker.alive()


def test_counts_that_can_be_kept_nowhere_are_kept_in_memory(
    opened: Opened, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(lengths.LengthFile, "beside", refuse)
    path = MAPPED.write(tmp_path / "a", words(LENGTHS))
    with caplog.at_level(logging.WARNING, "headrace"):
        batch = opened(MAPPED, path, batch_size=0, shuffle=False, max_prompt_tokens=8).run()
    assert answers(batch) == KEPT
    assert [r.message for r in caplog.records if "can be kept nowhere" in r.message]


def test_a_given_folder_is_used(opened: Opened, tmp_path: Path) -> None:
    path = MAPPED.write(tmp_path / "a", words(LENGTHS))
    opened(MAPPED, path, max_prompt_tokens=8, index_dir=str(tmp_path / "index"))
    assert [f.name for f in tmp_path.glob("a.*")] == []
    assert len(list((tmp_path / "index").glob("*.hrlen-*"))) == 1


def test_no_glob_takes_counts_for_data(opened: Opened, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    MAPPED.write(tmp_path / "data" / "a", numbered(9))
    (tmp_path / "data" / "a.hrfeatures").write_text("{}")
    for _ in range(2):
        loader = opened(MAPPED, tmp_path / "data" / "*", batch_size=0, max_prompt_tokens=8)
        assert len(loader.run()) == 9


class Ones(Counter):
    def count(self, rows: Sequence[int]) -> np.ndarray:
        return np.ones(len(rows), np.int32)

    def why(self, row: int) -> str:
        return ""


def test_counting_is_progress() -> None:
    """Where all is counted at the start, it may take longer than run.stall_s."""
    board, file = Board(["loader"]), LengthFile.in_memory(bytes(16), bytes(16), 3 * BLOCK)
    with progress.shown(board), progress.working("loader", "open", 0):
        count_missing(Ones(), file, range(3 * BLOCK))
        assert board.lines()[0].beats == (3, 0)
    board.close()
    file.close()
