"""Rows of JSONL and Parquet files as verl's dataset holds them, read by position when they are asked for.

verl reads files with Hugging Face `datasets`, which gives every row the columns of the file's first 10 MB, each in one
type: a key that a row lacks is None, and a whole number among fractions is a fraction. What that schema is, `datasets`
says itself (its `Features`); values are then made as it makes them. Nothing is copied to its cache.
"""

from __future__ import annotations

import contextlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from stages.loader.files import SCHEMA
from stages.loader.row_groups import RowGroups
from stages.loader.rows import BadRow, DataError
from stages.loader.sidecar import places
from stages.loader.stamp import Stamp
from stages.loader.text import TextFile

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Features


class Frame:
    """The rows of several files, or some of them, as one sequence, where verl's dataset has a `datasets.Dataset`.

    Picklable: each process that reads opens the files itself. DataError where one was changed since it was first
    opened, or a row does not fit the file's schema.
    """

    def __init__(self, files: Sequence[FileRows], rows: np.ndarray | None = None):
        self.files = tuple(files)
        self.ends = np.cumsum([len(f) for f in self.files], dtype=np.int64)
        self.rows: np.ndarray | range = range(int(self.ends[-1])) if rows is None else rows
        """Which rows of all the files this frame has; int64 where it has not all."""

    @property
    def features(self) -> Features:
        return self.files[0].features

    @property
    def column_names(self) -> list[str]:
        return list(self.features)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, item: int) -> dict[str, Any]:
        """A new dict, which the caller may change."""
        row = int(self.rows[item])
        file = int(np.searchsorted(self.ends, row, side="right"))
        return self.files[file].row(row - (int(self.ends[file - 1]) if file else 0))

    def select(self, places: Sequence[int] | np.ndarray | range) -> Frame:
        """Rows by their place in this frame."""
        return Frame(self.files, np.asarray(self.rows, np.int64)[np.asarray(places, np.int64)])

    def filter(self, keep: Callable[[dict[str, Any]], bool], **_: Any) -> Frame:
        """Rows for which `keep` says yes, asked one after the other in this process."""
        return self.select([i for i in range(len(self)) if keep(self[i])])


def open_frame(paths: Sequence[str], index_dir: str = "") -> Frame:
    """The rows of these files, one file after the other, in the columns of all of them. ValueError, by `datasets`,
    where those do not make one table."""
    import datasets

    files = [_open(Path(p), index_dir) for p in paths]
    files = [f for f in files if len(f)] or files[:1]
    # A table of one empty row has all that is needed to see what `datasets` makes of several.
    nothing = [datasets.Dataset.from_list([dict.fromkeys(f.features)], features=f.features) for f in files]
    features = datasets.concatenate_datasets(nothing).features
    for file in files:
        file.set_features(features)
    return Frame(files)


def _open(path: Path, index_dir: str) -> FileRows:
    if path.suffix == ".parquet":
        return ParquetRows(path)
    if path.suffix in (".json", ".jsonl"):
        return LineRows(path, index_dir)
    raise ValueError(f"Unsupported file format: {path}")


class FileRows(ABC):
    """One file. `stamp` says which content of it is meant."""

    path: Path
    stamp: Stamp
    features: Features

    def __init__(self) -> None:
        self._opened: tuple[int, Any] = (-1, None)

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def row(self, position: int) -> dict[str, Any]: ...

    def set_features(self, features: Features) -> None:
        """Give rows these columns; those that the file lacks are None."""
        self.features = features

    @abstractmethod
    def _open(self) -> Any: ...

    def _file(self) -> Any:
        """Open in this process: a lock or a descriptor that another one left behind by fork is of no use."""
        if self._opened[0] != os.getpid():
            self._opened = os.getpid(), self._open()
        return self._opened[1]

    def close(self) -> None:
        if self._opened[0] == os.getpid():
            self._opened[1].close()
        self._opened = (-1, None)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": (-1, None)}


class ParquetRows(FileRows):
    """All columns of a Parquet file."""

    def __init__(self, path: Path):
        import datasets

        super().__init__()
        self.path = path
        groups = RowGroups(path)
        self.stamp, self._count = groups.stamp, len(groups)
        self._opened = os.getpid(), groups
        self.features = datasets.Features.from_arrow_schema(groups.schema)

    def _open(self) -> RowGroups:
        groups = RowGroups(self.path)
        if groups.stamp != self.stamp:
            raise DataError(f"{self.path} was changed while the run reads it")
        return groups

    def __len__(self) -> int:
        return self._count

    def set_features(self, features: Features) -> None:
        import pyarrow as pa

        super().set_features(features)
        own, wanted = self._file().schema, features.arrow_schema
        self._schema = pa.schema([wanted.field(name) for name in own.names])
        self._cast = not self._schema.equals(own)
        self._missing = dict.fromkeys(n for n in wanted.names if n not in own.names)

    def row(self, position: int) -> dict[str, Any]:
        from datasets.table import table_cast

        piece, at = self._file().piece(position)
        row = piece.slice(at, 1)
        if self._cast:
            row = table_cast(_table(row), self._schema)
        [values] = row.to_pylist()
        return self.features.decode_example(values | self._missing)


class LineRows(FileRows):
    """A JSONL file, by the index that loaders use."""

    def __init__(self, path: Path, index_dir: str):
        super().__init__()
        self.path, self._index_dir = path, index_dir
        file = self._with_index(_Lines(), None)
        self.stamp, self._count = file.stamp, len(file)
        file.close()
        self.features = _features_of(path, self.stamp, index_dir)

    def _open(self) -> TextFile:
        return self._with_index(Converter(self.features), self.stamp)

    def _with_index(self, make: _Lines, expected: Stamp | None) -> TextFile:
        parser: Any = make  # a text file hands on whatever its parser makes of a line
        return TextFile.with_index(self.path, parser, self._index_dir, expected=expected)

    def __len__(self) -> int:
        return self._count

    def set_features(self, features: Features) -> None:
        super().set_features(features)
        self.close()

    def row(self, position: int) -> dict[str, Any]:
        file: TextFile = self._file()
        file.check()
        row: Any = file.rows([position])[0]
        if isinstance(row, BadRow):
            raise DataError(f"{file.place(position)}: {row}")
        return row


class _Lines:
    """A parser that leaves lines as they are."""

    def parse(self, line: bytes) -> bytes:
        return line

    def columns(self, line: bytes) -> Any:
        return line

    def __call__(self, line: bytes) -> Any:
        return self.columns(self.parse(line))


class Converter(_Lines):
    """Makes of a line a row with the columns and types of `features`, as `datasets` does."""

    def __init__(self, features: Features):
        self._features = features
        self._json = _json_paths(features)
        self._columns = {f.name: converter(f.type) for f in features.arrow_schema}

    def columns(self, line: bytes) -> dict[str, Any]:
        try:
            return self._row(orjson.loads(self._encode(line) if self._json else line))
        except (TypeError, ValueError) as e:
            raise BadRow(str(e)) from None

    def _row(self, found: Any) -> dict[str, Any]:
        if other := _is(dict, "an object", found).keys() - self._columns.keys():
            raise TypeError(f"key {min(other)!r} is none of the first rows' keys: {', '.join(self._columns)}")
        row: dict[str, Any] = {}
        for name, convert in self._columns.items():
            try:
                row[name] = convert(found.get(name))
            except (TypeError, ValueError) as e:
                raise TypeError(f"key '{name}' {e}, unlike in the first rows") from None
        return self._features.decode_example(row)

    def _encode(self, line: bytes) -> str:
        """`datasets` keeps values of mixed types as text of JSON, and on the way there writes the line anew."""
        from datasets.utils.json import json_encode_field, ujson_dumps, ujson_loads

        row = ujson_loads(line)
        for path in self._json:
            row = json_encode_field(row, path)
        return ujson_dumps(row)


def _json_paths(features: Features) -> list[list[str]]:
    if not any(str(f.type).find("json") >= 0 for f in features.arrow_schema):
        return []  # also where `datasets` is too old to know of such values
    from datasets.utils.json import get_json_field_paths_from_feature

    return get_json_field_paths_from_feature(features)


def converter(kind: pa.DataType) -> Callable[[Any], Any]:
    """What makes of a JSON value the one that Arrow would give back, had it read it as this type. TypeError says what
    the value is not."""
    import pyarrow as pa

    types = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return converter(kind.storage_type)
    if types.is_struct(kind):
        return _struct({f.name: converter(f.type) for f in kind})
    if types.is_list(kind) or types.is_large_list(kind):
        return _list(converter(kind.value_type))
    if types.is_string(kind) or types.is_large_string(kind):
        return partial(_is, str, "text")
    if types.is_boolean(kind):
        return partial(_is, bool, "true or false")
    if types.is_int64(kind):
        return partial(_is, int, "a whole number")
    if types.is_float64(kind):
        return _float
    return lambda value: pa.array([value]).cast(kind)[0].as_py()  # times, and columns of nulls


def _is(wanted: type, words: str, value: Any) -> Any:
    if value is None or type(value) is wanted:
        return value
    raise TypeError(f"is not {words}")


def _float(value: Any) -> float | None:
    if value is None or type(value) in (int, float):
        return None if value is None else float(value)
    raise TypeError("is not a number")


def _list(item: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def convert(value: Any) -> list[Any] | None:
        return None if value is None else [item(v) for v in _is(list, "a list", value)]

    return convert


def _struct(parts: Mapping[str, Callable[[Any], Any]]) -> Callable[[Any], Any]:
    def convert(value: Any) -> dict[str, Any] | None:
        if value is None:
            return None
        if other := _is(dict, "an object", value).keys() - parts.keys():
            raise TypeError(f"has key {min(other)!r}")
        return {name: part(value.get(name)) for name, part in parts.items()}

    return convert


def _features_of(path: Path, stamp: Stamp, index_dir: str) -> Features:
    """The schema that `datasets` gives a JSONL file, which it finds by reading 10 MB; kept for the next time."""
    import datasets

    names = places(path, index_dir, SCHEMA)
    key = [stamp.size, stamp.mtime_ns, stamp.inode, stamp.sample.hex(), version("datasets"), version("pyarrow")]
    for name in names:
        with contextlib.suppress(OSError, ValueError, KeyError):
            kept = json.loads(name.read_bytes())
            if kept["of"] == key:
                return datasets.Features.from_dict(kept["features"])
    features = _ask(path)
    for name in names:
        with contextlib.suppress(OSError):
            name.parent.mkdir(parents=True, exist_ok=True)
            temporary = name.with_name(f".{name.name}.{os.getpid()}.tmp")
            temporary.write_text(json.dumps({"of": key, "features": features.to_dict()}))
            temporary.replace(name)
            break
    return features


def _ask(path: Path) -> Features:
    import datasets

    with path.open("rb") as file:
        start = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
    if start.startswith(b"["):
        raise DataError(f"{path} is one JSON list; one object a line is needed")
    found = datasets.load_dataset("json", data_files=str(path), streaming=True)["train"].features
    if found is None:
        raise DataError(f"datasets finds no columns in {path}")
    return found


def _table(batch: pa.RecordBatch) -> pa.Table:
    import pyarrow as pa

    return pa.Table.from_batches([batch])
