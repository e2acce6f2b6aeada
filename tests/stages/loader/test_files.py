"""Which files a path names, and the files that are refused."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from stages.loader.files import GZIP, PARQUET, TEXT, ZSTD, allow_open, find, refusal


@pytest.mark.parametrize(
    ("head", "name"),
    [
        (b"\x1f\x8b\x08", "gzip"),
        (b"\x28\xb5\x2f\xfd", "zstd"),
        (b"\x52\x2a\x4d\x18", "zstd"),
        (b"BZh9", "bzip2"),
        (b"PAR1", "Parquet"),
        (b"\xff\xfe{\x00", "UTF-16"),
    ],
)
def test_other_formats_are_named(tmp_path: Path, head: bytes, name: str) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(head + bytes(20))
    assert f"holds {name} content" in refusal(path)
    assert refusal(path, {name}) == ""


def test_a_plain_file_is_not_refused(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    path.write_bytes(b"{}")
    assert refusal(path) == refusal(path, {TEXT, GZIP}) == ""
    assert refusal(path, {PARQUET}) == f"{path} holds text content; Parquet is needed"


@pytest.mark.parametrize(
    ("name", "head", "command"),
    [
        ("a.jsonl.gz", b"\x1f\x8b\x08", "gzip -dc {0}/a.jsonl.gz > {0}/a.jsonl"),
        ("a.jsonl", b"\x28\xb5\x2f\xfd", "zstd -dc {0}/a.jsonl > {0}/a-plain.jsonl"),
        ("a b.xz", b"\xfd7zXZ\x00", "xz -dc '{0}/a b.xz' > '{0}/a b'"),
    ],
)
def test_how_to_unpack(tmp_path: Path, name: str, head: bytes, command: str) -> None:
    path = tmp_path / name
    path.write_bytes(head + bytes(20))
    assert refusal(path).endswith(f"unpack it first: {command.format(tmp_path)}")


def test_what_is_no_file_is_refused_without_waiting(tmp_path: Path) -> None:
    fifo, empty = tmp_path / "fifo", tmp_path / "empty.jsonl"
    os.mkfifo(fifo)
    empty.touch()
    assert refusal(tmp_path) == f"{tmp_path} is a directory; a file is needed, or a glob such as {tmp_path}/*.jsonl"
    assert "is not a regular file" in refusal(fifo)
    assert "is not a regular file" in refusal(Path("/dev/null"))
    assert refusal(empty) == f"{empty} is empty"
    assert refusal(tmp_path / "none.jsonl") == f"there is no file {tmp_path / 'none.jsonl'}"
    assert "cannot be read: Not a directory" in refusal(empty / "below")


def names(path: object) -> list[str]:
    found = find(path)
    assert found.problems == []
    return [f.name for f in found.files]


def test_hidden_files_never_match(tmp_path: Path) -> None:
    """alexa/massive issue 8: side files of an archive were decoded as data."""
    for name in ("train.jsonl", "._train.jsonl", ".train.jsonl.swp", "train.jsonl.tmp", ".b.jsonl", "b.jsonl.hridx"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "c.jsonl").write_text("{}")
    assert names(f"{tmp_path}/*.jsonl") == ["train.jsonl"]
    assert [f.name for f in find(f"{tmp_path}/*.jsonl").hidden] == ["._train.jsonl", ".b.jsonl"]
    assert names(f"{tmp_path}/**") == names(f"{tmp_path}/*") == ["train.jsonl", "train.jsonl.tmp"]
    assert "b.jsonl.hridx" in [f.name for f in find(f"{tmp_path}/*").hidden]
    [problem] = find(f"{tmp_path}/.*.jsonl").problems
    assert problem == f"no file matches '{tmp_path}/.*.jsonl' but ._train.jsonl, .b.jsonl, which patterns leave out"
    assert names(f"{tmp_path}/.hidden/*.jsonl") == ["c.jsonl"]  # the folder is named on purpose


def test_files_come_sorted_and_lists_as_they_are(tmp_path: Path) -> None:
    for name in ("b2", "b10", "a", "c"):
        (tmp_path / name).touch()
    assert names(f"{tmp_path}/*") == ["a", "b10", "b2", "c"]
    assert names([f"{tmp_path}/c", f"{tmp_path}/b*", f"{tmp_path}/a"]) == ["c", "b10", "b2", "a"]


def test_a_name_with_signs_of_a_pattern_is_a_name_if_there_is_such_a_file(tmp_path: Path) -> None:
    (tmp_path / "a[1].jsonl").touch()
    (tmp_path / "a1.jsonl").touch()
    assert names(f"{tmp_path}/a[1].jsonl") == ["a[1].jsonl"]
    assert names(f"{tmp_path}/a[1]*") == ["a1.jsonl"]


def test_zstd_by_any_first_frame(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"\x5f\x2a\x4d\x18" + bytes(9))
    assert refusal(path, {ZSTD}) == ""


def test_many_files_may_be_open() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 600), hard))
        allow_open(10)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(soft, 600), hard)
        allow_open(300)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(1112, hard), hard)
        allow_open(10**9)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] == hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
