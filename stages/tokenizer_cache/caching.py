"""A token cache of layers: what the first does not have the next is asked for, and what none has is tokenised."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from pipeline.context import Context
from stages.locks import tell_of_forks
from stages.memory import show_bytes
from stages.model import Model
from stages.records import KEY_BYTES, PromptBatch, TokenBatch
from stages.tokenizer_cache import TokenizerCacheConfig
from stages.tokenizer_cache.keys import fingerprint, keys
from stages.tokenizer_cache.sketch import DistinctPrompts
from stages.tokenizer_cache.store import Item, TokenStore
from stages.tokenizer_cache.tokens import ModelTokenizerCache

PENDING = 16
"""Batches that may wait to be written by a slow layer; the next one waits with them."""


FAR_TOO_LARGE = 8
"""A size that is so many times what was needed is worth a word."""


class CachingTokenizer(ModelTokenizerCache):
    """The misses of a batch are tokenised together, each distinct prompt once, by a thread of its own, so that two
    threads never use the tokenizer at the same time (huggingface/tokenizers issue 537).

    A hit is a row that needed no tokenising, also because an equal row of the same batch did. `bytes` is what all
    layers hold together, `evictions` what any of them let go. No state: what is kept follows from the prompts, and a
    resumed run fills it again.
    """

    def __init__(self, cfg: TokenizerCacheConfig, model: Model):
        super().__init__(cfg, model)
        self._layers: list[TokenStore] = []
        self._tokenizing: ThreadPoolExecutor | None = None
        self._writing: ThreadPoolExecutor | None = None
        self._pending: deque[Future[None]] = deque()
        self._evictions = self._rows = self._hits = 0
        self._seen = DistinctPrompts()

    @abstractmethod
    def layers(self, ctx: Context) -> Iterator[TokenStore]:
        """Opens them, the fastest first."""

    def open(self, ctx: Context) -> None:
        super().open(ctx)
        self._fingerprint = fingerprint(self.model, self.cfg)
        self._start_threads()
        tell_of_forks(self)
        for layer in self.layers(ctx):
            self._layers.append(layer)  # one by one: what is open is closed, also if the next one cannot be opened

    def _start_threads(self) -> None:
        self._tokenizing = ThreadPoolExecutor(1, "tokenize")
        self._writing = ThreadPoolExecutor(1, "token-writer")

    def after_fork(self) -> None:
        """The threads are the parent's, and what waits to be written is written there."""
        self._pending.clear()
        self._start_threads()

    def close(self) -> None:
        """What waits to be written is written before."""
        for executor in (self._tokenizing, self._writing):
            if executor:
                executor.shutdown(wait=True)
        for layer in self._layers:
            layer.close()

    # -- a batch ---------------------------------------------------------------------------------------------

    def run(self, prompts: PromptBatch) -> TokenBatch:
        row_keys = keys(self._fingerprint, prompts.prompt)
        places: dict[bytes, int] = {}
        for i, key in enumerate(row_keys):
            places.setdefault(key, i)
        found = self._look_up(list(places))
        missing = [(key, i) for key, i in places.items() if key not in found]
        found |= self._tokenize(prompts, missing)
        self._measure(prompts, found, len(missing))
        batch = self.batch(prompts, [found[key] for key in row_keys])
        return self._named(batch, row_keys, found)

    def _look_up(self, wanted: list[bytes]) -> dict[bytes, np.ndarray]:
        """What the layers have; what a slower one gave is kept in the faster ones as well."""
        found: dict[bytes, np.ndarray] = {}
        for depth, layer in enumerate(self._layers):
            if not wanted:
                break
            got = [(k, ids) for k, ids in zip(wanted, layer.get(wanted), strict=True) if ids is not None]
            if got:
                found.update(got)
                wanted = [k for k in wanted if k not in found]
                for faster in self._layers[:depth]:
                    faster.put(got)
        return found

    def _tokenize(self, prompts: PromptBatch, missing: Sequence[tuple[bytes, int]]) -> dict[bytes, np.ndarray]:
        if not missing:
            return {}
        assert self._tokenizing is not None, "the cache is not open"
        return self._tokenizing.submit(self._tokenize_now, prompts, missing).result()

    def _tokenize_now(self, prompts: PromptBatch, missing: Sequence[tuple[bytes, int]]) -> dict[bytes, np.ndarray]:
        """In the one thread that uses the tokenizer. Another caller's batch may just have brought some of these."""
        found = self._just_kept([key for key, _ in missing])
        rest = [(key, place) for key, place in missing if key not in found]
        new = list(zip((k for k, _ in rest), self.tokenize(prompts, [place for _, place in rest]), strict=True))
        if new:
            for layer in self._layers:
                if layer.slow:
                    self._put_later(layer, new)
                else:
                    layer.put(new)
        return found | dict(new)

    def _just_kept(self, wanted: list[bytes]) -> dict[bytes, np.ndarray]:
        for layer in self._layers[:1]:
            return {k: ids for k, ids in zip(wanted, layer.get(wanted), strict=True) if ids is not None}
        return {}

    def _put_later(self, layer: TokenStore, items: list[Item]) -> None:
        assert self._writing is not None, "the cache is not open"
        while self._pending and (self._pending[0].done() or len(self._pending) >= PENDING):
            self._pending.popleft().result()
        self._pending.append(self._writing.submit(layer.put, items))

    def _named(self, batch: TokenBatch, row_keys: Sequence[bytes], found: dict[bytes, np.ndarray]) -> TokenBatch:
        """With the keys of the rows that other processes of the run can find by them."""
        items = list(found.items())
        named = {
            key for layer in self._layers for (key, _), yes in zip(items, layer.published(items), strict=True) if yes
        }
        if not named:
            return batch
        nowhere = bytes(KEY_BYTES)
        shown = b"".join(key if key in named else nowhere for key in row_keys)
        return replace(batch, prompt_key=np.frombuffer(shown, np.uint8).reshape(len(row_keys), KEY_BYTES))

    # -- what is told ----------------------------------------------------------------------------------------

    def _measure(self, prompts: PromptBatch, found: Mapping[bytes, np.ndarray], tokenized: int) -> None:
        evictions = sum(layer.evictions for layer in self._layers)
        hits = len(prompts) - tokenized
        size = sum(layer.bytes for layer in self._layers)
        self.count(prompts, hits=hits, size=size, evictions=evictions - self._evictions)
        self._evictions = evictions
        self._rows, self._hits = self._rows + len(prompts), self._hits + hits
        self._seen.add((key, len(ids)) for key, ids in found.items())

    def advice(self) -> list[str]:
        """What was seen, evaluation included, and which size would have held it."""
        distinct = self._seen.count()
        if not distinct:
            return []
        what = f"{distinct:,} distinct prompts in {self._rows:,} rows, hit ratio {self._hits / self._rows:.3f}"
        return [what, *(self._advice(layer, distinct) for layer in self._layers)]

    def _advice(self, layer: TokenStore, distinct: int) -> str:
        need = layer.room(distinct, round(distinct * self._seen.mean_tokens()))
        need = max(2**20, 1 << (need - 1).bit_length())
        name, now = f"{self.ctx.node}.{layer.setting}", show_bytes(layer.max_bytes)
        if need > layer.max_bytes:
            return f"{name}={need} ({show_bytes(need)}) would have held all of them; it was {now}"
        if need * FAR_TOO_LARGE <= layer.max_bytes:
            return f"{name}={need} ({show_bytes(need)}) would have been enough; it was {now}"
        return f"{name} was enough: {now}"
