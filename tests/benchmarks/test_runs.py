"""Each benchmark at its smallest: it ends well, and its last line is one flat JSON object with the promised keys."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import data_path, loader, token_cache

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


SMALL = "loader.batch_size=4 rollout.n=2 trainer.mini_batch=0 eval_loader.limit=4"


def run(root: Path, folder: Path, benchmark: str, *words: str) -> dict[str, Any]:
    out = folder / "out.json"
    command = [sys.executable, "-m", f"benchmarks.{benchmark}", *words, f"out={out}"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert last == json.loads(out.read_text())
    assert last["benchmark"] == benchmark
    assert not any(isinstance(value, dict | list) for value in last.values())
    assert last["failed"] == ""
    return last


def test_loader(root: Path, tmp_path: Path) -> None:
    last = run(root, tmp_path, "loader", "rows=6400", "only=index,mmap,lists", "seconds=0.05")
    assert last.keys() >= set(loader.KEYS)
    assert (last["rows_12k"], last["rows_1200k"]) == (64, 6400)
    measured = {"index_gb_per_s", "warm_open_ms_12k", "warm_open_ms_1200k", "random_rows_per_s_mmap"}
    measured |= {"first_batch_ms_warm_mmap", "first_batch_ms_cold_mmap", "first_batch_ms_warm_json_list_1200k"}
    assert all(last[key] > 0 for key in measured)
    assert last["random_rows_per_s_hf_datasets"] is None


def test_token_cache(root: Path, tmp_path: Path) -> None:
    only = "only=memory,shared,disk,diskcache,stress"
    last = run(root, tmp_path, "token_cache", "scale=0.001", "samples=640", only)
    assert last.keys() >= set(token_cache.KEYS)
    measured = {"hit_us_memory_2k", "hit_us_memory_2m", "put_us_memory_2m", "hit_us_shared_p50", "hit_us_shared_p99"}
    assert all(last[key] > 0 for key in measured | {"hit_us_disk_p50", "diskcache_us"})
    assert last["stress_operations"] >= 4 * 4096
    assert (last["wrong_values"], last["torn_values"]) == (0, 0)
    assert last["lmdb_us"] is None


def test_data_path(root: Path, tmp_path: Path) -> None:
    last = run(root, tmp_path, "data_path", "jobs=digits", "steps=2", "repeats=1", f"extra={SMALL}")
    assert last.keys() >= set(data_path.KEYS)
    for way in data_path.WAYS:
        assert last[f"first_step_s_digits_{way}"] > 0
        assert 0 < last[f"data_wait_ms_digits_{way}"] < last[f"step_ms_digits_{way}"]
        assert last[f"data_wait_sd_ms_digits_{way}"] >= 0


def test_planning(root: Path, tmp_path: Path) -> None:
    last = run(root, tmp_path, "planning", "repeats=1")
    assert last["plan_s"] > last["hydra_s"] > 0
    assert last["plan_cpu_s"] > 0
