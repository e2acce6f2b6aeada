"""Records: what flows between stages. Frozen dataclasses of NumPy arrays on the host, ragged where rows differ.

The annotation of a field says what it is:

- `np.ndarray`: a column, with first dimension B (one entry a row);
- `Ragged`: a ragged column (row i is `values[offsets[i]:offsets[i+1]]`);
- anything else: a value that all rows share (`int`, `float`, `str`, `bool`, `tuple`, or a frozen dataclass of those).

`split` and `concat` are exact inverses (tests/pipeline/test_records.py holds the properties).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol, Self, get_type_hints

import numpy as np

if TYPE_CHECKING:
    from pipeline.context import Context


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """B rows of unequal length, stored without padding.

    `values` [N] (any dtype but object), `offsets` [B+1] int64, `offsets[0] == 0`, non-decreasing,
    `offsets[B] == N`. Example: rows [7, 8], [], [9] are values [7, 8, 9], offsets [0, 2, 2, 3].
    """

    values: np.ndarray
    offsets: np.ndarray

    def __post_init__(self) -> None:
        values, off = self.values, self.offsets
        if values.ndim != 1 or values.dtype.hasobject or off.dtype != np.int64 or off.ndim != 1 or len(off) < 1:
            got = f"{values.dtype} {values.shape}, {off.dtype} {off.shape}"
            raise ValueError(f"a Ragged takes values [N] of plain numbers and offsets [B+1] int64; got {got}")
        if off[0] != 0 or off[-1] != len(values) or np.any(np.diff(off) < 0):
            shown = f"{off[:3].tolist()} ... {off[-3:].tolist()}"
            raise ValueError(f"offsets must rise from 0 to {len(values)}; got {shown}")

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

    def take(self, rows: Sequence[int] | np.ndarray) -> Ragged:
        """Rows by position, in the given order; a row may be taken more than once."""
        positions = _positions(rows)
        starts, lengths = self.offsets[:-1][positions], self.lengths[positions]
        offsets = offsets_of(lengths)
        index = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)
        return Ragged(self.values[index], offsets)

    def with_values(self, values: np.ndarray) -> Ragged:
        """The same rows with other values, e.g. a log-prob for each token."""
        return Ragged(values, self.offsets)

    def row_of_value(self) -> np.ndarray:
        """int64 [N]: the row each value belongs to."""
        return np.repeat(np.arange(len(self)), self.lengths)


def _positions(rows: Sequence[int] | np.ndarray) -> np.ndarray:
    positions = np.asarray(rows) if len(rows) else np.empty(0, np.int64)
    if positions.dtype.kind not in "iu":
        raise TypeError(f"rows are taken by position, not by {positions.dtype}; np.flatnonzero gives those of a mask")
    return positions


def offsets_of(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """int64 [B+1] from the lengths of B rows."""
    out = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=out[1:])
    return out


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Record:
    """Base of all records. TypeError if a field is not what its annotation says."""

    def __post_init__(self) -> None:
        for name, kind in _kinds(type(self)).items():
            value = getattr(self, name)
            fits = type(value) is int if kind is int else isinstance(value, (int, float) if kind is float else kind)
            if not fits or (kind is np.ndarray and value.dtype.hasobject):
                got = f"{value.dtype} array" if isinstance(value, np.ndarray) else type(value).__name__
                raise TypeError(f"{type(self).__name__}.{name} must be {kind.__name__}, got {got}")

    def same(self, other: Record) -> bool:
        """Equal in type, shared values and every byte of every column (NaN equals NaN)."""
        return type(self) is type(other) and all(
            _same(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)
        )


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Ragged):
        return _same(a.values, b.values) and _same(a.offsets, b.offsets)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return a == b


@cache
def _kinds(cls: type[Record]) -> dict[str, type]:
    """The types of fields that can be checked: a Literal or a parametrised tuple is left to pyright."""
    hints = get_type_hints(cls)
    return {f.name: hints[f.name] for f in fields(cls) if isinstance(hints[f.name], type)}


@cache
def _columns(cls: type[Record]) -> tuple[str, ...]:
    return tuple(n for n, kind in _kinds(cls).items() if kind in (np.ndarray, Ragged))


class Unresolved(LookupError):
    """What a packed record left out is not to be found here."""


class Packed(Protocol):
    """What is sent to another process of the run in place of a record, with names for what is to be found there."""

    @property
    def named(self) -> int:
        """How many rows are found by name, in whole or in part."""
        ...

    def unpack(self, ctx: Context) -> Rows:
        """The record, equal to the last byte, or Unresolved. `ctx` is that of the node that receives it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows(Record):
    """A record of B rows.

    `row_id` int64 [B] names a row for as long as it lives; `group_id` int64 [B] names the prompt it came
    from; `group_size` is how many rows each group has in the whole batch (0: the record does not say).
    `step` is the training step the batch belongs to, and travels with it, so that stages may work on
    several steps at once.
    """

    step: int
    group_size: int = 0
    row_id: np.ndarray
    group_id: np.ndarray

    def __post_init__(self) -> None:
        super(Rows, self).__post_init__()  # a slotted dataclass is made anew, which the bare super() does not know
        for name in ("row_id", "group_id"):
            ids = getattr(self, name)
            if ids.dtype != np.int64 or ids.ndim != 1:
                raise ValueError(f"{type(self).__name__}.{name} must be int64 [B]; got {ids.dtype} {ids.shape}")
        for name in _columns(type(self)):
            if (size := len(getattr(self, name))) != len(self):
                raise ValueError(f"{type(self).__name__}.{name} has {size} rows, row_id has {len(self)}")

    def __len__(self) -> int:
        return len(self.row_id)

    @property
    def named(self) -> int:
        return 0

    def pack(self, ctx: Context) -> Packed:
        """What another process of the run is sent: this record, unless it knows columns that can be found there."""
        return self

    def unpack(self, ctx: Context) -> Rows:
        return self

    @classmethod
    def columns(cls) -> tuple[str, ...]:
        """The names of the fields that have an entry for each row."""
        return _columns(cls)

    def shared(self) -> dict[str, Any]:
        """What all rows have in common."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _columns(type(self))}

    def take(self, rows: Sequence[int] | np.ndarray) -> Self:
        """Rows by position, in the given order."""
        at = _positions(rows)
        columns = {name: getattr(self, name) for name in _columns(type(self))}
        return replace(self, **{n: c.take(at) if isinstance(c, Ragged) else c[at] for n, c in columns.items()})

    def split(self, sizes: Sequence[int]) -> list[Self]:
        """Consecutive parts of the given sizes, which must add up to B."""
        if sum(sizes) != len(self) or min(sizes, default=0) < 0:
            raise ValueError(f"sizes {list(sizes)} do not add up to {len(self)} rows")
        return [self.take(np.arange(start, end)) for start, end in pairwise(offsets_of(sizes))]

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self:
        """One record of all rows. ValueError if the parts differ in type, in shared values or in a dtype.

        The class of the parts decides, not the one it is called on: a record may join in a way of its own by
        overriding `concat`, and must then end in `super(ItsName, cls).concat(parts)`.
        """
        if not parts:
            raise ValueError(f"cannot concat zero parts of {cls.__name__}")
        first, kind = parts[0], type(parts[0])
        if others := [type(p).__name__ for p in parts if type(p) is not kind]:
            raise ValueError(f"parts of {kind.__name__} differ in type: one is {others[0]}")
        if kind is not cls:
            return kind.concat(parts)
        for p in parts[1:]:
            if p.shared() != first.shared():
                raise ValueError(f"parts of {kind.__name__} differ: {p.shared()} and {first.shared()}")
        return replace(first, **{n: _joined(n, [getattr(p, n) for p in parts]) for n in _columns(type(first))})

    def align(self, row_ids: np.ndarray) -> Self:
        """The rows named by `row_ids`, in that order. KeyError if one is missing."""
        place = {r: i for i, r in enumerate(self.row_id.tolist())}
        if missing := [r for r in row_ids.tolist() if r not in place]:
            raise KeyError(f"{type(self).__name__} has no rows {missing[:8]}")
        return self.take([place[r] for r in row_ids.tolist()])

    def in_order(self) -> Self:
        """The rows by ascending `row_id`. ValueError if one comes twice."""
        ids, counts = np.unique(self.row_id, return_counts=True)
        if len(ids) < len(self):
            raise ValueError(f"{type(self).__name__} has rows twice: {ids[counts > 1][:8].tolist()}")
        return self if np.all(np.diff(self.row_id) > 0) else self.take(np.argsort(self.row_id))


def _joined(name: str, columns: Sequence[Any]) -> Any:
    if isinstance(columns[0], Ragged):
        lengths = np.concatenate([c.lengths for c in columns])
        return Ragged(_joined(name, [c.values for c in columns]), offsets_of(lengths))
    if len(dtypes := {c.dtype for c in columns}) > 1:
        raise ValueError(f"parts differ in the dtype of {name}: {', '.join(sorted(map(str, dtypes)))}")
    return np.concatenate(columns)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Snapshot(Record):
    """Weights on their way from the stage that learns to the stages that serve.

    `version` counts the updates; `manifest` is a tuple of (name, dtype, shape, start, stop) with byte
    positions in `data` uint8 [N]. The tensors lie back to back, little-endian.
    """

    version: int
    manifest: tuple[tuple[str, str, tuple[int, ...], int, int], ...]
    data: np.ndarray
