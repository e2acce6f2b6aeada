"""One layer of a token cache: arrays of ids by key, within a number of bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

Item = tuple[bytes, np.ndarray]


class TokenStore(ABC):
    """Keys are 16 bytes (see keys.py), ids int32 [L]. A miss is always allowed: a store may forget, or be unable to
    keep, but never gives ids that were not put under that key. Safe to use from several threads, and after a fork.

    `bytes`: what it holds now, with its own overhead; `evictions`: entries that this process dropped for want of room.
    """

    slow: ClassVar[bool] = False
    """Whether what is put may be written later, by another thread."""
    setting: str
    """The setting that bounds it, for advice."""
    max_bytes: int
    evictions: int

    @property
    @abstractmethod
    def bytes(self) -> int: ...

    @abstractmethod
    def get(self, keys: Sequence[bytes]) -> list[np.ndarray | None]:
        """For each key its ids, read-only, or None."""

    @abstractmethod
    def put(self, items: Sequence[Item]) -> None:
        """Keep these, in place of what the keys named before; what is larger than the whole store is not kept."""

    @abstractmethod
    def room(self, entries: int, tokens: int) -> int:
        """The `max_bytes` at which so many entries with so many ids altogether stay."""

    def published(self, items: Sequence[Item]) -> list[bool]:
        """Which of these other processes of the run find by their key in its arena; puts there what is not there."""
        return [False] * len(items)

    @abstractmethod
    def close(self) -> None:
        """Safe to call twice; every look-up is a miss from then on."""
