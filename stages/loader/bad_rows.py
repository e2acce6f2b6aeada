"""What is said of rows that cannot be used: the error of a run that stops at them, and the list of one that goes on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from stages.loader.rows import BadRow, DataError, Row
from stages.loader.source import Place, Source

SHOWN = 10
"""Bad rows that a message lists one by one."""

LIST = "bad_rows.jsonl"
"""In the run directory: a line for each row that was left out."""


@dataclass(frozen=True, slots=True)
class Complaint:
    """A row that cannot be used: where, and why."""

    place: Place
    reason: str

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}{self.place.note}"


def complaints(source: Source, positions: Sequence[int]) -> list[Complaint]:
    """Of rows of one file that cannot be used, read again. DataError if the file is another one by now."""
    rows: list[Row | BadRow] = source.rows(positions)
    source.check()
    pairs = zip(source.places(positions), rows, strict=True)
    return [Complaint(place, str(row)) for place, row in pairs if isinstance(row, BadRow)]


def refused(first: Iterable[Complaint], count: int, of: str) -> DataError:
    """The error that lists `first`, the first ten or fewer of `count` bad rows."""
    shown = f"; the first {SHOWN}" if count > SHOWN else ""
    return DataError("\n".join([f"{count} of {of} cannot be used{shown}:", *(f"  {c}" for c in first)]))


def note(run_dir: Path, loader: str, found: Iterable[Complaint]) -> None:
    """Adds to the list in the run directory; `loader` says which one leaves the rows out."""
    lines = [orjson.dumps({"loader": loader, **c.place.plain(), "reason": c.reason + c.place.note}) for c in found]
    with (run_dir / LIST).open("ab") as file:  # one write: loaders in several processes share the file
        file.write(b"".join(line + b"\n" for line in lines))
