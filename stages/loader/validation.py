"""Which rows of a file cannot be used: found once for each version of it, by several processes if it is large.

judge(source, rows, key, how, cores, name)   the verdict on the first `rows` rows of a file
"""

from __future__ import annotations

import logging
import selectors
from collections.abc import Callable, Iterator

import numpy as np

from pipeline.process import Child
from stages.loader.rows import BadRow
from stages.loader.sidecar import Verdict
from stages.loader.source import Source

log = logging.getLogger("headrace")

HOW = ("full", "sample", "off")
SAMPLE = 1000
"""Rows that `sample` looks at, spread evenly over the file."""

_LARGE = 1 << 25
"""Bytes of a file from which on other processes are worth their start."""

_PART = 8192
"""Rows a process is given in one go."""

_FEW = 256
"""Rows that are held at a time: the memory of one handful serves the next."""


def judge(source: Source, rows: int, key: bytes, how: str, cores: int, name: str) -> Verdict:
    """On the first `rows` rows. `key` names the settings that decide, `name` the processes that may be started."""
    if how == "off" or not rows:
        return Verdict(0, np.empty(0, np.int64))
    known = source.known(key, rows)
    if known is None and how == "sample":
        some = np.unique(np.linspace(0, rows - 1, min(rows, SAMPLE)).astype(np.int64))
        return Verdict(len(some), _bad_of(source, some))
    if known is None:
        with source.alone():
            known = source.known(key, rows) or _look_at_all(source, rows, cores, name)
            source.keep(key, known)
    return Verdict(rows, known.bad[known.bad < rows])


def _look_at_all(source: Source, rows: int, cores: int, name: str) -> Verdict:
    parts = [np.arange(i, min(i + _PART, rows)) for i in range(0, rows, _PART)]
    make = source.recipe()
    if make and cores > 1 and len(parts) > 1 and source.bytes >= _LARGE:
        log.info("looking at all %d rows of %s, in %d processes", rows, source.path, min(cores, len(parts)))
        found = _in_processes(make, parts, cores, name)
    else:
        found = [_bad_of(source, part) for part in parts]
    source.check()
    return Verdict(rows, np.sort(np.concatenate(found)))


def _bad_of(source: Source, positions: np.ndarray) -> np.ndarray:
    handfuls = (positions[i : i + _FEW].tolist() for i in range(0, len(positions), _FEW))
    return positions[[isinstance(row, BadRow) for handful in handfuls for row in source.rows(handful)]]


class _Judge:
    """In a process of its own."""

    def __init__(self, make: Callable[[], Source]):
        self._source = make()

    def bad_of(self, positions: np.ndarray) -> np.ndarray:
        return _bad_of(self._source, positions)


def _in_processes(make: Callable[[], Source], parts: list[np.ndarray], cores: int, name: str) -> list[np.ndarray]:
    children = [Child(_Judge, make, name=f"{name} validation {i}") for i in range(min(cores, len(parts)))]
    try:
        return list(_spread(children, parts))
    finally:
        for child in children:
            child.kill()


def _spread(children: list[Child], parts: list[np.ndarray]) -> Iterator[np.ndarray]:
    """Each child gets the next part when it has answered. An error in one of them is raised here."""
    waiting = iter(parts)
    with selectors.DefaultSelector() as ready:
        for child in children:
            ready.register(child, selectors.EVENT_READ, [child, False])
        while ready.get_map():
            for event, _ in ready.select():
                child, asked = event.data
                _, found = child.take(None)
                if asked:
                    yield found
                part = next(waiting, None)
                if part is None:
                    ready.unregister(child)
                else:
                    event.data[1] = True
                    child.post("bad_of", part)
