"""The rows of one file, by position: what a loader backend has to provide.

A backend's `open_source(path, parser, first)` returns one. It can be opened again in another process by
`source.recipe()`, if it has one: validation and the length filter do so.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.loader.rows import BadRow, Row
from stages.loader.sidecar import Sidecar, Verdict, load, only_one
from stages.loader.stamp import Stamp


@dataclass(frozen=True, slots=True)
class Place:
    """Where a person finds a row: the physical line or the row, from 1, and the byte where a line begins.

    `note` adds to a reason what its place tells (the last line of a file that may be cut short).
    """

    path: Path
    number: int
    byte: int | None = None
    note: str = ""

    def __str__(self) -> str:
        return (
            f"{self.path}, row {self.number}" if self.byte is None else f"{self.path}:{self.number} (byte {self.byte})"
        )

    def plain(self) -> dict[str, Any]:
        """For `bad_rows.jsonl`."""
        if self.byte is None:
            return {"file": str(self.path), "row": self.number}
        return {"file": str(self.path), "line": self.number, "byte": self.byte}


class Source(ABC):
    """One file, open for reading. Positions count its rows from 0, blank lines left out.

    Reading never changes the file, and works from any thread. DataError says that the file was changed since it
    was opened; a row that cannot be used is a BadRow, returned and not raised, so that a batch can tell of all.
    """

    path: Path
    stamp: Stamp
    sidecar: Sidecar | None = None
    """Where verdicts are kept; None: nowhere, as all rows are parsed when the source opens anyway."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def rows(self, positions: Sequence[int]) -> list[Row | BadRow]:
        """Rows in the order asked for; a backend reads them in whatever order suits the file."""

    @abstractmethod
    def places(self, positions: Sequence[int]) -> list[Place]:
        """Where these rows stand. May be slow; for messages only."""

    def place(self, position: int) -> Place:
        return self.places([position])[0]

    def recipe(self) -> Callable[[], Source] | None:
        """Opens the same file again, in any process; picklable. None: only this object can read it."""
        return None

    def known(self, key: bytes, rows: int) -> Verdict | None:
        """What validation found before of the first `rows` rows, under the settings that `key` names."""
        return self.sidecar.verdict(key, rows) if self.sidecar else None

    def keep(self, key: bytes, verdict: Verdict) -> None:
        if self.sidecar:
            self.sidecar = self.sidecar.with_verdict(key, verdict)

    def trust(self) -> None:
        """All rows that will be asked for have been looked at, so they need not be checked again."""
        return  # a source that parses all rows when it opens never checks one twice

    @contextmanager
    def alone(self) -> Iterator[None]:
        """While others who ask for it wait; what they have kept until now is known inside."""
        if self.sidecar is None:
            yield
            return
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            with only_one(fd):
                self.sidecar = load(self.path, self.stamp, self.sidecar.index_dir) or self.sidecar
                yield
        finally:
            os.close(fd)

    def check(self) -> None:
        """DataError if the file is not what it was when it was opened: what was read from it may be anything."""
        self.stamp.check(self.path)

    @property
    def bytes(self) -> int:
        """Size of the file, by which work is planned."""
        return self.stamp.size

    @abstractmethod
    def close(self) -> None:
        """Safe to call twice."""
