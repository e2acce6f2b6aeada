"""From the rows of a prompt batch to token ids: what every token cache does, however it remembers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.errors import Problem, near
from pipeline.plan import Facts
from pipeline.records import Ragged
from stages.model import Model
from stages.records import PromptBatch, TokenBatch, no_keys
from stages.tokenizer_cache import TokenizerCache, TokenizerCacheConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TRUNCATIONS = ("error", "left", "right")


class ModelTokenizerCache(TokenizerCache):
    """Ids come from the model's tokenizer, which is loaded when the first prompt needs it."""

    def __init__(self, cfg: TokenizerCacheConfig, model: Model):
        self.cfg, self.model = cfg, model
        self._tokenizer: PreTrainedTokenizerBase | None = None

    def facts(self) -> Mapping[str, Any]:
        return {"max_prompt_tokens": self.cfg.max_prompt_tokens} if self.cfg.max_prompt_tokens else {}

    def check(self, facts: Facts) -> Iterable[Problem]:
        cfg, known = self.cfg, facts.values
        if cfg.truncation not in TRUNCATIONS:
            hint = near(cfg.truncation, TRUNCATIONS)
            yield Problem(where=f"{facts.key}.truncation", what=f"no truncation '{cfg.truncation}'", hint=hint)
        if cfg.max_prompt_tokens >= known.get("context_length", cfg.max_prompt_tokens + 1):
            what = f"{cfg.max_prompt_tokens} leaves no room for a response in a context of {known['context_length']}"
            yield Problem(where=f"{facts.key}.max_prompt_tokens", what=what)
        yield from self._two_limits(facts)
        if known.get("chat_prompts") and not known.get("chat_template", True):
            yield Problem(where=facts.key, what="prompts are chats, and the model's tokenizer has no chat template")

    def _two_limits(self, facts: Facts) -> Iterable[Problem]:
        """The loader's limit leaves longer prompts out, this one refuses or cuts them."""
        own, loaders = self.cfg.max_prompt_tokens, facts.values.get("loader_max_prompt_tokens", 0)
        if not own or not loaders or own == loaders:
            return
        where, which = f"{facts.key}.max_prompt_tokens", f"the loader's limit, {loaders}"
        if own > loaders:
            what = f"{own} is more than {which}, so no training prompt comes near it"
            yield Problem(where=where, what=what, hint=f"set one of them, or both to {loaders}", level="warning")
        elif self.cfg.truncation == "error":
            what = f"{own} is less than {which}: a prompt of {own + 1} to {loaders} tokens would end the run"
            hint = f"set one of them, both to {own}, or {facts.key}.truncation to left or right"
            yield Problem(where=where, what=what, hint=hint)
        else:
            what = f"{own} is less than {which}: prompts of {own + 1} to {loaders} tokens are cut"
            yield Problem(where=where, what=what, hint=f"set both to {own} to leave them out", level="warning")

    def tokenize(self, prompts: PromptBatch, places: Sequence[int]) -> list[np.ndarray]:
        """Ids int32, read-only, of the rows at `places`, cut as configured, by one call of `model.render`.

        ValueError names the rows that are too long under `truncation=error`, or that have no tokens at all.
        """
        if not places:
            return []
        if self._tokenizer is None:
            self._tokenizer = self.model.tokenizer()
        rows = self.model.render(self._tokenizer, [prompts.prompt.json(i) for i in places])
        row_ids = prompts.row_id[list(places)].tolist()
        if empty := [r for r, ids in zip(row_ids, rows, strict=True) if not ids]:
            raise ValueError(f"row {empty[0]} has no tokens{_more(empty)}; a response must follow something")
        return [_frozen(ids) for ids in self._cut(row_ids, rows)]

    def _cut(self, row_ids: Sequence[int], rows: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        limit = self.cfg.max_prompt_tokens
        if not limit:
            return list(rows)
        if self.cfg.truncation == "error":
            long = [(r, len(ids)) for r, ids in zip(row_ids, rows, strict=True) if len(ids) > limit]
            if long:
                where = f"{self.ctx.node}.max_prompt_tokens"
                raise ValueError(
                    f"row {long[0][0]} has {long[0][1]} tokens, {where} is {limit}{_more(long)}; "
                    f"raise it, drop the row, or set {self.ctx.node}.truncation to left or right"
                )
        return [ids[-limit:] if self.cfg.truncation == "left" else ids[:limit] for ids in rows]

    def batch(self, prompts: PromptBatch, ids: Sequence[np.ndarray]) -> TokenBatch:
        """The prompts' columns with the ids of each row."""
        carried = {f.name: getattr(prompts, f.name) for f in fields(PromptBatch)}
        tokens = Ragged.of(ids, np.int32)
        tokens.values.flags.writeable = False
        return TokenBatch(**carried, prompt_ids=tokens, prompt_key=no_keys(len(prompts)))

    def count(self, prompts: PromptBatch, *, hits: int, size: int, evictions: int) -> None:
        """The metrics of one call; evaluation is not counted."""
        if prompts.purpose == "train":
            self.ctx.meter.add("tokenizer_cache/hit_ratio", (hits, len(prompts)), "ratio")
            self.ctx.meter.add("tokenizer_cache/bytes", size, "last")
            self.ctx.meter.add("tokenizer_cache/evictions", evictions, "sum")


def _frozen(ids: Sequence[int]) -> np.ndarray:
    out = np.array(ids, np.int32)
    out.flags.writeable = False
    return out


def _more(bad: Sequence[Any]) -> str:
    return f" (and {len(bad) - 1} more rows)" if len(bad) > 1 else ""
