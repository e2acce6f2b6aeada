"""The rows that can be used, in the order of the run: the others are passed over, and keep their place in it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from stages.loader.order import Order

_MOST = 4096
"""Positions looked at in one go where few rows can be used."""


class Walk:
    """So the order is a pure function of the files and the seed, whatever is already known of a row.

    `usable` says of rows, int64 [n], which can be used, bool [n]; None: all can. `too_few(count)` is the error of an
    epoch without so many.
    """

    def __init__(
        self, order: Order, usable: Callable[[np.ndarray], np.ndarray] | None, too_few: Callable[[int], Exception]
    ):
        self.order, self._usable, self._too_few = order, usable, too_few

    def take(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The first `count` usable rows from position `start` on, and their positions; int64 [count] each.

        The error of `too_few` if a whole epoch has not that many.
        """
        if self._usable is None:
            return self._rows(start, start + count)
        found, at, step, missing = list[tuple[np.ndarray, np.ndarray]](), start, count, count
        end = self.end(start)
        while missing:
            if at >= end:
                raise self._too_few(count)
            rows, positions = self._rows(at, min(at + step, end))
            kept = np.flatnonzero(self._usable(rows))[:missing]
            found.append((rows[kept], positions[kept]))
            missing, at = missing - len(kept), at + len(rows)
            step = max(missing, min(2 * step, _MOST) if 2 * len(kept) < step else 0)
        rows, positions = (np.concatenate(column) for column in zip(*found, strict=True))
        return rows, positions

    def end(self, start: int) -> int:
        """Where the first whole epoch from a position on ends: a batch that needs more would hold a row twice."""
        epochs = -(-start // self.order.rows) + 1
        return epochs * self.order.rows

    def _rows(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        positions = np.arange(start, stop, dtype=np.int64)
        return self.order.at(positions), positions
