"""All rows in memory, parsed when the loader opens; of plain, gzip and zstd files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from pipeline.registry import backend
from stages.loader import LoaderConfig
from stages.loader.file_loader import FileLoader
from stages.loader.files import GZIP, TEXT, ZSTD, kind_of
from stages.loader.index import line_numbers, reader, row_starts
from stages.loader.rows import BadRow, DataError, Row, RowParser
from stages.loader.source import Place, Source
from stages.loader.stamp import Stamp
from stages.loader.text import CUT, parsed
from stages.model import Model


@dataclass(slots=True, kw_only=True)
class StandardLoaderConfig(LoaderConfig):
    """Nothing of its own."""


@backend("loader", "standard")
class StandardLoader(FileLoader):
    """Fastest row access; needs memory for all rows, and time to parse them at every start."""

    reads = frozenset({TEXT, GZIP, ZSTD})

    def __init__(self, cfg: StandardLoaderConfig, model: Model):
        super().__init__(cfg, model)

    def open_source(self, path: Path, parser: RowParser, first: int) -> Source:
        return ParsedFile(path, parser, first)


class ParsedFile(Source):
    """Lines and bytes are counted in the text, for a compressed file in what it unpacks to."""

    def __init__(self, path: Path, parser: RowParser, first: int):
        self.path = path
        self.stamp, data = _text(path)
        starts = np.concatenate(list(row_starts(reader(data))))
        every = len(starts) - 1
        count = min(every, first or every)
        self._starts = starts[:count]
        self._numbers = line_numbers(reader(data), self._starts)
        self._cut = count - 1 if count == every and not data.endswith(b"\n") else -1
        self._rows = [parsed(parser, data[a:b]) for a, b in pairwise(starts[: count + 1].tolist())]

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self, positions: Sequence[int]) -> list[Row | BadRow]:
        return [self._rows[p] for p in positions]

    def places(self, positions: Sequence[int]) -> list[Place]:
        def place(p: int) -> Place:
            return Place(self.path, int(self._numbers[p]), int(self._starts[p]), CUT if p == self._cut else "")

        return [place(p) for p in positions]

    def close(self) -> None:
        self._rows, self._starts, self._numbers = [], np.empty(0, np.int64), np.empty(0, np.int64)


def _text(path: Path) -> tuple[Stamp, bytes]:
    """All of a file, unpacked. DataError if it changes meanwhile, or its compressed content is damaged."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        stamp = Stamp.of(fd, path)
        with os.fdopen(os.dup(fd), "rb") as file:
            data = file.read()
        stamp.check(path)
    finally:
        os.close(fd)
    kind = kind_of(data[:8])
    return stamp, data if kind == TEXT else _unpacked(path, data, kind)


def _unpacked(path: Path, data: bytes, kind: str) -> bytes:
    """All members of a gzip file, all frames of a zstd file."""
    import pyarrow as pa

    try:
        with pa.CompressedInputStream(pa.BufferReader(data), kind) as stream:
            return stream.read()
    except OSError as e:
        raise DataError(f"{path} holds {kind} content that is damaged or cut short: {e}") from None
