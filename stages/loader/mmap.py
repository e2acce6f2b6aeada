"""The file mapped into memory; a row is parsed when it is asked for."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from pipeline.registry import backend
from stages.loader import LoaderConfig
from stages.loader.jsonl import JsonlLoader
from stages.loader.lines import Lines, index
from stages.loader.rows import DataError, Row, RowParser, read_rows


@dataclass(slots=True, kw_only=True)
class MmapLoaderConfig(LoaderConfig):
    """Nothing of its own."""


@backend("loader", "mmap")
class MmapLoader(JsonlLoader):
    """Holds 24 bytes a row; the file's pages belong to the operating system, which shares them between processes.

    Every row is parsed once when the file is opened, and not kept: a bad one must not wait for its turn.
    """

    def __init__(self, cfg: MmapLoaderConfig):
        super().__init__(cfg)
        self._file: BinaryIO | None = None
        self._map: mmap.mmap | None = None

    def read(self, path: Path, parse: RowParser, limit: int) -> int:
        self._path, self._parse = path, parse
        self._file = path.open("rb")
        self._stamp = self._state_of_file()
        self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        self._lines: Lines = index(np.frombuffer(self._map, np.uint8)).first(limit)
        for _ in read_rows(path, self._map, self._lines, parse):
            pass
        return len(self._lines)

    def row(self, index: int) -> Row:
        assert self._map is not None, "open() comes first"
        if self._state_of_file() != self._stamp:  # positions are of the old content, and a page may be gone (SIGBUS)
            raise DataError(f"{self._path} was changed while the run reads it")
        return self._parse(self._map[self._lines.start[index] : self._lines.stop[index]])

    def _state_of_file(self) -> tuple[int, int]:
        assert self._file is not None
        now = os.fstat(self._file.fileno())
        return now.st_size, now.st_mtime_ns

    def close(self) -> None:
        if self._map is not None:
            self._map.close()
        if self._file is not None:
            self._file.close()
        self._map = self._file = None
