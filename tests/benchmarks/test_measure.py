"""The tools of the benchmarks: settings, fresh processes, the page cache, the last line."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import measure
from benchmarks.measure import Failure, Report, Spread


@dataclasses.dataclass(slots=True, kw_only=True)
class Wanted:
    rows: int = measure.option(10, "rows")
    scale: float = measure.option(1.0, "a factor")
    names: tuple[str, ...] = measure.option(("a", "b"), "names")
    seeds: tuple[int, ...] = measure.option((1,), "numbers")
    out: str = measure.option("", "a file")


def ask(*words: str) -> Wanted:
    return measure.settings(Wanted, "doc", words)


def test_settings_are_read_as_the_type_of_their_default() -> None:
    asked = ask("rows=7", "scale=0.5", "names=x,y,z", "seeds=3,4", "out=a=b")
    assert asked == Wanted(rows=7, scale=0.5, names=("x", "y", "z"), seeds=(3, 4), out="a=b")
    assert ask() == Wanted()


@pytest.mark.parametrize("word", ["row=7", "rows", "rows=x", "scale=nan", "rows=-1", "seeds=1,x"])
def test_a_wrong_setting_ends_the_program(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        ask(word)
    assert ended.value.code == 2
    assert word in capsys.readouterr().err


# -- functions that run in processes of their own


def whoami(**given: float) -> dict[str, float]:
    return {"pid": os.getpid(), **given}


def fails() -> dict[str, float]:
    raise ValueError("on purpose")


def is_killed() -> dict[str, float]:
    os.kill(os.getpid(), 9)
    return {}


def stays(folder: str) -> Iterator[dict[str, float]]:
    yield {"pid": os.getpid()}
    while True:
        Path(folder, "beat").write_text(str(time.monotonic()))
        time.sleep(0.01)


def test_a_contender_has_a_process_of_its_own() -> None:
    first, second = measure.alone(whoami, x=1.5), measure.alone(whoami, x=1.5)
    assert first["x"] == 1.5
    assert len({first["pid"], second["pid"], os.getpid()}) == 3


@pytest.mark.parametrize(("function", "why"), [(fails, "ValueError: on purpose"), (is_killed, "exit code -9")])
def test_one_that_fails_is_a_failure_in_words(function, why: str) -> None:
    with pytest.raises(Failure, match=why):
        measure.alone(function)


def test_one_beside_lives_as_long_as_the_block(tmp_path: Path) -> None:
    with measure.beside(stays, folder=str(tmp_path)) as found:
        deadline = time.monotonic() + 20
        while not (tmp_path / "beat").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (tmp_path / "beat").exists()
    with pytest.raises(ProcessLookupError):
        os.kill(found["pid"], 0)


def test_evicted_pages_are_not_in_the_page_cache(tmp_path: Path) -> None:
    if measure.filesystem(tmp_path) in ("tmpfs", "ramfs", "overlay", "unknown"):
        pytest.skip("a file system whose pages may not leave memory")
    file = tmp_path / "data"
    file.write_bytes(os.urandom(1 << 22))
    assert measure.read_through(file) == 1.0
    assert any(measure.evict(file) < 0.1 for _ in range(10)), "the kernel takes it as advice, and may be late"
    assert measure.read_through(file) == 1.0


def test_memory_is_what_was_allocated() -> None:
    before = measure.rss_anon_mb()
    block = bytearray(os.urandom(50_000_000))
    assert 49 <= measure.rss_anon_mb() - before <= 60
    del block


def test_a_report_goes_on_after_a_failure_and_says_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = Report("example", Wanted(), tmp_path)
    values = iter([3.0, 1.0, 2.0])
    found = report.in_turn({"good": lambda: {"us": next(values)}, "bad": lambda: measure.alone(fails)}, 3)
    assert found["good"]["us"] == Spread(2.0, 1.0, 3.0, 3)
    assert found["bad"] == {}
    report.keep(found["good"], hit_us="us")
    report.bar("hits", report.get("hit_us"), most=1)
    report.bar("never measured", report.get("nothing"), least=1)
    out = tmp_path / "out.json"
    assert report.finish(("hit_us", "nothing"), str(out)) == 1
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last == json.loads(out.read_text())
    assert (last["hit_us"], last["hit_us_low"], last["hit_us_high"], last["nothing"]) == (2.0, 1.0, 3.0, None)
    assert "on purpose" in last["failed"]
    assert "hits" in last["bars_missed"]
    assert "never measured" in last["bars_missed"]
    assert all(not isinstance(value, dict | list) for value in last.values())
