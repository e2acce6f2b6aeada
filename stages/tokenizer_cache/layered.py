"""Token ids in this process's memory, then in shared memory, then on disk."""

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
from stages.tokenizer_cache.arena_store import ArenaStore, room_problems
from stages.tokenizer_cache.caching import CachingTokenizer
from stages.tokenizer_cache.lmdb_store import LmdbStore, default_path, disk_problems
from stages.tokenizer_cache.lru import LeastRecentlyUsed
from stages.tokenizer_cache.store import TokenStore


@dataclass(slots=True, kw_only=True)
class LayeredTokenizerCacheConfig(TokenizerCacheConfig):
    """How much to keep in each layer; 0 leaves it out."""

    memory_bytes: int = setting(64 * 2**20, min=0, doc="bytes in this process's memory; 0: no such layer")
    shared_bytes: int = setting(256 * 2**20, min=0, doc="bytes of the arena, taken at the start; 0: no such layer")
    disk_bytes: int = setting(4 * 2**30, min=0, doc="bytes that the database may grow to on disk; 0: no such layer")
    path: str = setting("", doc="folder of the database; empty: tokens.lmdb in the user's cache folder")


@backend("tokenizer_cache", "layered")
class LayeredTokenizerCache(CachingTokenizer):
    """What a slower layer gives is kept in the faster ones; what is tokenised, in all."""

    cfg: LayeredTokenizerCacheConfig

    def __init__(self, cfg: LayeredTokenizerCacheConfig, model: Model):
        super().__init__(cfg, model)

    def check(self, facts: Facts) -> Iterable[Problem]:
        yield from super().check(facts)
        if self.cfg.shared_bytes:
            yield from room_problems(f"{facts.key}.shared_bytes", self.cfg.shared_bytes, facts)
        if self.cfg.disk_bytes:
            yield from disk_problems(facts.key, "disk_bytes", self.cfg.path, self.cfg.disk_bytes)

    def layers(self, ctx: Context) -> Iterator[TokenStore]:
        if self.cfg.memory_bytes:
            yield LeastRecentlyUsed(self.cfg.memory_bytes, "memory_bytes")
        if self.cfg.shared_bytes:
            yield ArenaStore(ctx.run_dir, self.cfg.shared_bytes, "shared_bytes")
        if self.cfg.disk_bytes:
            yield LmdbStore(default_path(self.cfg.path), self.cfg.disk_bytes, "disk_bytes")
