"""docs/data.md shows what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import tables


def test_the_document_shows_the_results_that_are_there(root: Path) -> None:
    document = (root / "docs/data.md").read_text()
    assert tables.filled(document, "cpu") == document


def test_tables_are_made_from_results(tmp_path: Path) -> None:
    names = ("cpu", "cpus", "memory_gb", "filesystem", "kernel", "python", "commit", "date")
    results = dict.fromkeys(names, "x") | {"version_numpy": "2.3.5"}
    results |= {
        "first_step_s_digits_mmap": 12.34,
        "first_step_s_digits_mmap_low": 11.0,
        "first_step_s_digits_mmap_high": 14,
    }
    (tmp_path / "data_path-cpu.json").write_text(json.dumps(results))
    before = "# One\n<!-- data_path -->\nold\n<!-- /data_path -->\nafter\n"
    made = tables.filled(before, "cpu", tmp_path)
    assert "| default run, `mmap` + `shared` | 12.3 (11.0-14.0) | - |" in made
    assert "numpy 2.3.5" in made
    assert "old" not in made
    assert made.endswith("\nafter\n")
    assert tables.filled(made, "cpu", tmp_path) == made
    with pytest.raises(ValueError, match="no marks for 'data_path'"):
        tables.filled("# Two\n", "cpu", tmp_path)
