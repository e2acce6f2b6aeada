"""Token ids in shared memory, read by every process of the run; the most recent ones in this process's memory too."""

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
from stages.tokenizer_cache.lru import LeastRecentlyUsed
from stages.tokenizer_cache.store import TokenStore


@dataclass(slots=True, kw_only=True)
class SharedTokenizerCacheConfig(TokenizerCacheConfig):
    """How much to keep, and where."""

    max_bytes: int = setting(256 * 2**20, min=2**20, doc="bytes of the arena, taken at the start, index included")
    memory_bytes: int = setting(64 * 2**20, min=0, doc="bytes in this process's memory, before the arena is asked")


@backend("tokenizer_cache", "shared")
class SharedTokenizerCache(CachingTokenizer):
    """Rewards, rollouts and all other processes of the run read the ids from the arena, by `prompt_key`."""

    cfg: SharedTokenizerCacheConfig

    def __init__(self, cfg: SharedTokenizerCacheConfig, model: Model):
        super().__init__(cfg, model)

    def check(self, facts: Facts) -> Iterable[Problem]:
        yield from super().check(facts)
        yield from room_problems(f"{facts.key}.max_bytes", self.cfg.max_bytes, facts)

    def layers(self, ctx: Context) -> Iterator[TokenStore]:
        yield LeastRecentlyUsed(self.cfg.memory_bytes, "memory_bytes")
        yield ArenaStore(ctx.run_dir, self.cfg.max_bytes)
