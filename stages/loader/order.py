"""Which row of the file stands at which position of the run."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


class Order:
    """Positions count the prompts of a run from 0; epoch e holds positions `e * rows` to `(e + 1) * rows - 1`.

    `keys(epoch)` gives one random number a row, uint64 [rows]: the epoch's permutation sorts by them. So it
    depends on these numbers alone, not on the version of a generator. Without `keys` the file's own order.
    """

    def __init__(self, rows: int, keys: Callable[[int], np.ndarray] | None):
        self.rows = rows
        self._keys = keys
        self._epoch, self._permutation = -1, np.empty(0, np.int64)

    def at(self, positions: np.ndarray) -> np.ndarray:
        """The row at each position: int64 [B] to int64 [B]; a batch may reach over the end of an epoch."""
        epochs, within = np.divmod(positions, self.rows)
        out = np.empty(len(positions), np.int64)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            out[here] = self._permutation_of(epoch)[within[here]]
        return out

    def _permutation_of(self, epoch: int) -> np.ndarray:
        if self._keys is None:
            return np.arange(self.rows)
        if epoch != self._epoch:
            self._epoch, self._permutation = epoch, np.argsort(self._keys(epoch), kind="stable")
        return self._permutation
