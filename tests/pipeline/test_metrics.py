"""Metrics: one number from many samples, exactly, however they were cut and in whatever order they came."""

from __future__ import annotations

import json
import math
import threading
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.metrics import JsonLines, Meter, finite, summarise

floats = st.floats(-1e12, 1e12, allow_subnormal=False)


@given(st.lists(floats, min_size=1, max_size=20), st.randoms(use_true_random=False), st.integers(1, 5))
def test_cut_and_order_do_not_matter(values: list[float], random, cut: int) -> None:  # type: ignore[no-untyped-def]
    whole, parts = Meter(), Meter()
    for how in ("mean", "sum", "max", "spread"):
        whole.add(how, values, how)
        mixed = random.sample(values, len(values))
        for i in range(0, len(mixed), cut):
            child = Meter()  # as another process would
            child.add(how, mixed[i : i + cut], how)
            parts.absorb(child.drain())
    one, other = summarise(whole.drain()), summarise(parts.drain())
    assert one == other
    exact = sum((Fraction(v) for v in values), Fraction())
    assert one["sum"] == float(exact)
    assert one["mean"] == pytest.approx(float(exact / len(values)), rel=1e-15, abs=1e-300)
    assert one["max"] == max(values) == one["spread_max"]


def test_ratio_last_and_spread() -> None:
    meter = Meter()
    meter.add("hits", (1, 2), "ratio")
    meter.add("hits", (0, 6), "ratio")
    meter.add("none", (0, 0), "ratio")
    meter.add("version", 3, "last")
    meter.add("version", 2, "last")
    meter.add("length", np.arange(1, 101), "spread")
    meter.add("empty", [])
    out = summarise(meter.drain())
    assert out.pop("none") != out.get("none")  # NaN
    assert out == {
        "hits": 0.125,
        "version": 2,
        "length_mean": 50.5,
        "length_p50": 50.5,
        "length_p95": pytest.approx(95.05),
        "length_max": 100,
    }
    assert meter.drain() == {}


def test_a_name_has_one_meaning() -> None:
    meter = Meter()
    meter.add("x", 1, "sum")
    with pytest.raises(ValueError, match="metric 'x' was added as sum and as mean"):
        meter.add("x", 1)


def test_holes_are_kept_and_written_as_null(tmp_path: Path) -> None:
    meter = Meter()
    meter.add("a", [1.0, math.nan])
    meter.add("b", [math.inf, -math.inf], "sum")
    meter.add("c", [1e308, 1e308], "sum")
    meter.add("d", [1.0, math.nan], "max")
    lines = JsonLines(tmp_path / "m.jsonl")
    lines.write([summarise(meter.drain()), {"n": np.float32(0.5), "i": np.int64(3), "l": [math.nan, {"x": (1,)}]}])
    lines.close()
    first, second = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert first == {"a": None, "b": None, "c": None, "d": None}
    assert second == {"n": 0.5, "i": 3, "l": [None, {"x": [1]}]}
    assert finite(np.bool_(True)) is True


def test_lines_are_readable_at_once(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "m.jsonl")
    lines.write([{"a": "é"}])
    assert (tmp_path / "m.jsonl").read_text() == '{"a": "é"}\n'
    lines.close()


def test_lines_are_never_added_to_another_file(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_text('{"step": 0}\n')
    with pytest.raises(FileExistsError):
        JsonLines(tmp_path / "m.jsonl")
    assert (tmp_path / "m.jsonl").read_text() == '{"step": 0}\n'


def test_threads_lose_no_sample() -> None:
    meter = Meter()

    def work() -> None:
        for _ in range(500):
            meter.add("n", 1, "sum")

    threads = [threading.Thread(target=work) for _ in range(8)]
    for t in threads:
        t.start()
    total = 0.0
    while any(t.is_alive() for t in threads):
        total += summarise(meter.drain()).get("n", 0)
    for t in threads:
        t.join()
    assert total + summarise(meter.drain()).get("n", 0) == 4000
