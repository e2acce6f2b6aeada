"""Fixtures of the contract tests of loaders; they can be used with any other role, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.context import Context
from pipeline.registry import Entry
from stages.loader.file_loader import FileLoader
from stages.model.hf import HfModel, HfModelConfig


@pytest.fixture
def build_loader(tiny_model: Path) -> Callable[..., FileLoader]:
    """`build_loader(entry, path, **settings)`: a loader that is not open; `path` may be a list."""

    def build(entry: Entry, path: Any, **settings: Any) -> FileLoader:
        given = [str(p) for p in path] if isinstance(path, list) else str(path)
        cls: Any = entry.cls
        return cls(entry.config(path=given, **settings), HfModel(HfModelConfig(path=str(tiny_model))))

    return build


@pytest.fixture
def open_loader(
    make_context: Callable[..., Context], build_loader: Callable[..., FileLoader]
) -> Iterator[Callable[..., FileLoader]]:
    """`open_loader(entry, path, seed=0, node="loader", run_dir=None, **settings)`; closed twice at the end."""
    opened: list[FileLoader] = []

    def open_(
        entry: Entry, path: Any, seed: int = 0, node: str = "loader", run_dir: Path | None = None, **settings: Any
    ) -> FileLoader:
        loader = build_loader(entry, path, **settings)
        opened.append(loader)
        loader.open(make_context(node, run_dir, seed=seed))
        return loader

    yield open_
    for loader in opened:
        loader.close()
        loader.close()
