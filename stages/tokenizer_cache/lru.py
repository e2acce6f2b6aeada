"""Token ids in this process's memory, the least recently used dropped first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock

import numpy as np

from stages.locks import tell_of_forks
from stages.tokenizer_cache.store import Item, TokenStore

ENTRY_BYTES = 320
"""What an entry costs beside its ids: key, array header, list node and dict slot (CPython 3.11, NumPy 2.3)."""


class LeastRecentlyUsed(TokenStore):
    """Arrays by key within a number of bytes; every operation takes constant time."""

    def __init__(self, max_bytes: int, setting: str = "max_bytes"):
        self.max_bytes, self.setting = max_bytes, setting
        self.evictions = self._bytes = 0
        self._entries: OrderedDict[bytes, np.ndarray] = OrderedDict()
        self._lock = Lock()
        tell_of_forks(self)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def bytes(self) -> int:
        return self._bytes

    def get(self, keys: Sequence[bytes]) -> list[np.ndarray | None]:
        find, used = self._entries.get, self._entries.move_to_end
        found: list[np.ndarray | None] = []
        with self._lock:
            for key in keys:
                if (ids := find(key)) is not None:
                    used(key)
                found.append(ids)
        return found

    def put(self, items: Sequence[Item]) -> None:
        """An array that is larger than the whole cache is not kept, and drives nothing out. One that may be written to
        is copied."""
        with self._lock:
            for key, ids in items:
                self._put(key, frozen(ids) if ids.flags.writeable else ids)

    def _put(self, key: bytes, ids: np.ndarray) -> None:
        size = ids.nbytes + ENTRY_BYTES
        if (old := self._entries.pop(key, None)) is not None:
            self._bytes -= old.nbytes + ENTRY_BYTES
        if size > self.max_bytes:
            return
        self._entries[key] = ids
        self._bytes += size
        while self._bytes > self.max_bytes:
            _, dropped = self._entries.popitem(last=False)
            self._bytes -= dropped.nbytes + ENTRY_BYTES
            self.evictions += 1

    def after_fork(self) -> None:
        self._lock = Lock()  # the thread that held it is not there

    def room(self, entries: int, tokens: int) -> int:
        return entries * ENTRY_BYTES + 4 * tokens

    def close(self) -> None:
        with self._lock:
            self._entries.clear()
            self._bytes = self.max_bytes = 0


def frozen(ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """A copy, int32, that cannot be written to."""
    out = np.array(ids, np.int32)
    out.flags.writeable = False
    return out
