"""Make `data/verl/train.parquet` and `data/verl/test.parquet`: prompts of `data/digits` in verl's columns.

verl 0.9 reads `prompt` (a chat) and, for the reward, `data_source`, `reward_model.ground_truth` and `extra_info`; its
own scripts also write `ability`. The answer is that of one skill: the digits sorted.

    python data/make_verl.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

HERE = Path(__file__).parent
FILES = {"train": ("train.jsonl", 1024), "test": ("heldout.jsonl", 256)}
"""Name here -> file of `data/digits`, and how many of its rows."""


def rows(split: str) -> Iterator[dict[str, Any]]:
    """The rows of one file, in verl's columns."""
    file, count = FILES[split]
    with (HERE / "digits" / file).open(encoding="utf-8") as lines:
        for index, line in zip(range(count), lines, strict=False):
            row = json.loads(line)
            yield {
                "data_source": "headrace/sort_digits",
                "prompt": [{"role": "user", "content": row["prompt"]}],
                "ability": "sort",
                "reward_model": {"style": "rule", "ground_truth": row["answer"]["sort"]},
                "extra_info": {"split": split, "index": index},
            }


def main() -> None:
    """Write both files."""
    (HERE / "verl").mkdir(exist_ok=True)
    for split in FILES:
        table = pa.Table.from_pylist(list(rows(split)))
        pq.write_table(table, HERE / "verl" / f"{split}.parquet", compression="zstd")
        print(f"{split}: {table.num_rows} rows")


if __name__ == "__main__":
    main()
