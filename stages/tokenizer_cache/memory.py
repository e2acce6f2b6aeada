"""Token ids in this process's memory, the least recently used dropped first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.context import Context
from pipeline.registry import backend
from pipeline.stage import setting
from stages.model import Model
from stages.tokenizer_cache import TokenizerCacheConfig
from stages.tokenizer_cache.caching import CachingTokenizer
from stages.tokenizer_cache.lru import LeastRecentlyUsed
from stages.tokenizer_cache.store import TokenStore


@dataclass(slots=True, kw_only=True)
class MemoryTokenizerCacheConfig(TokenizerCacheConfig):
    """How much to keep."""

    max_bytes: int = setting(256 * 2**20, min=0, doc="bytes, counted with what an entry costs beside its ids")


@backend("tokenizer_cache", "memory")
class MemoryTokenizerCache(CachingTokenizer):
    """One layer, gone with the process."""

    cfg: MemoryTokenizerCacheConfig

    def __init__(self, cfg: MemoryTokenizerCacheConfig, model: Model):
        super().__init__(cfg, model)

    def layers(self, ctx: Context) -> Iterator[TokenStore]:
        yield LeastRecentlyUsed(self.cfg.max_bytes)
