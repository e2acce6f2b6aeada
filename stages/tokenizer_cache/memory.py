"""Token ids in this process's memory, the least recently used dropped first."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from pipeline.context import Context
from pipeline.registry import backend
from pipeline.stage import setting
from stages.model import Model
from stages.records import PromptBatch, TokenBatch
from stages.tokenizer_cache import TokenizerCacheConfig
from stages.tokenizer_cache.keys import fingerprint, key
from stages.tokenizer_cache.tokens import ModelTokenizerCache

ENTRY_BYTES = 320
"""What an entry costs beside its ids: key, array header, list node and dict slot (CPython 3.11, NumPy 2.3)."""


@dataclass(slots=True, kw_only=True)
class MemoryTokenizerCacheConfig(TokenizerCacheConfig):
    """How much to keep."""

    max_bytes: int = setting(256 * 2**20, min=0, doc="bytes, counted with what an entry costs beside its ids")


class LeastRecentlyUsed:
    """Arrays by key within a number of bytes; every operation takes constant time."""

    def __init__(self, max_bytes: int):
        self.max_bytes = max_bytes
        self.bytes = self.evictions = 0
        self._entries: OrderedDict[bytes, np.ndarray] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: bytes) -> np.ndarray | None:
        ids = self._entries.get(key)
        if ids is not None:
            self._entries.move_to_end(key)
        return ids

    def put(self, key: bytes, ids: np.ndarray) -> None:
        """An array that is larger than the whole cache is not kept, and drives nothing out."""
        size = ids.nbytes + ENTRY_BYTES
        if size > self.max_bytes or key in self._entries:
            return
        self._entries[key] = ids
        self.bytes += size
        while self.bytes > self.max_bytes:
            _, old = self._entries.popitem(last=False)
            self.bytes -= old.nbytes + ENTRY_BYTES
            self.evictions += 1

    def clear(self) -> None:
        self._entries.clear()
        self.bytes = 0


@backend("tokenizer_cache", "memory")
class MemoryTokenizerCache(ModelTokenizerCache):
    """The misses of a batch are tokenised together, each distinct prompt once.

    A hit is a row that needed no tokenising, also because an equal row of the same batch did. No state: what
    is kept follows from the prompts, and a resumed run fills it again.
    """

    def __init__(self, cfg: MemoryTokenizerCacheConfig, model: Model):
        super().__init__(cfg, model)
        self._kept = LeastRecentlyUsed(cfg.max_bytes)

    def open(self, ctx: Context) -> None:
        super().open(ctx)
        self._tokenizer = self.model.tokenizer()
        self._fingerprint = fingerprint(self.model.path, self._tokenizer.chat_template, self.cfg)

    def run(self, prompts: PromptBatch) -> TokenBatch:
        keys = [key(self._fingerprint, row.tobytes()) for row in prompts.prompt.rows()]
        found = {k: ids for k in dict.fromkeys(keys) if (ids := self._kept.get(k)) is not None}
        misses: dict[bytes, int] = {}
        for i, k in enumerate(keys):
            if k not in found:
                misses.setdefault(k, i)
        before = self._kept.evictions
        for k, ids in zip(misses, self.tokenize(prompts, list(misses.values())), strict=True):
            found[k] = ids
            self._kept.put(k, ids)
        evicted = self._kept.evictions - before
        self.count(prompts, hits=len(keys) - len(misses), size=self._kept.bytes, evictions=evicted)
        return self.batch(prompts, [found[k] for k in keys])

    def close(self) -> None:
        self._kept.clear()
