"""What a user is told of a path that is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from stages.paths import ROOT, instead_of, resolve


def test_a_relative_path_is_looked_for_here_and_in_the_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").touch()
    assert resolve("prompts.jsonl") == tmp_path / "prompts.jsonl"
    assert resolve("data/base") == ROOT / "data/base"
    told = instead_of(resolve("promts.jsonl"))
    assert told.startswith(f"did you mean 'prompts.jsonl'? {ROOT} and {tmp_path} hold: ")


def test_a_folder_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert instead_of(resolve("dat")).startswith(f"did you mean 'data'? {ROOT} holds: ")


def test_the_last_folder_that_exists_is_shown(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / ".hidden").touch()
    assert instead_of(tmp_path / "a" / "b" / "c.jsonl") == f"{tmp_path / 'a'} holds: nothing"
