"""No cache: every prompt is tokenised each time it comes. The reference that other backends must equal."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.registry import backend
from stages.model import Model
from stages.records import PromptBatch, TokenBatch
from stages.tokenizer_cache import TokenizerCacheConfig
from stages.tokenizer_cache.tokens import ModelTokenizerCache


@dataclass(slots=True, kw_only=True)
class NoTokenizerCacheConfig(TokenizerCacheConfig):
    """Nothing of its own."""


@backend("tokenizer_cache", "none")
class NoTokenizerCache(ModelTokenizerCache):
    """Keeps nothing, so its hit ratio is 0."""

    def __init__(self, cfg: NoTokenizerCacheConfig, model: Model):
        super().__init__(cfg, model)

    def run(self, prompts: PromptBatch) -> TokenBatch:
        ids = self.tokenize(prompts, range(len(prompts)))
        self.count(prompts, hits=0, size=0, evictions=0)
        return self.batch(prompts, ids)
