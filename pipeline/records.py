"""Records: what flows between stages. Frozen dataclasses of NumPy arrays on the host, ragged where rows differ.

A record's fields are of four kinds, told apart by their annotation:

- a column, `np.ndarray` with first dimension B (one entry a row);
- a ragged column, `Ragged` (row i is `values[offsets[i]:offsets[i+1]]`);
- a scalar that all rows share (`int`, `float`, `str`, `bool`, `tuple`, or a frozen dataclass of those);
- `Rows` adds the columns that identify a row, and with them `take`, `split`, `concat` and `align`.

`split` and `concat` are exact inverses (tests/pipeline/test_records.py holds the properties).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, Self, get_type_hints

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """B rows of unequal length, stored without padding.

    `values` [N] (any dtype), `offsets` [B+1] int64, `offsets[0] == 0`, non-decreasing, `offsets[B] == N`.
    Example: rows [7, 8], [], [9] are values [7, 8, 9], offsets [0, 2, 2, 3].
    """

    values: np.ndarray
    offsets: np.ndarray

    def __post_init__(self) -> None:
        off = self.offsets
        if off.dtype != np.int64 or off.ndim != 1 or self.values.ndim != 1 or len(off) < 1:
            raise ValueError(f"offsets must be int64 [B+1] and values [N]; got {off.dtype} {off.shape}, {self.values.shape}")
        if off[0] != 0 or off[-1] != len(self.values) or (len(off) > 1 and np.any(np.diff(off) < 0)):
            raise ValueError(f"offsets must rise from 0 to {len(self.values)}; got {off[0]} .. {off[-1]}")

    @classmethod
    def of(cls, rows: Iterable[Any], dtype: Any) -> Self:
        """From a sequence of 1-d sequences."""
        arrays = [np.asarray(r, dtype=dtype).reshape(-1) for r in rows]
        values = np.concatenate(arrays) if arrays else np.empty(0, dtype)
        return cls(values, offsets_of([len(a) for a in arrays]))

    @classmethod
    def texts(cls, rows: Iterable[str]) -> Self:
        """UTF-8 bytes of each string. A lone surrogate cannot be encoded and raises UnicodeEncodeError."""
        return cls.of([np.frombuffer(r.encode(), np.uint8) for r in rows], np.uint8)

    @classmethod
    def jsons(cls, rows: Iterable[Any]) -> Self:
        """JSON of each value."""
        return cls.texts(json.dumps(r, ensure_ascii=False, separators=(",", ":")) for r in rows)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    @property
    def lengths(self) -> np.ndarray:
        """int64 [B]"""
        return np.diff(self.offsets)

    def rows(self) -> list[np.ndarray]:
        return [self[i] for i in range(len(self))]

    def text(self, row: int) -> str:
        return self[row].tobytes().decode()

    def json(self, row: int) -> Any:
        return json.loads(self[row].tobytes())

    def take(self, rows: np.ndarray) -> Ragged:
        """Rows in the given order; a row may be taken more than once."""
        rows = np.asarray(rows, np.int64)
        starts, lengths = self.offsets[:-1][rows], self.lengths[rows]
        offsets = offsets_of(lengths)
        index = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)
        return Ragged(self.values[index], offsets)

    def with_values(self, values: np.ndarray) -> Ragged:
        """The same rows with other values, e.g. a log-prob for each token."""
        return Ragged(values, self.offsets)

    def row_of_value(self) -> np.ndarray:
        """int64 [N]: the row each value belongs to."""
        return np.repeat(np.arange(len(self)), self.lengths)

    @staticmethod
    def concat(parts: Sequence[Ragged]) -> Ragged:
        lengths = np.concatenate([p.lengths for p in parts])
        return Ragged(np.concatenate([p.values for p in parts]), offsets_of(lengths))


def offsets_of(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """int64 [B+1] from the lengths of B rows."""
    out = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=out[1:])
    return out


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Record:
    """Base of all records; `columns()` gives every array with a name, for transport and comparison."""

    def columns(self) -> dict[str, np.ndarray]:
        out: dict[str, np.ndarray] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Ragged):
                out[f"{f.name}.values"], out[f"{f.name}.offsets"] = value.values, value.offsets
            elif isinstance(value, np.ndarray):
                out[f.name] = value
        return out

    def scalars(self) -> dict[str, Any]:
        return {f.name: v for f in fields(self) if not isinstance(v := getattr(self, f.name), (np.ndarray, Ragged))}

    @classmethod
    def rebuild(cls, columns: dict[str, np.ndarray], scalars: dict[str, Any]) -> Self:
        """Inverse of `columns()` and `scalars()`."""
        values: dict[str, Any] = dict(scalars)
        for f in fields(cls):
            if f.name in columns:
                values[f.name] = columns[f.name]
            elif f"{f.name}.values" in columns:
                values[f.name] = Ragged(columns[f"{f.name}.values"], columns[f"{f.name}.offsets"])
        return cls(**values)

    def same(self, other: Record) -> bool:
        """Equal in type, scalars and every byte of every column (NaN equals NaN)."""
        a, b = self.columns(), other.columns()
        return (
            type(self) is type(other)
            and self.scalars() == other.scalars()
            and a.keys() == b.keys()
            and all(x.dtype == b[k].dtype and x.shape == b[k].shape and x.tobytes() == b[k].tobytes() for k, x in a.items())
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows(Record):
    """A record of B rows.

    `row_id` int64 [B] names a row for as long as it lives; `group_id` int64 [B] names the prompt it came
    from. `step` is the training step the batch belongs to, and travels with it, so that stages may work on
    several steps at once.
    """

    step: int
    row_id: np.ndarray
    group_id: np.ndarray

    def __post_init__(self) -> None:
        kinds, size = _kinds(type(self)), len(self.row_id)
        for name, kind in kinds.items():
            value = getattr(self, name)
            if kind is np.ndarray and not isinstance(value, np.ndarray) or kind is Ragged and not isinstance(value, Ragged):
                raise TypeError(f"{type(self).__name__}.{name} must be {kind.__name__}, got {type(value).__name__}")
            if kind in (np.ndarray, Ragged) and len(value) != size:
                raise ValueError(f"{type(self).__name__}.{name} has {len(value)} rows, row_id has {size}")

    def __len__(self) -> int:
        return len(self.row_id)

    def take(self, rows: np.ndarray) -> Self:
        """Rows by position, in the given order."""
        rows = np.asarray(rows, np.int64)
        changed = {n: v.take(rows) if isinstance(v := getattr(self, n), Ragged) else v[rows] for n in _columns(type(self))}
        return replace(self, **changed)

    def split(self, sizes: Sequence[int]) -> list[Self]:
        """Consecutive parts of the given sizes, which must add up to B."""
        if sum(sizes) != len(self) or min(sizes, default=0) < 0:
            raise ValueError(f"sizes {list(sizes)} do not add up to {len(self)} rows")
        ends = offsets_of(sizes)
        return [self.take(np.arange(ends[i], ends[i + 1])) for i in range(len(sizes))]

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self:
        """One record of all rows; the scalars of the parts must be equal."""
        if not parts:
            raise ValueError(f"cannot concat zero parts of {cls.__name__}")
        first = parts[0]
        for p in parts[1:]:
            if type(p) is not type(first) or p.scalars() != first.scalars():
                raise ValueError(f"parts of {type(first).__name__} differ in type or shared values: {p.scalars()} vs {first.scalars()}")
        joined: dict[str, Any] = {}
        for name in _columns(type(first)):
            values = [getattr(p, name) for p in parts]
            joined[name] = Ragged.concat(values) if isinstance(values[0], Ragged) else np.concatenate(values)
        return replace(first, **joined)

    def align(self, row_ids: np.ndarray) -> Self:
        """The rows named by `row_ids`, in that order. KeyError if one is missing."""
        order = np.argsort(self.row_id, kind="stable")
        place = np.searchsorted(self.row_id, row_ids, sorter=order)
        missing = (place == len(self)) | (self.row_id[order[np.minimum(place, len(self) - 1)]] != row_ids) if len(self) else np.ones(len(row_ids), bool)
        if np.any(missing):
            raise KeyError(f"{type(self).__name__} has no rows {np.asarray(row_ids)[missing][:8].tolist()}")
        return self.take(order[place])


@lru_cache(maxsize=None)
def _kinds(cls: type[Record]) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {f.name: hints[f.name] for f in fields(cls)}


@lru_cache(maxsize=None)
def _columns(cls: type[Record]) -> tuple[str, ...]:
    return tuple(n for n, k in _kinds(cls).items() if k in (np.ndarray, Ragged))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Snapshot(Record):
    """Weights on their way from the stage that learns to the stages that serve.

    `version` counts the updates; `manifest` is a tuple of (name, dtype, shape, start, stop) with byte
    positions in `data` uint8 [N]. The tensors lie back to back, little-endian.
    """

    version: int
    manifest: tuple[tuple[str, str, tuple[int, ...], int, int], ...]
    data: np.ndarray
