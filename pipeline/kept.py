"""Records of a step as files, for whoever looks at a run from outside: `records/STEP/NODE.npz` of a run directory.

A column `c` is the array `c`; a ragged column is `c.values` and `c.offsets`. What all rows share is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from pipeline.disk import writing
from pipeline.records import Ragged, Rows

Column = np.ndarray | Ragged


def keep(run_dir: Path, step: int, records: Mapping[str, Rows]) -> None:
    """DiskError if they cannot be written, also where the step was kept before."""
    folder = run_dir / "records" / str(step)
    with writing(folder):
        folder.mkdir(parents=True)
        _save(folder, records)


def _save(folder: Path, records: Mapping[str, Rows]) -> None:
    for node, rows in records.items():
        arrays: dict[str, np.ndarray] = {}
        for name in rows.columns():
            column: Column = getattr(rows, name)
            if isinstance(column, Ragged):
                arrays |= {f"{name}.values": column.values, f"{name}.offsets": column.offsets}
            else:
                arrays[name] = column
        np.savez(folder / f"{node}.npz", allow_pickle=False, **arrays)


def kept(run_dir: Path, step: int) -> dict[str, dict[str, Column]]:
    """Node -> column -> values; empty if the step was not kept."""
    return {file.stem: _columns(file) for file in sorted((run_dir / "records" / str(step)).glob("*.npz"))}


def _columns(file: Path) -> dict[str, Column]:
    with np.load(file, allow_pickle=False) as arrays:
        ragged = {name.removesuffix(".offsets") for name in arrays.files if name.endswith(".offsets")}
        plain = {name: arrays[name] for name in arrays.files if "." not in name}
        return plain | {name: Ragged(arrays[f"{name}.values"], arrays[f"{name}.offsets"]) for name in ragged}
