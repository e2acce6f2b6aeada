"""A verl user's folder, named by the environment as scripts expect it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.importers.verl_files import MODEL, write_data


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With data and a reward file; DATA_DIR and MODEL_PATH name it and the tiny model."""
    data = write_data(tmp_path / "data")
    monkeypatch.setenv("DATA_DIR", str(data))
    monkeypatch.setenv("MODEL_PATH", str(MODEL))
    return data


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def write(text: str, name: str = "start.sh") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write
