"""What a run leaves is whole or not there, and what cannot be written is told in words that help."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import run
from pipeline.disk import Appended, DiskError, existing, unfit, write_whole
from pipeline.metrics import JsonLines
from tests.pipeline.conftest import PLUGINS, TOY

ROOT = Path(__file__).resolve().parents[2]


def test_lines_are_there_when_write_returns(tmp_path: Path) -> None:
    file = JsonLines(tmp_path / "m.jsonl")
    file.write([{"a": 1}, {"b": float("nan")}])
    assert (tmp_path / "m.jsonl").read_text() == '{"a": 1}\n{"b": null}\n'
    file.close()
    file.close()
    with pytest.raises(ValueError, match="is closed"):
        file.write([{"a": 1}])
    with pytest.raises(FileExistsError):
        JsonLines(tmp_path / "m.jsonl")


LIMITED = """
    import os, resource, sys
    from pathlib import Path
    from pipeline.disk import DiskError, write_whole
    from pipeline.metrics import JsonLines
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
    folder = Path(sys.argv[1])
    lines = JsonLines(folder / "m.jsonl")
    try:
        for step in range(1000):
            lines.write([{"step": step, "text": "x" * 500}])
    except DiskError as e:
        print(step, e)
    lines.write([{"step": "short"}])
    (folder / "whole").write_text("old")
    try:
        write_whole(folder / "whole", "y" * 20_000)
    except DiskError as e:
        print(e)
"""


def test_a_file_that_may_not_grow_holds_whole_lines(tmp_path: Path) -> None:
    """Of the line that did not fit, nothing is left; one that fits goes on from there; a whole file stays as it was."""
    command = [sys.executable, "-c", textwrap.dedent(LIMITED), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    first, second = done.stdout.splitlines()
    written = (tmp_path / "m.jsonl").read_text().splitlines()
    step = int(first.split()[0])
    assert step == 10_000 // len(written[0] + "\n")
    assert len(written) == step + 1
    assert written[-1] == '{"step": "short"}'
    assert f"'{tmp_path}/m.jsonl' cannot be written: the file would be larger than is allowed (ulimit -f); " in first
    assert f"GB are free in '{tmp_path}/m.jsonl'; make room there, or choose another place with hydra.run.dir" in first
    assert f"'{tmp_path}/whole' cannot be written" in second
    assert (tmp_path / "whole").read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.jsonl", "whole"]


def test_a_file_that_was_moved_or_removed_is_missed(tmp_path: Path) -> None:
    for name, lose in (("removed", lambda f: f.unlink()), ("moved", lambda f: f.parent.rename(tmp_path / "elsewhere"))):
        (tmp_path / name).mkdir()
        file = Appended(tmp_path / name / "m.jsonl")
        file.add(b"one\n")
        lose(tmp_path / name / "m.jsonl")
        with pytest.raises(DiskError, match=r"m\.jsonl' cannot be written: its directory is gone: was it moved"):
            file.add(b"two\n")
        file.close()
    assert (tmp_path / "elsewhere" / "m.jsonl").read_text() == "one\n"


def test_a_whole_file_is_new_or_takes_the_place_of_another(tmp_path: Path) -> None:
    write_whole(tmp_path / "a", "one", new=True)
    with pytest.raises(FileExistsError):
        write_whole(tmp_path / "a", "two", new=True)
    assert (tmp_path / "a").read_text() == "one"
    write_whole(tmp_path / "a", "ü")
    assert (tmp_path / "a").read_text("utf-8") == "ü"
    with pytest.raises(DiskError, match="its directory is gone"):
        write_whole(tmp_path / "b" / "c", "x")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_where_a_path_would_be(tmp_path: Path) -> None:
    assert existing(tmp_path / "a" / "b") == tmp_path
    assert unfit(tmp_path / "a" / "b") == ""
    (tmp_path / "f").touch()
    assert unfit(tmp_path / "f") == f"'{tmp_path}/f' is no directory"
    assert unfit(tmp_path / "f" / "b") == f"'{tmp_path}/f/b' cannot be made: '{tmp_path}/f' is a file"


@pytest.mark.parametrize("place", ["{0}/file/run", "/proc/self/run"])
def test_a_place_that_cannot_be_written_is_found_before_anything_starts(
    tmp_path: Path, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    place = place.format(tmp_path)
    assert run.main([*TOY, PLUGINS, f"hydra.run.dir={place}"]) == 2
    told = capsys.readouterr().err
    assert f"hydra.run.dir: '{place}' cannot be " in told
    assert "make it writable and make room, or choose another place" in told
    assert "Nothing was started and nothing was written." in told
    assert os.listdir(tmp_path) == ["file"]
