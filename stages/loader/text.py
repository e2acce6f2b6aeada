"""Rows of a text file, read where its index says they lie."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path

import numpy as np

from stages.loader import sidecar
from stages.loader.index import NEWLINE, file_reader, line_numbers, row_starts
from stages.loader.rows import BadRow, DataError, Row, RowParser
from stages.loader.sidecar import Counts, Sidecar
from stages.loader.source import Place, Source
from stages.loader.stamp import Stamp

LONGEST = 1 << 30
"""Bytes of a row, beyond which it is not even read."""

_BOM_END = b"\xbf"
"""What stands before the first row of a file with a byte order mark."""

_RUN = 1 << 20
"""Bytes of neighbouring rows that are read in one call."""


def parsed(parser: RowParser, line: bytes) -> Row | BadRow:
    """The row, or why there is none."""
    try:
        if len(line) > LONGEST:
            return too_long()
        found = parser.parse(line)
        del line  # a long one need not stay while its columns are made
        return parser.columns(found)
    except BadRow as e:
        return e.with_traceback(None)  # which would hold the line


def too_long() -> BadRow:
    return BadRow(f"is longer than {LONGEST >> 20} MiB")


CUT = " (the file ends here without a newline: is it cut short?)"


class TextFile(Source):
    """`with_index(path, parser, index_dir)` opens one. Nothing is read but the rows that are asked for.

    Reads by position on an open descriptor, not through a mapping: when a mapped file is cut short, the next access
    ends the process by a signal (docs/adr/0007). Each row is checked to lie between two line ends.
    """

    def __init__(self, path: Path, parser: RowParser, fd: int, index: Sidecar):
        self.path, self.stamp, self.sidecar = path, index.stamp, index
        self._parser, self._fd, self._offsets = parser, fd, index.offsets

    @classmethod
    def with_index(
        cls,
        path: Path,
        parser: RowParser,
        index_dir: str,
        *,
        expected: Stamp | None = None,
        index: Sidecar | None = None,
    ) -> TextFile:
        """Builds the index, or finds it, or is given it. DataError if the file is not the `expected` one."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            stamp = Stamp.of(fd, path)
            if expected not in (None, stamp):
                raise DataError(f"{path} was changed while the run reads it")
            index = index or sidecar.load(path, stamp, index_dir)
            if index is None:
                with sidecar.only_one(fd):
                    index = sidecar.load(path, stamp, index_dir) or _index(path, fd, stamp, index_dir)
            return cls(path, parser, fd, index)
        except BaseException:
            os.close(fd)
            raise

    def recipe(self) -> Callable[[], Source]:
        assert self.sidecar is not None
        held = self.sidecar if self.sidecar.file is None else None  # that cannot be found again
        where = self.path, self._parser, self.sidecar.index_dir
        return functools.partial(TextFile.with_index, *where, expected=self.stamp, index=held)

    def trust(self) -> None:
        self._parser = self._parser.for_known_good()

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def rows(self, positions: Sequence[int]) -> list[Row | BadRow]:
        at = np.asarray(positions, np.int64)
        begin, end = self._offsets[at], self._offsets[at + 1]
        if np.any(begin < 0) or np.any(begin >= end) or np.any(end > self.stamp.size):
            raise self._broken()
        starts, stops = begin.tolist(), end.tolist()
        out: list[Row | BadRow] = []
        for run in _runs(starts, stops):
            if len(run) == 1:
                out.append(self._row(starts[run.start], stops[run.start]))
            else:
                out.extend(self._run(starts[run.start : run.stop], stops[run.stop - 1]))
        return out

    def _row(self, start: int, stop: int) -> Row | BadRow:
        if stop - start > LONGEST:
            return too_long()
        return self._parsed(self._bytes(start, stop))

    def _parsed(self, line: bytes) -> Row | BadRow:
        """DataError if a damaged index took two rows for one: that is no fault of the row."""
        found = parsed(self._parser, line)
        if isinstance(found, BadRow) and b"\n" in line.strip():
            raise self._broken()
        return found

    def _run(self, starts: list[int], stop: int) -> Iterator[Row | BadRow]:
        """Of rows that follow one another."""
        data, base = self._bytes(starts[0], stop), starts[0]
        for begin, end in zip(starts, [*starts[1:], stop], strict=True):
            if data[end - base - 1] != NEWLINE and end != stop:
                raise self._broken()
            yield self._parsed(data[begin - base : end - base])

    def _bytes(self, start: int, stop: int) -> bytes:
        """The bytes of whole rows. DataError if they do not lie between line ends."""
        before = start - 1 if start > 0 else 0
        data = os.pread(self._fd, stop - before, before)
        whole = len(data) == stop - before and (data[-1] == NEWLINE or stop == self.stamp.size)
        ended = not start or data[:1] == b"\n" or (start == 3 and data[:1] == _BOM_END)
        if not (whole and ended):
            raise self._broken()
        return data[start - before :]

    def _broken(self) -> DataError:
        self.check()
        kept = self.sidecar.file if self.sidecar else None
        return DataError(f"the index of {self.path} does not fit it; remove {kept}" if kept else f"{self.path} changed")

    def places(self, positions: Sequence[int]) -> list[Place]:
        at = np.asarray(positions, np.int64)
        starts, numbers = self._offsets[at], at + 1
        assert self.sidecar is not None
        if self.sidecar.counts.lines != self.sidecar.counts.rows:  # blank lines: the text must be looked at
            order = np.argsort(starts, kind="stable")
            numbers[order] = line_numbers(file_reader(self._fd), starts[order])
        last = len(self) - 1 if self._is_cut() else -1
        notes = [CUT if p == last else "" for p in at.tolist()]
        columns = zip(numbers.tolist(), starts.tolist(), notes, strict=True)
        return [Place(self.path, number, start, note) for number, start, note in columns]

    def _is_cut(self) -> bool:
        return self.stamp.size > 0 and os.pread(self._fd, 1, self.stamp.size - 1) != b"\n"

    def close(self) -> None:
        fd, self._fd, self._offsets, self.sidecar = self._fd, -1, np.zeros(1, np.int64), None
        if fd >= 0:
            os.close(fd)


def _runs(starts: list[int], stops: list[int]) -> Iterator[range]:
    """Parts of the list in which each row begins where the one before ends, and that are read in one call."""
    first = 0
    for i in range(1, len(starts) + 1):
        if i == len(starts) or starts[i] != stops[i - 1] or stops[i] - starts[first] > _RUN:
            yield range(first, i)
            first = i


def _index(path: Path, fd: int, stamp: Stamp, index_dir: str) -> Sidecar:
    """DataError if the file is written to meanwhile."""

    def scan() -> Generator[np.ndarray, None, Counts]:
        """Fails before anything is kept, if the file is not as long as it was."""
        parts, end = row_starts(file_reader(fd)), 0
        while True:
            try:
                part = next(parts)
            except StopIteration as last:
                if end != stamp.size:
                    raise DataError(f"{path} is being written to; it must be complete before a run starts") from None
                return last.value
            end = int(part[-1]) if len(part) else end
            yield part

    built = sidecar.build(path, stamp, index_dir, scan)
    stamp.check(path)
    return built
