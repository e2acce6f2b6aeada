"""Text files of any size, read where a mapped index says the rows lie."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipeline.registry import backend
from stages.loader import LoaderConfig
from stages.loader.file_loader import FileLoader
from stages.loader.rows import RowParser
from stages.loader.source import Source
from stages.loader.text import TextFile
from stages.model import Model


@dataclass(slots=True, kw_only=True)
class MmapLoaderConfig(LoaderConfig):
    """Nothing of its own."""


@backend("loader", "mmap")
class MmapLoader(FileLoader):
    """Opens in milliseconds and holds nothing in memory: rows are read and parsed when they are asked for, and the
    pages of file and index belong to the operating system, which shares them between processes.

    The index is built once for a file, at memory speed, and kept beside it.
    """

    def __init__(self, cfg: MmapLoaderConfig, model: Model):
        super().__init__(cfg, model)

    def open_source(self, path: Path, parser: RowParser, first: int) -> Source:
        return TextFile.with_index(path, parser, self.cfg.index_dir)
