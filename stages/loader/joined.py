"""Several files as if they were one: rows counted through all of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stages.loader.rows import BadRow, Row
from stages.loader.source import Place, Source


class Joined:
    """Rows count from 0 through the files; no row stands in two of them, whatever a file ends with."""

    def __init__(self, sources: Sequence[Source]):
        self.sources = tuple(sources)
        self._ends = np.cumsum([len(s) for s in self.sources], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def spans(self, end: int) -> list[range]:
        """Of each file, the rows of it (from 0) that lie among the first `end` rows of all."""
        starts = self.starts()
        return [range(min(len(s), max(0, end - start))) for s, start in zip(self.sources, starts, strict=True)]

    def starts(self) -> list[int]:
        """The first row of each file."""
        return [0, *self._ends.tolist()][: len(self.sources)]

    def locate(self, rows: np.ndarray) -> list[tuple[int, np.ndarray, np.ndarray]]:
        """For each file that has some of these rows: its number, which of `rows` they are, their positions there."""
        if len(self.sources) == 1:
            return [(0, np.arange(len(rows)), rows)]
        files = np.searchsorted(self._ends, rows, side="right")
        starts = self.starts()
        split = ((f, np.flatnonzero(files == f)) for f in np.unique(files).tolist())
        return [(f, which, rows[which] - starts[f]) for f, which in split]

    def rows(self, rows: np.ndarray) -> list[Row | BadRow]:
        """In the order asked for; int64 [n]."""
        if len(self.sources) == 1:
            return self.sources[0].rows(rows.tolist())
        out: list[Row | BadRow] = [_NONE] * len(rows)
        for file, which, positions in self.locate(rows):
            for i, row in zip(which.tolist(), self.sources[file].rows(positions.tolist()), strict=True):
                out[i] = row
        return out

    def place(self, row: int) -> Place:
        [(file, _, [position])] = self.locate(np.array([row]))
        return self.sources[file].place(int(position))

    def check(self, rows: np.ndarray) -> None:
        """DataError if a file that has some of these rows is not what it was when it was opened."""
        for file, _, _ in self.locate(rows):
            self.sources[file].check()

    def close(self) -> None:
        for source in self.sources:
            source.close()


_NONE = BadRow("was not read")
