"""Token ids of prompts by the tokenizer of a reward's own model: each distinct prompt is tokenised once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from xxhash import xxh3_128_digest

from pipeline.records import Ragged
from stages.arena import Arena
from stages.model import Model
from stages.model.fingerprint import digest

MAX_BYTES = 256 * 2**20
"""What is kept in this process where the run has no arena."""

ENTRY_BYTES = 320
"""What an entry costs beside its ids."""


class PromptIds:
    """Kept in the run's arena, where other processes with the same model find them, or else in this process.

    Nobody else's keys are the same: they cover all that decides the ids, and what they are for.
    """

    def __init__(self, model: Model, run_dir: Path):
        self._model, self._run_dir = model, run_dir
        self._base = digest([b"reward model", model.fingerprint()])
        self._own = _Recent(MAX_BYTES)

    def of(self, prompts: Ragged) -> list[np.ndarray]:
        """int32 ids of each prompt (JSON: a text or a chat). Those that are nowhere are tokenised in one call."""
        keys = [xxh3_128_digest(self._base + prompt.tobytes()) for prompt in prompts.rows()]
        place = {key: i for i, key in enumerate(keys)}
        store = Arena.of_run(self._run_dir, write=True) or self._own
        found = {k: ids for k, ids in zip(place, store.get_many(list(place)), strict=True) if ids is not None}
        if missing := [key for key in place if key not in found]:
            made = self._model.render(self._model.tokenizer(), [prompts.json(place[k]) for k in missing])
            new = {k: np.array(ids, np.int32) for k, ids in zip(missing, made, strict=True)}
            store.put_many(list(new.items()))
            found |= new
        return [found[k] for k in keys]


class _Recent:
    """The ids used last, within a number of bytes; the methods are those of an arena."""

    def __init__(self, max_bytes: int):
        self._left = max_bytes
        self._kept: OrderedDict[bytes, np.ndarray] = OrderedDict()

    def get_many(self, keys: Iterable[bytes]) -> list[np.ndarray | None]:
        found = [self._kept.get(key) for key in keys]
        for key in keys:
            if key in self._kept:
                self._kept.move_to_end(key)
        return found

    def put_many(self, items: Sequence[tuple[bytes, np.ndarray]]) -> None:
        for key, ids in items:
            self._kept[key] = ids
            self._left -= ids.nbytes + ENTRY_BYTES
        while self._left < 0 and self._kept:
            _, old = self._kept.popitem(last=False)
            self._left += old.nbytes + ENTRY_BYTES
