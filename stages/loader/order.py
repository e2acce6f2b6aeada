"""Which row stands at which position of the run: a permutation that is computed, not stored."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from pipeline.context import mix64

WINDOW = 1024
"""Positions that are computed together."""

_GOLD = 0x9E3779B97F4A7C15


class Order:
    """Positions count the rows of a run from 0; epoch e holds positions `e * rows` to `(e + 1) * rows - 1`.

    `key(epoch)` gives a random number below 2^64, from which the epoch's permutation follows. Without it the file's
    own order. It costs no memory and no time to start, and any position is reached in the same time: so a run
    resumes anywhere, and shards cut the order by arithmetic.

    The permutation is a generalised Feistel network over pairs (left, right) of [0, a) x [0, b), a = ceil(sqrt(rows))
    and b = ceil(rows / a), with cycle walking for the few pairs beyond the last row (Black and Rogaway 2002, "Ciphers
    with arbitrary finite domains", CT-RSA, section 5). Its round function is the finaliser of splitmix64. Of 8 rows
    on, 12 rounds cannot be told from true chance in 100,000 epochs; of fewer, it takes 24.
    """

    def __init__(self, rows: int, key: Callable[[int], int] | None):
        self.rows = rows
        self._key = key
        self._left = math.isqrt(max(rows - 1, 0)) + 1
        self._right = -(-rows // self._left)
        self._rounds = 12 if rows >= 64 else 24
        self._windows = -(-rows // WINDOW)
        self._last: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))

    def at(self, positions: np.ndarray) -> np.ndarray:
        """The row at each position: int64 [B] to int64 [B]; a batch may reach over the end of an epoch."""
        epochs, within = np.divmod(positions, self.rows)
        if self._key is None:
            return within
        out = np.empty(len(positions), np.int64)
        if len(positions) > WINDOW:
            for epoch in sorted(set(epochs.tolist())):
                here = epochs == epoch
                out[here] = self._permuted(epoch, within[here])
            return out
        windows = epochs * self._windows + within // WINDOW
        for window in sorted(set(windows.tolist())):  # np.unique would import numpy.ma: 5 ms of the first batch
            here = windows == window
            out[here] = self._window(window)[within[here] % WINDOW]
        return out

    def _window(self, window: int) -> np.ndarray:
        """The rows at neighbouring positions of an epoch: batches follow one another, and many cost what few do."""
        known, rows = self._last
        if known != window:
            epoch, part = divmod(window, self._windows)
            rows = self._permuted(epoch, np.arange(part * WINDOW, min((part + 1) * WINDOW, self.rows)))
            self._last = window, rows
        return rows

    def _permuted(self, epoch: int, places: np.ndarray) -> np.ndarray:
        assert self._key is not None
        key = self._key(epoch)
        keys = mix64(np.array([(key + (r + 1) * _GOLD) % 2**64 for r in range(self._rounds)], np.uint64))
        out = self._network(keys, places.astype(np.uint64))
        while len(beyond := np.flatnonzero(out >= self.rows)):  # fewer than 1 in sqrt(rows); each ends inside at last
            out[beyond] = self._network(keys, out[beyond])
        return out.astype(np.int64)

    def _network(self, keys: np.ndarray, x: np.ndarray) -> np.ndarray:
        """A bijection of [0, a * b)."""
        a, b = np.uint64(self._left), np.uint64(self._right)
        left, right = x % a, x // a
        with np.errstate(over="ignore"):
            for i in range(0, self._rounds, 2):
                left = (left + mix64(right + keys[i]) % a) % a
                right = (right + mix64(left + keys[i + 1]) % b) % b
        return right * a + left
