"""Prompts to measure with: a JSONL file of any number of rows in verl's layout, and prompts of a wanted length.

    python -m benchmarks.prompts rows=1200000 file=prompts.jsonl

A row is about 360 bytes: a short word problem as a chat, its answer, a data source, an index. Rows differ in length
(230 to 940 bytes, half of them 255 to 410). As in GSM8K, a few in a hundred hold a character beyond ASCII, a colon or
quotes. Equal rows and seeds give equal files.
"""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson

from benchmarks import measure

NAMES = ("Ada", "Ben", "Carla", "Dmitri", "Elena", "Farid", "Grace", "Hiro", "Ines", "Jonas", "Kofi", "Lena", "Marta")
THINGS = ("apples", "books", "candles", "drawings", "eggs", "flowers", "hats", "jars", "kites", "lamps", "marbles")
PLACES = ("the market", "the bakery", "a school fair", "the library", "her garden", "the harbour", "a workshop")
SENTENCES: tuple[str, ...] = (
    "{a} buys {x} {t} at {p} and gives {y} of them to {b}.",
    "Each box from {p} holds {x} {t}, and {b} carries {y} boxes home.",
    "On Monday {a} sells {x} {t}, and on Tuesday twice as many.",
    "{b} needs {y} minutes for one of the {t}, so {a} offers to help with {x} of them.",
    "After lunch {a} loses {y} {t} on the way to {p}.",
    "For every {x} {t} that {a} brings to {p}, {b} adds {y} more.",
)
RARE = (
    "At {p} they cost {y} € each.",
    "{a} writes a list: {x} {t}, {y} of which are new.",
    'A sign at {p} says "no more than {x} {t}".',
)
STORIES = 20_000


def write(file: Path, rows: int, seed: int = 0) -> None:
    """`rows` lines, each ended by a newline."""
    with file.open("wb") as out:
        for i, text in enumerate(texts(rows, seed)):
            row = {
                "data_source": "word-problems",
                "prompt": [{"role": "user", "content": text}],
                "reward_model": {"ground_truth": str(i % 997)},
                "extra_info": {"index": i},
            }
            out.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))


def texts(count: int, seed: int = 0) -> Iterator[str]:
    """Word problems, no two the same: each ends with a question of its own, after one of up to 20,000 stories."""
    rng = random.Random(seed)
    stories = [_story(rng) for _ in range(min(count, STORIES))]
    for i in range(count):
        yield f"{stories[int(rng.random() * len(stories))]} How many are left at the end of day {i}?"


def _story(rng: random.Random) -> str:
    slots = {
        "a": rng.choice(NAMES),
        "b": rng.choice(NAMES),
        "t": rng.choice(THINGS),
        "p": rng.choice(PLACES),
        "x": rng.randrange(2, 900),
        "y": rng.randrange(2, 60),
    }
    sentences = rng.choices(SENTENCES, k=1 + min(int(rng.expovariate(0.5)), 8))
    if rng.random() < 0.06:
        sentences.append(rng.choice(RARE))
    return " ".join(sentences).format_map(slots)


def questions(file: Path) -> list[str]:
    """The questions of GSM8K's JSONL file."""
    return [json.loads(line)["question"] for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]


def of_length(tokenizer: Any, pool: Sequence[str], tokens: int, count: int) -> list[str]:
    """`count` texts of about `tokens` tokens each, from texts of a pool: several in a row, cut after the token.

    `tokenizer`: of the library `tokenizers`. The texts differ as long as the pool has texts to begin with.
    """
    found: list[str] = []
    for i in range(count):
        parts, length, at = [], 0, i
        while length < tokens:
            parts.append(pool[at % len(pool)])
            length += len(parts[-1]) // 3  # a text has rarely fewer tokens than that
            at += 1
        text = " ".join(parts)
        encoded = tokenizer.encode(text, add_special_tokens=False)
        while len(encoded.ids) < tokens:
            text += " " + pool[at % len(pool)]
            encoded = tokenizer.encode(text, add_special_tokens=False)
            at += 1
        found.append(text[: encoded.offsets[tokens - 1][1]])
    return found


def tokenizer(asked: str, folder: Path) -> str:
    """The folder that was asked for; without one, a copy of data/tokenizer (bytes) with a chat template in `folder`."""
    if asked:
        return str(Path(asked).expanduser().resolve())
    copy = folder / "tokenizer"
    shutil.copytree(measure.ROOT / "data/tokenizer", copy, dirs_exist_ok=True)
    config = json.loads((copy / "tokenizer_config.json").read_text())
    config["chat_template"] = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    (copy / "tokenizer_config.json").write_text(json.dumps(config))
    return str(copy)


@dataclasses.dataclass(slots=True, kw_only=True)
class PromptSettings:
    rows: int = measure.option(12_000, "lines to write")
    file: str = measure.option("prompts.jsonl", "where to")
    seed: int = measure.option(0, "other seeds give other prompts")


def main() -> None:
    asked = measure.settings(PromptSettings, __doc__ or "")
    write(Path(asked.file), asked.rows, asked.seed)
    size = Path(asked.file).stat().st_size
    print(f"{asked.file}: {asked.rows:,} rows, {size:,} bytes, {size / max(asked.rows, 1):.0f} a row", file=sys.stderr)


if __name__ == "__main__":
    main()
