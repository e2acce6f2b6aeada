"""Token ids in the run's arena, where every process of the run finds them by their key."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from pipeline.config import Mode
from pipeline.errors import Problem
from pipeline.plan import Facts
from stages.arena import Arena, entry_bytes
from stages.memory import free_memory, show_bytes
from stages.tokenizer_cache.store import Item, TokenStore


class ArenaStore(TokenStore):
    """The arena of the run, made and published here unless another token cache of the run has done so."""

    def __init__(self, run_dir: Path, max_bytes: int, setting: str = "max_bytes"):
        self.setting = setting
        self._own: Arena | None = None
        self._arena = Arena.of_run(run_dir, write=True)
        if self._arena is None:
            self._arena = self._own = Arena.create(max_bytes)
            self._own.publish(run_dir)
        self.max_bytes = self._arena.size
        self._before = self._arena.evictions

    @property
    def bytes(self) -> int:
        return self._arena.bytes if self._arena else 0

    @property
    def evictions(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._arena.evictions - self._before if self._arena else 0

    def get(self, keys: Sequence[bytes]) -> list[np.ndarray | None]:
        arena = self._arena
        return arena.get_many(keys) if arena else [None] * len(keys)

    def put(self, items: Sequence[Item]) -> None:
        if arena := self._arena:
            arena.put_many(items)

    def published(self, items: Sequence[Item]) -> list[bool]:
        arena = self._arena
        if arena is None:
            return [False] * len(items)
        keys = [key for key, _ in items]
        there = arena.has_many(keys)
        if lacking := [item for item, has in zip(items, there, strict=True) if not has]:
            arena.put_many(lacking)
            there = arena.has_many(keys)
        return there

    def room(self, entries: int, tokens: int) -> int:
        """An eighth is index, of 16 bytes a slot, which should be half full at most; and entries are written
        again when the ring is more than seven eighths full."""
        ring = entries * entry_bytes(0) + 4 * tokens
        return max(ring * 8 // 7 * 8 // 7, entries * 16 * 8 * 2)

    def close(self) -> None:
        own, self._own, self._arena = self._own, None, None
        if own:
            own.close()


def room_problems(where: str, max_bytes: int, facts: Facts) -> Iterable[Problem]:
    """The arena's memory must be there before training; then none of it can be missing later."""
    if max_bytes > (free := free_memory()):
        what = f"an arena of {show_bytes(max_bytes)} is wanted, and {show_bytes(free)} of memory are free"
        hint = f"set it to {free // 2 >> 20 << 20} or less, or free memory (the limit of a control group counts too)"
        level = "warning" if facts.root.mode is Mode.plan else "error"
        yield Problem(where=where, what=what, hint=hint, level=level)
