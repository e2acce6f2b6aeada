"""The whole file in memory, parsed when it is opened."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipeline.registry import backend
from stages.loader import LoaderConfig
from stages.loader.jsonl import JsonlLoader
from stages.loader.lines import index
from stages.loader.rows import Row, RowParser, read_rows


@dataclass(slots=True, kw_only=True)
class StandardLoaderConfig(LoaderConfig):
    """Nothing of its own."""


@backend("loader", "standard")
class StandardLoader(JsonlLoader):
    """Fastest row access; needs memory for all rows."""

    def __init__(self, cfg: StandardLoaderConfig):
        super().__init__(cfg)
        self._parsed: list[Row] = []

    def read(self, path: Path, parse: RowParser, limit: int) -> int:
        data = path.read_bytes()
        lines = index(np.frombuffer(data, np.uint8)).first(limit)
        self._parsed = list(read_rows(path, data, lines, parse))
        return len(self._parsed)

    def row(self, index: int) -> Row:
        return self._parsed[index]

    def close(self) -> None:
        self._parsed = []
