"""What only the mapped file has: pages that are the file's own."""

from __future__ import annotations

import gc
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.context import Context
from stages.loader.mmap import MmapLoader, MmapLoaderConfig
from stages.loader.rows import DataError


def write(path: Path, rows: int, pad: int = 0) -> Path:
    path.write_text("".join(f'{{"prompt": "p{i}{"x" * pad}", "answer": "{i}"}}\n' for i in range(rows)))
    return path


def test_a_change_of_the_file_is_noticed(tmp_path: Path, make_context: Callable[..., Context]) -> None:
    path = write(tmp_path / "a.jsonl", 100)
    loader = MmapLoader(MmapLoaderConfig(path=str(path), batch_size=2))
    loader.open(make_context("loader"))
    loader.run()
    os.truncate(path, 10)  # pages behind it are gone: reading them would kill the process
    with pytest.raises(DataError, match="was changed while the run reads it"):
        loader.run()
    loader.close()


def test_a_file_that_is_replaced_is_read_to_the_end(tmp_path: Path, make_context: Callable[..., Context]) -> None:
    path = write(tmp_path / "a.jsonl", 4)
    loader = MmapLoader(MmapLoaderConfig(path=str(path), batch_size=4, shuffle=False))
    loader.open(make_context("loader"))
    os.replace(write(tmp_path / "b.jsonl", 1), path)  # the mapping holds the old file
    assert [loader.run().ground_truth.json(i) for i in range(4)] == ["0", "1", "2", "3"]
    loader.close()


def test_memory_does_not_grow_with_the_text(tmp_path: Path, make_context: Callable[..., Context]) -> None:
    path = write(tmp_path / "a.jsonl", 200, pad=100_000)
    loader = MmapLoader(MmapLoaderConfig(path=str(path), batch_size=1))
    tracemalloc.start()
    try:
        loader.open(make_context("loader"))
        loader.run()
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert path.stat().st_size > 20_000_000
    assert held < 1_000_000
    assert peak < 0.9 * path.stat().st_size  # the newline search takes a chunk of 16 MiB
    loader.close()


def test_closing_gives_the_descriptor_back(tmp_path: Path, make_context: Callable[..., Context]) -> None:
    path, before = write(tmp_path / "a.jsonl", 3), len(os.listdir("/proc/self/fd"))
    loader = MmapLoader(MmapLoaderConfig(path=str(path), batch_size=2))
    loader.open(make_context("loader"))
    loader.run()
    loader.close()
    loader.close()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
