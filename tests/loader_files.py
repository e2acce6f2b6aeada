"""Files for tests of loaders, in every format that one reads."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline import registry
from pipeline.registry import Entry
from stages.loader.files import GZIP, PARQUET, TEXT, ZSTD
from stages.records import PromptBatch

registry.discover("stages.loader")
ENTRIES = registry.entries("loader")


@dataclass(frozen=True)
class Format:
    """A loader, and a kind of file that it reads."""

    entry: Entry
    kind: str

    def __str__(self) -> str:
        return f"{self.entry.name}-{self.kind}"

    def write(self, path: Path, rows: Sequence[dict[str, Any]]) -> Path:
        """Rows as a file of this kind; its name says nothing."""
        if self.kind == PARQUET:
            pq.write_table(pa.Table.from_pylist(list(rows)), path, row_group_size=7)
        else:
            path.write_bytes(self.pack("".join(json.dumps(r) + "\n" for r in rows).encode()))
        return path

    def pack(self, text: bytes) -> bytes:
        """Text as the content of a file of this kind."""
        return {TEXT: bytes, GZIP: gzip.compress, ZSTD: zstd}[self.kind](text)


def zstd(data: bytes) -> bytes:
    return pa.Codec("zstd").compress(data, asbytes=True)


def reads(entry: Entry) -> frozenset[str]:
    """Kinds of content that a loader reads."""
    cls: Any = entry.cls
    return cls.reads


FORMATS = [Format(e, kind) for e in ENTRIES for kind in sorted(reads(e))]
"""Every loader with every kind of file it reads."""

TEXTS = [f for f in FORMATS if f.kind != PARQUET]
"""Lines of JSON, packed or not."""

PLAIN = [f.entry for f in FORMATS if f.kind == TEXT]
"""Loaders that read plain text."""

ROW = b'{"prompt": "p", "answer": "a"}'


def numbered(rows: int, first: int = 0) -> list[dict[str, Any]]:
    return [{"prompt": f"p{i}", "answer": str(i)} for i in range(first, first + rows)]


def write(path: Path, rows: int) -> Path:
    """Plain text."""
    path.write_text("".join(json.dumps(r) + "\n" for r in numbered(rows)))
    return path


def answers(batch: PromptBatch) -> list[Any]:
    return [batch.ground_truth.json(i) for i in range(len(batch))]


def prompts(batch: PromptBatch) -> list[Any]:
    return [batch.prompt.json(i) for i in range(len(batch))]
