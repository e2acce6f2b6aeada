"""What only the indexed file has: nothing in memory, offsets of any size, an index that others share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.context import Context
from stages.loader import LoaderConfig, sidecar
from stages.loader.mmap import MmapLoader, MmapLoaderConfig
from stages.loader.rows import BadRow, DataError, Row, RowParser
from stages.loader.text import TextFile
from stages.model.hf import HfModel, HfModelConfig

Open = Callable[..., MmapLoader]


def write(path: Path, rows: int, pad: int = 0) -> Path:
    with path.open("w") as file:
        for i in range(rows):
            file.write(f'{{"prompt": "p{i}{"x" * pad}", "answer": "{i}"}}\n')
    return path


@pytest.fixture
def open_mmap(make_context: Callable[..., Context]) -> Iterator[Open]:
    opened: list[MmapLoader] = []

    def open_(path: Path, **settings: Any) -> MmapLoader:
        loader = MmapLoader(MmapLoaderConfig(path=str(path), **settings), HfModel(HfModelConfig(path="none")))
        opened.append(loader)
        loader.open(make_context("loader"))
        return loader

    yield open_
    for loader in opened:
        loader.close()


def parser() -> RowParser:
    return RowParser(LoaderConfig(path="x"), "loader")


def answers(rows: list[Row | BadRow]) -> list[str]:
    assert all(isinstance(r, Row) for r in rows)
    return [json.loads(r.ground_truth) for r in rows if isinstance(r, Row)]


MEASURE = """
import sys
from pathlib import Path
from pipeline.context import Context
from stages.loader.mmap import MmapLoader, MmapLoaderConfig
from stages.model.hf import HfModel, HfModelConfig

def anonymous():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")) * 1024

def loader(path):
    found = MmapLoader(MmapLoaderConfig(path=path, batch_size=64, prefetch=0), HfModel(HfModelConfig(path="none")))
    found.open(Context(node="loader", run_seed=0, run_dir=Path(path).parent))
    for _ in range(30):
        found.run()
    return found

small = loader(sys.argv[1])  # everything is imported, buffers are there
before = anonymous()
large = loader(sys.argv[2])
print(anonymous() - before)
"""


def test_memory_does_not_grow_with_the_file(root: Path, tmp_path: Path) -> None:
    """Neither when the index is built and every row is looked at, nor when it is found."""
    small, large = write(tmp_path / "small", 1000), write(tmp_path / "large", 110_000, pad=260)
    assert large.stat().st_size > 30_000_000
    for _ in range(2):
        command = [sys.executable, "-c", MEASURE, str(small), str(large)]
        run = subprocess.run(command, cwd=root, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        assert int(run.stdout) < 3_000_000


@pytest.mark.slow
def test_a_row_after_four_gibibytes(open_mmap: Open, tmp_path: Path) -> None:
    """A sparse file: offsets beyond 2^31 and 2^32, and a line that is too long to be a row."""
    path, far = write(tmp_path / "a", 3), (1 << 32) + 12345
    with path.open("r+b") as file:
        file.truncate(far)
        file.seek(0, os.SEEK_END)
        file.write(b'\n{"prompt": "far", "answer": "4"}\n\n{"prompt": "farther", "answer": "5"}')
    loader = open_mmap(path, batch_size=0, shuffle=False, on_bad_row="skip", prefetch=0)
    batch = loader.run()
    assert [batch.ground_truth.json(i) for i in range(5)] == ["0", "1", "2", "4", "5"]
    [bad] = [json.loads(line) for line in (tmp_path / "bad_rows.jsonl").read_text().splitlines()]
    assert (bad["line"], bad["reason"]) == (4, "is longer than 1024 MiB")


def test_memory_for_one_long_row(root: Path, tmp_path: Path) -> None:
    """huggingface/datasets issue 3227: a row of 64 MiB. It is in memory twice, and not three times."""
    path, row = tmp_path / "a", '{"prompt": "%s", "answer": "1"}\n'
    rows = [row % "x", row % ("a" * (64 << 20)), row % "y"]
    path.write_text("".join(rows))
    script = MEASURE.replace("batch_size=64", "batch_size=3, shuffle=False").replace("range(30)", "range(1)")
    script += "import resource; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)"
    peaks = []
    for large in (write(tmp_path / "small", 3), path):
        command = [sys.executable, "-c", script, str(tmp_path / "small"), str(large)]
        run = subprocess.run(command, cwd=root, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        peaks.append(int(run.stdout.split()[-1]))
    assert peaks[1] - peaks[0] < 2.6 * path.stat().st_size


# -- the index -----------------------------------------------------------------------------------------------


def test_the_index_is_made_once(open_mmap: Open, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", 100)
    index = tmp_path / "a.jsonl.hridx"
    open_mmap(path).close()
    made = index.stat().st_mtime_ns
    open_mmap(path).close()
    assert index.stat().st_mtime_ns == made
    write(path, 101)
    open_mmap(path).close()
    assert index.stat().st_mtime_ns != made


def test_a_finished_line_is_seen(tmp_path: Path) -> None:
    """QwenLM/qwen-code issue 6316: a half-written last record was judged, and the finished one never read."""
    path = write(tmp_path / "a", 2)
    with path.open("a") as file:
        file.write('{"prompt": "p2", "ans')
    half = TextFile.with_index(path, parser(), "")
    [bad] = half.rows([2])
    assert isinstance(bad, BadRow)
    assert "is it cut short?" in half.place(2).note
    half.close()
    with path.open("a") as file:
        file.write('wer": "2"}\n')
    done = TextFile.with_index(path, parser(), "")
    assert answers(done.rows([0, 1, 2])) == ["0", "1", "2"]
    assert done.place(2).note == ""
    done.close()


def test_rows_come_in_the_order_asked_for(tmp_path: Path) -> None:
    source = TextFile.with_index(write(tmp_path / "a", 3000, pad=900), parser(), "")
    for asked in ([5], [7, 3, 3, 2999, 0], [*range(100, 3000)], [*range(2999, -1, -1)], [1, 2, 3, 9, 10, 4, 5]):
        assert answers(source.rows(asked)) == [str(i) for i in asked]
    source.close()


@pytest.mark.parametrize("line_end", ["\r\n", "\n", "mixed"])
def test_offsets_of_lines_that_end_in_two_bytes(tmp_path: Path, line_end: str) -> None:
    """cq27-dev/rag-rat issue 241: each such line shifted the offsets of all that follow by one."""
    rows = [{"prompt": f"row {i}", "answer": str(i)} for i in range(5000)]
    ends = ["\r\n" if line_end == "\r\n" or (line_end == "mixed" and i % 3) else "\n" for i in range(5000)]
    path = tmp_path / "a"
    path.write_bytes("".join(json.dumps(r) + e for r, e in zip(rows, ends, strict=True)).encode())
    source = TextFile.with_index(path, parser(), "")
    assert source.rows([4999]) == [Row(b'"row 4999"', b'"4999"', b"", b"{}")]
    assert answers(source.rows([*range(5000)])) == [r["answer"] for r in rows]
    source.close()


def test_an_index_that_does_not_fit_is_an_error_and_never_other_bytes(tmp_path: Path) -> None:
    """Each offset, moved by one or more: a row is as it was, or bad, or the index is refused."""
    path = write(tmp_path / "a", 20)
    file = tmp_path / "a.hridx"
    with_index = TextFile.with_index(path, parser(), "")
    right = with_index.rows([*range(20)])
    with_index.close()
    whole = file.read_bytes()
    for row in range(1, 20):
        for move in (-40, -1, 1, 40):
            at = 4096 + 8 * row
            moved = int.from_bytes(whole[at : at + 8], "little") + move
            file.write_bytes(whole[:at] + moved.to_bytes(8, "little", signed=True) + whole[at + 8 :])
            source = TextFile.with_index(path, parser(), "")
            for asked in ([row], [row - 1], [row - 1, row], [*range(20)]):
                got, told = rows_or_error(source, asked)
                assert told in ("", f"the index of {path} does not fit it; remove {file}")
                assert all(isinstance(g, BadRow) or g == right[i] for i, g in zip(asked, got, strict=not told))
            source.close()


def rows_or_error(source: TextFile, asked: list[int]) -> tuple[list[Row | BadRow], str]:
    try:
        return source.rows(asked), ""
    except DataError as e:
        return [], str(e)


def test_a_file_in_a_folder_that_cannot_be_written_to(
    open_mmap: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    path = write(tmp_path / "a", 10)
    (tmp_path / "a.hridx").mkdir()  # so that no file can take this name
    loader = open_mmap(path, batch_size=10)
    assert len(loader.run()) == 10
    assert caplog.text.count("is not kept") == 1


OPEN = """
import sys, time
from pathlib import Path
from pipeline.context import Context
from stages.loader.mmap import MmapLoader, MmapLoaderConfig
from stages.model.hf import HfModel, HfModelConfig
import logging
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
path, start = sys.argv[1], float(sys.argv[2])
loader = MmapLoader(MmapLoaderConfig(path=path, batch_size=100), HfModel(HfModelConfig(path="none")))
time.sleep(max(0, start - time.time()))
loader.open(Context(node="loader", run_seed=0, run_dir=Path(path).parent))
batch = loader.run()
print("answers", [batch.ground_truth.json(i) for i in range(100)])
"""


def test_several_processes_that_start_at_once_build_it_once(root: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "a", 80_000, pad=400)
    start = time.time() + 3
    command = [sys.executable, "-c", OPEN, str(path), str(start)]
    runs = [subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = [run.communicate()[0] for run in runs]
    assert [run.returncode for run in runs] == [0] * 3
    assert len({s.splitlines()[-1] for s in said}) == 1
    assert sum("looking at all 80000 rows" in s for s in said) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "a.hridx"]


def test_a_process_killed_while_it_builds_leaves_nothing_wrong(root: Path, open_mmap: Open, tmp_path: Path) -> None:
    path = write(tmp_path / "a", 60_000, pad=800)
    for delay in (0.0, 0.05, 0.3):
        run = subprocess.Popen([sys.executable, "-c", OPEN, str(path), "0"], cwd=root, stdout=subprocess.DEVNULL)
        give_up = time.monotonic() + 30
        while not list(tmp_path.glob(".a.hridx*")) and run.poll() is None and time.monotonic() < give_up:
            time.sleep(0.002)
        time.sleep(delay)
        run.kill()
        run.wait()
        loader = open_mmap(path, batch_size=10, shuffle=False, validate="off")
        batch = loader.run()
        assert [batch.ground_truth.json(i) for i in range(10)] == [str(i) for i in range(10)]
        loader.close()
        (tmp_path / "a.hridx").unlink()


def test_opening_takes_no_longer_for_more_rows(tmp_path: Path) -> None:
    """As a number of bytes read: a page of the index, and sampled blocks of the data."""
    paths = [write(tmp_path / name, rows, pad=100) for name, rows in (("small", 4000), ("large", 120_000))]
    read = []
    for path in paths:
        TextFile.with_index(path, parser(), "").close()
        before = _bytes_read()
        TextFile.with_index(path, parser(), "").close()
        read.append(_bytes_read() - before)
    assert max(read) < 400_000


def _bytes_read() -> int:
    """By this process, in calls that read."""
    return next(int(line.split()[1]) for line in Path("/proc/self/io").read_text().splitlines() if "rchar" in line)


def test_what_is_validated_once_is_not_looked_at_again(open_mmap: Open, tmp_path: Path) -> None:
    path = write(tmp_path / "a", 20_000, pad=200)
    open_mmap(path, prefetch=0).close()
    before = _bytes_read()
    open_mmap(path, prefetch=0).close()
    assert _bytes_read() - before < 400_000 < path.stat().st_size


def test_offsets_are_mapped_and_not_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a", 20_000)
    source = TextFile.with_index(path, parser(), "")
    assert source.sidecar is not None
    assert not source.sidecar.offsets.flags.owndata
    assert str(source.sidecar.file) in Path("/proc/self/maps").read_text()
    assert np.array_equal(source.sidecar.offsets[:2], [0, 32])
    source.close()
    found = sidecar.load(path, source.stamp, "")
    assert found is not None
    assert found.counts == (20_000, 20_000)
