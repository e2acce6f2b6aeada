"""Role `tokenizer_cache`: prompts to token ids, each distinct prompt once."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from pipeline.stage import Stage, setting
from stages.records import PromptBatch, TokenBatch


@dataclass(slots=True, kw_only=True)
class TokenizerCacheConfig:
    """Settings of every token cache."""

    max_prompt_tokens: int = setting(0, min=0, doc="longer prompts are cut or refused; 0: no limit")
    truncation: str = setting("error", doc="error, left (keep the end) or right (keep the start)")


class TokenizerCache(Stage):
    """What a hit returns equals what tokenising again would return, to the last id. All columns of the prompts
    are carried over. A prompt without tokens, or a longer one under `truncation=error`, is an error that names
    its row and both lengths. No state. Fact: `max_prompt_tokens`, if there is a limit.

    Metrics, for `purpose == "train"` only: `tokenizer_cache/hit_ratio` (share of rows that needed no
    tokenising), `tokenizer_cache/bytes`, `tokenizer_cache/evictions`.
    """

    role: ClassVar[str] = "tokenizer_cache"
    grain = "row"

    @abstractmethod
    def run(self, prompts: PromptBatch) -> TokenBatch: ...
