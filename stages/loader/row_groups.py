"""Rows of a Parquet file by position: a row group is decoded when one of its rows is first needed, and only once.

Bytes are read with `pread` on an open descriptor: a mapping of a file that somebody cuts short ends the process by
SIGBUS. Decoded row groups stay in memory up to a number of bytes. What does not fit goes, as Arrow data, to a file of
our own without a name, which is mapped: it is page cache, not memory of the process, and nobody else can cut it short.
"""

from __future__ import annotations

import logging
import mmap
import os
import tempfile
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.loader.arrow_values import Plain, plain
from stages.loader.rows import BadRow, DataError
from stages.loader.stamp import Stamp

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger("headrace")

_PIECE = 512
"""Rows decoded in one piece. Text of one piece stays far below the 2 GiB that 32-bit offsets reach, also where a
dictionary (at most about 1 MiB a column) hides how long the text is."""

_PIECE_BYTES = 1 << 24
_SCRATCH = 1 << 30
_ALIGN = 64


class RowGroups:
    """`columns`: the keys that will be asked for, a dot going into structs; None: all columns.

    DataError if the file is not Parquet or not whole, was changed since it was opened, or has a row group that cannot
    be read. Safe to use from several threads.
    """

    def __init__(self, path: Path, columns: Sequence[str] | None = None, cache_bytes: int = 1 << 26):
        self.path = path
        self._lock = threading.Lock()
        self._fd = -1
        self._file: Any = None
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self.stamp = Stamp.of(self._fd, path)
            self._open(columns)
        except OSError as e:
            self.close()
            raise DataError(f"{path} cannot be read: {e.strerror or e}") from e
        except BaseException:
            self.close()
            raise
        self._decoded: OrderedDict[int, tuple[list[pa.RecordBatch], list[int], int]] = OrderedDict()
        self._cache_bytes, self._bytes = cache_bytes, 0
        self._scratch: _Scratch | None = None
        self._disk = True

    def _open(self, columns: Sequence[str] | None) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            self._file = pq.ParquetFile(
                pa.OSFile(f"/proc/self/fd/{self._fd}"),
                pre_buffer=False,
                buffer_size=1 << 20,
                page_checksum_verification=True,
            )
            self.schema: pa.Schema = self._file.schema_arrow
        except (pa.ArrowException, OSError) as e:
            self.stamp.check(self.path)  # then that is why
            raise DataError(f"{self.path} cannot be read as Parquet: {_first_line(e)}") from e
        self.names: list[str] = self.schema.names
        if twice := [n for n in self.names if self.names.count(n) > 1]:
            raise DataError(f"{self.path} has column '{twice[0]}' twice")
        counts = [self._file.metadata.row_group(i).num_rows for i in range(self._file.num_row_groups)]
        self._first = [0, *accumulate(counts)]
        self._columns = None if columns is None else [c for c in map(self._column, columns) if c]
        self._plain: dict[str, Plain] = {f.name: c for f in self.schema if (c := plain(f.type, f.name))}

    def _column(self, key: str) -> str:
        """The part of the file to read for a key: a whole column, or one field of a struct; '' if there is none."""
        import pyarrow as pa

        if key in self.names:
            return key
        first, *rest = key.split(".")
        if first not in self.names:
            return ""
        kind = self.schema.field(first).type
        for part in rest:
            if not pa.types.is_struct(kind) or kind.get_field_index(part) < 0:
                return first  # whatever it holds instead: it decides what is said of it
            kind = kind.field(part).type
        return key

    def __len__(self) -> int:
        return self._first[-1]

    def take(self, positions: Sequence[int]) -> list[dict[str, Any] | BadRow]:
        """Rows as JSON would give them: text, numbers, lists, dicts. Every column is a key; those that were not asked
        for are None. BadRow where a value has no form in JSON."""
        out: list[dict[str, Any] | BadRow] = [BadRow("")] * len(positions)
        with self._lock:
            for places, first in _runs(positions):  # in the order of the file: each row group is wanted once
                done = 0
                while done < len(places):
                    piece, at = self._piece(first + done)
                    some = piece.slice(at, len(places) - done)
                    for place, row in zip(places[done:], self._rows(some), strict=False):
                        out[place] = row
                    done += len(some)
        return out

    def piece(self, position: int) -> tuple[pa.RecordBatch, int]:
        """The decoded rows that hold a row, and its place among them."""
        with self._lock:
            return self._piece(position)

    def _piece(self, position: int) -> tuple[pa.RecordBatch, int]:
        group = self.group_of(position)
        pieces, starts = self._group(group)
        within = position - self._first[group]
        i = bisect_right(starts, within) - 1
        return pieces[i], within - starts[i]

    def group_of(self, position: int) -> int:
        """Which row group holds a row, from 0."""
        return bisect_right(self._first, position) - 1

    def _rows(self, piece: pa.RecordBatch) -> list[dict[str, Any] | BadRow]:
        try:
            rows: list[Any] = piece.to_pylist()
        except ValueError:  # one of them; which, and why, is told row by row
            rows = [_one(piece.slice(i, 1)) for i in range(len(piece))]
        return [self._finish(row) for row in rows]

    def _finish(self, row: dict[str, Any] | BadRow) -> dict[str, Any] | BadRow:
        if isinstance(row, BadRow):
            return row
        try:
            for name, to_plain in self._plain.items():
                if (value := row.get(name)) is not None:
                    row[name] = to_plain(value)
        except BadRow as e:
            return e
        return dict.fromkeys(self.names) | row

    def _group(self, group: int) -> tuple[list[pa.RecordBatch], list[int]]:
        """The pieces of a row group, and where each begins in it."""
        if group in self._decoded:
            self._decoded.move_to_end(group)
        else:
            before = self._bytes
            pieces = [self._keep(p) for p in self._decode(group)]
            starts = [0, *accumulate(len(p) for p in pieces)][:-1]
            self._decoded[group] = pieces, starts, self._bytes - before
            self._drop_oldest()
        return self._decoded[group][:2]

    def _keep(self, piece: pa.RecordBatch) -> pa.RecordBatch:
        """In memory while there is room, else on disk; in memory all the same if the disk takes no more."""
        if self._disk and self._bytes + piece.nbytes > self._cache_bytes:
            try:
                self._scratch = self._scratch or _Scratch()
                return self._scratch.put(piece)
            except OSError as e:
                self._disk = False
                log.warning(
                    "%s: decoded rows do not fit into %d bytes of memory, and cannot be written to %s (%s): row groups"
                    " are decoded again and again",
                    self.path,
                    self._cache_bytes,
                    tempfile.gettempdir(),
                    e.strerror,
                )
        self._bytes += piece.nbytes
        return piece

    def _drop_oldest(self) -> None:
        """Those in memory beyond the bound, but not the newest; only reached where the disk takes no more."""
        for group in list(self._decoded)[:-1]:
            if self._bytes <= self._cache_bytes:
                return
            if self._decoded[group][2]:
                self._bytes -= self._decoded.pop(group)[2]

    def _decode(self, group: int) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        meta = self._file.metadata.row_group(group)
        if self._columns is not None and not self._columns:
            yield pa.RecordBatch.from_struct_array(pa.array([{}] * meta.num_rows, pa.struct([])))
            return
        rows = max(1, min(_PIECE, _PIECE_BYTES * meta.num_rows // max(meta.total_byte_size, 1)))
        found = 0
        try:
            for piece in self._file.iter_batches(
                batch_size=rows, row_groups=[group], columns=self._columns, use_threads=False
            ):
                found += len(piece)
                yield piece
        except (pa.ArrowException, OSError) as e:
            self.stamp.check(self.path)  # then that is why
            raise DataError(f"row group {group + 1} of {self.path} cannot be read: {_first_line(e)}") from e
        self.stamp.check(self.path)
        if found != meta.num_rows:
            raise DataError(f"row group {group + 1} of {self.path} gives {found} of its {meta.num_rows} rows")

    def close(self) -> None:
        """Safe to call twice."""
        self._decoded = OrderedDict()
        self._scratch = None
        if self._file is not None:
            self._file.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class _Scratch:
    """A file without a name that only grows, mapped. The disk is asked for what is written, not for its length."""

    def __init__(self) -> None:
        self._open(_SCRATCH)

    def _open(self, size: int) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 (closed with its last reference)
        os.ftruncate(self._file.fileno(), size)
        self._map = mmap.mmap(self._file.fileno(), size, prot=mmap.PROT_READ)
        self._used, self._size = 0, size

    def put(self, piece: pa.RecordBatch) -> pa.RecordBatch:
        """The same rows, mapped. OSError if they cannot be written."""
        import pyarrow as pa

        data = memoryview(piece.serialize())
        if self._used + len(data) > self._size:
            self._open(max(2 * self._size, len(data)))
        rest, at = data, self._used
        while rest.nbytes:
            done = os.pwrite(self._file.fileno(), rest, at)
            rest, at = rest[done:], at + done
        mapped = memoryview(self._map)[self._used : at]
        self._used = -(-at // _ALIGN) * _ALIGN
        return pa.ipc.read_record_batch(pa.py_buffer(mapped), piece.schema)


def _runs(positions: Sequence[int]) -> Iterator[tuple[list[int], int]]:
    """Places in `positions` whose values follow each other, ascending, and the first value."""
    run: list[int] = []
    for place in sorted(range(len(positions)), key=positions.__getitem__):
        if run and positions[place] != positions[run[-1]] + 1:
            yield run, positions[run[0]]
            run = []
        run.append(place)
    if run:
        yield run, positions[run[0]]


def _one(row: pa.RecordBatch) -> dict[str, Any] | BadRow:
    """A row of which some value has no form in Python; says which."""
    out: dict[str, Any] = {}
    for name, column in zip(row.schema.names, row.columns, strict=True):
        try:
            out[name] = column[0].as_py()
        except UnicodeDecodeError as e:
            return BadRow(f"is not UTF-8: byte 0x{e.object[e.start]:02x} in column '{name}'")
        except ValueError as e:
            return BadRow(f"column '{name}': {_first_line(e)}")
    return out


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
