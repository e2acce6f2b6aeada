"""Columns of a Parquet file; row groups are decoded when they are needed."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.registry import backend
from pipeline.stage import setting
from stages.loader import LoaderConfig, sidecar
from stages.loader.file_loader import FileLoader
from stages.loader.files import PARQUET
from stages.loader.row_groups import RowGroups
from stages.loader.rows import BadRow, DataError, Row, RowParser
from stages.loader.source import Place, Source
from stages.loader.stamp import Stamp
from stages.model import Model


@dataclass(slots=True, kw_only=True)
class ParquetLoaderConfig(LoaderConfig):
    """Nothing has to be set for files in verl's layout but `fields.ground_truth=reward_model.ground_truth`."""

    cache_bytes: int = setting(
        1 << 26,
        min=0,
        doc="bytes of decoded rows, for each file, in memory; the rest goes to a file in the temp folder",
    )


@backend("loader", "parquet")
class ParquetLoader(FileLoader):
    """Reads the columns that `fields` names, and no other. A row group is decoded when a row of it is first needed;
    one that cannot be decoded is an error, and never skipped.

    Values become what JSON has for them, so that a row is the same, to the byte, as from JSONL of the same data: dates
    and times ISO 8601 text, decimals their digits, binary columns UTF-8 text, maps objects. A key that only other rows
    have is null here: a file of columns cannot leave it out.
    """

    reads = frozenset({PARQUET})

    def __init__(self, cfg: ParquetLoaderConfig, model: Model):
        super().__init__(cfg, model)
        self._cache_bytes = cfg.cache_bytes

    def open_source(self, path: Path, parser: RowParser, first: int) -> Source:
        return ParquetSource(path, parser, self.cfg.index_dir, self._cache_bytes)


class ParquetSource(Source):
    """Rows of a Parquet file. Only columns that the settings name are read."""

    def __init__(self, path: Path, parser: RowParser, index_dir: str, cache_bytes: int, expected: Stamp | None = None):
        self.path, self._parser, self._index_dir, self._cache_bytes = path, parser, index_dir, cache_bytes
        fields = parser.fields
        keys = (fields.prompt, fields.ground_truth, fields.data_source, fields.extra)
        self._groups = RowGroups(path, [k for k in keys if k], cache_bytes)
        self.stamp = self._groups.stamp
        if expected not in (None, self.stamp):
            self.close()
            raise DataError(f"{path} was changed while the run reads it")
        self.sidecar = sidecar.load(path, self.stamp, index_dir) or sidecar.build(
            path, self.stamp, index_dir, self._nothing_to_index
        )

    def _nothing_to_index(self) -> Generator[np.ndarray, None, sidecar.Counts]:
        """A Parquet file has positions of its own; the sidecar is for verdicts."""
        yield from ()
        return sidecar.Counts(len(self), len(self))

    def __len__(self) -> int:
        return len(self._groups)

    def rows(self, positions: Sequence[int]) -> list[Row | BadRow]:
        return [self._columns(row) for row in self._groups.take(positions)]

    def _columns(self, row: dict[str, Any] | BadRow) -> Row | BadRow:
        if isinstance(row, BadRow):
            return row
        try:
            return self._parser.columns(row)
        except BadRow as e:
            return e

    def places(self, positions: Sequence[int]) -> list[Place]:
        return [Place(self.path, p + 1) for p in positions]

    def recipe(self) -> Callable[[], Source]:
        return partial(ParquetSource, self.path, self._parser, self._index_dir, self._cache_bytes, self.stamp)

    def close(self) -> None:
        self._groups.close()
