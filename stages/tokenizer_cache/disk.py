"""Token ids on disk, from run to run; the most recent ones in this process's memory too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pipeline.context import Context
from pipeline.errors import Problem
from pipeline.plan import Facts
from pipeline.registry import backend
from pipeline.stage import setting
from stages.model import Model
from stages.tokenizer_cache import TokenizerCacheConfig
from stages.tokenizer_cache.caching import CachingTokenizer
from stages.tokenizer_cache.lmdb_store import SMALLEST, LmdbStore, default_path, disk_problems
from stages.tokenizer_cache.lru import LeastRecentlyUsed
from stages.tokenizer_cache.store import TokenStore


@dataclass(slots=True, kw_only=True)
class DiskTokenizerCacheConfig(TokenizerCacheConfig):
    """How much to keep, and where."""

    path: str = setting("", doc="folder of the database; empty: tokens.lmdb in the user's cache folder")
    max_bytes: int = setting(4 * 2**30, min=SMALLEST, doc="bytes that the database may grow to on disk")
    memory_bytes: int = setting(64 * 2**20, min=0, doc="bytes in this process's memory, before the disk is asked")


@backend("tokenizer_cache", "disk")
class DiskTokenizerCache(CachingTokenizer):
    """A second run of the same job tokenises nothing. Runs may share a folder, also at the same time."""

    cfg: DiskTokenizerCacheConfig

    def __init__(self, cfg: DiskTokenizerCacheConfig, model: Model):
        super().__init__(cfg, model)

    def check(self, facts: Facts) -> Iterable[Problem]:
        yield from super().check(facts)
        yield from disk_problems(facts.key, "max_bytes", self.cfg.path, self.cfg.max_bytes)

    def layers(self, ctx: Context) -> Iterator[TokenStore]:
        yield LeastRecentlyUsed(self.cfg.memory_bytes, "memory_bytes")
        yield LmdbStore(default_path(self.cfg.path), self.cfg.max_bytes)
