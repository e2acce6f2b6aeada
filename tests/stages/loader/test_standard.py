"""What only the loader in memory does: packed files."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pipeline.context import Context
from stages.loader.rows import DataError
from stages.loader.standard import StandardLoader, StandardLoaderConfig
from stages.model.hf import HfModel, HfModelConfig

Open = Callable[..., StandardLoader]


def zstd(data: bytes) -> bytes:
    return pa.Codec("zstd").compress(data, asbytes=True)


PACK = {"gzip": gzip.compress, "zstd": zstd}


@pytest.fixture(params=PACK)
def pack(request: pytest.FixtureRequest) -> Callable[[bytes], bytes]:
    return PACK[request.param]


@pytest.fixture
def answers(make_context: Callable[..., Context], tmp_path: Path) -> Callable[..., list[Any]]:
    """The answers of a file with these bytes."""

    def read(content: bytes, **settings: Any) -> list[Any]:
        path = tmp_path / "train.jsonl"
        path.write_bytes(content)
        config = StandardLoaderConfig(path=str(path), batch_size=0, shuffle=False, **settings)
        loader = StandardLoader(config, HfModel(HfModelConfig(path="none")))
        loader.open(make_context("loader"))
        batch = loader.run()
        loader.close()
        return [batch.ground_truth.json(i) for i in range(len(batch))]

    return read


def lines(first: int, count: int) -> bytes:
    rows = ({"prompt": f"p{i}", "answer": i} for i in range(first, first + count))
    return b"".join(json.dumps(r).encode() + b"\n" for r in rows)


def test_all_members_and_frames_are_read(pack: Callable[[bytes], bytes], answers: Callable[..., list[Any]]) -> None:
    """indygreg/python-zstandard issue 59: only the first was read, and nothing was said."""
    assert answers(pack(lines(0, 10)) + pack(lines(10, 10))) == list(range(20))
    assert answers(pack(lines(0, 10)) + pack(b"") + pack(lines(10, 1))) == list(range(11))
    assert answers(pack(lines(0, 10)[:57]) + pack(lines(0, 10)[57:])) == list(range(10))  # cut within a row


def test_a_file_that_is_cut_short_is_an_error(
    pack: Callable[[bytes], bytes], answers: Callable[..., list[Any]]
) -> None:
    whole = pack(lines(0, 10)) + pack(lines(10, 20))
    for cut in (1, 4, 8, 9, 20, len(pack(lines(10, 20))) + 3, len(whole) - 5):
        with pytest.raises(DataError, match="content that is damaged or cut short"):
            answers(whole[:-cut])


def test_damage_is_an_error(answers: Callable[..., list[Any]]) -> None:
    whole = bytearray(gzip.compress(lines(0, 100)))
    for at in (20, len(whole) // 2, len(whole) - 6):
        damaged = bytes(whole[:at]) + bytes([whole[at] ^ 0x55]) + bytes(whole[at + 1 :])
        with pytest.raises(DataError):
            answers(damaged)
    with pytest.raises(DataError, match="damaged or cut short"):
        answers(bytes(whole) + b"and more")


def test_a_frame_to_be_skipped_is_skipped(answers: Callable[..., list[Any]]) -> None:
    skipped = b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd"
    assert answers(skipped + zstd(lines(0, 3)) + skipped + zstd(lines(3, 2))) == list(range(5))


def test_nothing_but_packed_blank_lines(pack: Callable[[bytes], bytes], answers: Callable[..., list[Any]]) -> None:
    for content in (pack(b""), pack(b"\n \n")):
        with pytest.raises(DataError, match="has no rows, only blank lines"):
            answers(content)


def test_rows_after_the_last_wanted_one_are_not_parsed(answers: Callable[..., list[Any]]) -> None:
    assert answers(lines(0, 3) + b"not JSON\n", limit=3) == [0, 1, 2]
    assert answers(lines(0, 3) + b"not JSON\n", limit=1, skip=2) == [2]
