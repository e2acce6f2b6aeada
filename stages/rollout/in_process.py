"""What rollouts share that compute with a transformers model of their own in the process of the stage."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from pipeline.context import Context
from pipeline.errors import Problem
from pipeline.progress import alive
from pipeline.records import Snapshot
from stages import footprint
from stages.model import Model, context_length
from stages.records import Finish, RolloutBatch, TokenBatch
from stages.rollout import Rollout, RolloutConfig
from stages.rollout.assembly import (
    Draft,
    SampleRows,
    Settings,
    assemble,
    expand,
    measure,
    require_room,
    resolve,
    settings_problems,
    sizes,
    without_prompt,
)
from stages.sampler import Sampler
from stages.weights import load_into

if TYPE_CHECKING:
    from pipeline.plan import Facts

_OPEN = -1


class Responses:
    """R responses of at most T tokens that grow token by token, and what ended each.

    `ids` int32 [R, T], `log_probs` float32 [R, T], `length` int64 [R], `finish` int8 [R] (Finish, or -1 while the
    response is open).
    """

    def __init__(self, rows: int, limit: int, end_ids: tuple[int, ...]):
        self.limit, self.end_ids = limit, np.asarray(end_ids, np.int64)
        self.ids = np.zeros((rows, limit), np.int32)
        self.log_probs = np.zeros((rows, limit), np.float32)
        self.length = np.zeros(rows, np.int64)
        self.finish = np.full(rows, _OPEN, np.int8)

    def is_open(self, rows: np.ndarray) -> np.ndarray:
        return self.finish[rows] == _OPEN

    def add(self, rows: np.ndarray, ids: np.ndarray, log_probs: np.ndarray) -> None:
        """One more token for each of `rows` that is open; id -1 says that none could be drawn."""
        alive()
        drawn = self.is_open(rows) & (ids >= 0)
        self.finish[rows[self.is_open(rows) & (ids < 0)]] = Finish.FAILED
        rows, ids, log_probs = rows[drawn], ids[drawn], log_probs[drawn]
        at = self.length[rows]
        self.ids[rows, at], self.log_probs[rows, at] = ids, log_probs
        self.length[rows] += 1
        self.finish[rows[at + 1 == self.limit]] = Finish.LENGTH
        self.finish[rows[np.isin(ids, self.end_ids)]] = Finish.STOP  # also where it is the last that fits

    def draft(self, row: int, place: int, version: int) -> Draft:
        """Response `row`, which is row `place` of the batch."""
        size, finish = int(self.length[row]), Finish(self.finish[row])
        reason = f"the policy gave no finite logits for token {size}" if finish is Finish.FAILED else ""
        return Draft(
            row=place,
            ids=self.ids[row, :size],
            log_probs=self.log_probs[row, :size],
            finish=finish,
            version_min=version,
            version_max=version,
            reason=reason,
        )


class InProcessRollout(Rollout):
    """Opens the model, takes weights, cuts a batch into parts of `batch_rows` rows; a backend generates."""

    needs: ClassVar[frozenset[str]] = frozenset({"logits_sampler"})
    requires: ClassVar[tuple[str, ...]] = ("torch", "transformers")

    def __init__(self, cfg: RolloutConfig, model: Model, sampler: Sampler, batch_rows: int):
        self.cfg, self.model, self.sampler, self.batch_rows = cfg, model, sampler, batch_rows
        self.module: Any = None
        self.version = 0

    def facts(self) -> Mapping[str, Any]:
        return {"samples_per_prompt": self.cfg.n, "max_new_tokens": self.cfg.max_new_tokens}

    def check(self, facts: Facts) -> Iterable[Problem]:
        return settings_problems(self.cfg, self.model, facts)

    def sizes(self, facts: Facts) -> dict[str, int | str]:
        return sizes(self.cfg, facts)

    def memory(self, facts: Facts) -> dict[str, int]:
        """Weights in the model's dtype; keys and values of `cached_tokens`; activations, which are those of the
        prompts that go through the model at once, or of choosing a token: the logits of all rows, in float32 and as
        three arrays of float64. Where no prompt length is set, prompts are not in it.
        """
        shape, size = footprint.shape_of(self.model), footprint.itemsize(self.model)
        if shape is None:
            return {}
        prompts = facts.values.get("prompts_per_step")
        rows = min(self.batch_rows, prompts * self.cfg.n) if prompts else self.batch_rows
        cached, prefilled = self.tokens_held(rows, facts.values.get("max_prompt_tokens", 0))
        choosing = rows * shape.vocab * (size + footprint.FLOAT32 + 3 * 8)
        return {
            "weights": size * shape.parameters,
            "kv_cache": footprint.keys_and_values(shape, cached, size),
            "activations": max(footprint.inference(shape, prefilled, size), choosing),
        }

    def tokens_held(self, rows: int, prompt: int) -> tuple[int, int]:
        """Of `rows` rows with prompts of `prompt` tokens (0: not known): how many tokens' keys and values are cached,
        and how many tokens go through the model at once. Here each sample has its prompt to itself, and all go
        through together."""
        return rows * (prompt + self.cfg.max_new_tokens), rows * prompt

    def open(self, ctx: Context) -> None:
        super().open(ctx)
        import torch

        torch.set_num_threads(ctx.threads)
        self.tokenizer = self.model.tokenizer()
        self.end_ids = self.model.end_ids()
        self.module = self.model.load(ctx.device)
        self.positions = context_length(self.module.config.to_dict())

    def close(self) -> None:
        self.module = None

    def receive(self, snapshot: Snapshot) -> None:
        load_into(self.module, snapshot)
        self.version = snapshot.version

    def run(self, tokens: TokenBatch) -> RolloutBatch:
        started = time.perf_counter()
        settings = resolve(self.cfg, tokens.sampling)
        require_room(tokens, settings, self.positions)
        rows = expand(tokens, settings.n)
        drafts = list(self._drafts(tokens, rows, settings))
        batch = assemble(tokens, rows, drafts, settings, self.tokenizer)
        measure(self.ctx.meter, batch, time.perf_counter() - started)
        return batch

    def _drafts(self, tokens: TokenBatch, rows: SampleRows, settings: Settings) -> Iterator[Draft]:
        seeds = rows.seeds(self.ctx, tokens)
        yield from without_prompt(tokens, rows, self.version)
        whole = np.flatnonzero(tokens.prompt_ids.lengths[rows.prompt])
        for part in _cut(whole, self.batch_rows):
            prompts, prompt_of_row = _distinct(tokens, rows.prompt[part])
            made = Responses(len(part), settings.max_new_tokens, self.end_ids)
            self.generate(prompts, prompt_of_row, seeds[part], settings, made)
            for i, row in enumerate(part.tolist()):
                yield made.draft(i, row, self.version)

    @abstractmethod
    def generate(
        self,
        prompts: list[np.ndarray],
        prompt_of_row: np.ndarray,
        seeds: np.ndarray,
        settings: Settings,
        out: Responses,
    ) -> None:
        """Fill `out` until none of its R rows is open.

        `prompts`: token ids int32 of G distinct prompts, none empty. `prompt_of_row` int64 [R], `seeds` uint64 [R].
        """


def _cut(rows: np.ndarray, size: int) -> list[np.ndarray]:
    return [rows[i : i + size] for i in range(0, len(rows), size)]


def _distinct(tokens: TokenBatch, prompt: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
    """The different prompts among those of the rows, by their token ids, and which of them each row has."""
    found: dict[bytes, int] = {}
    prompts: list[np.ndarray] = []
    number: dict[int, int] = {}
    for position in dict.fromkeys(prompt.tolist()):
        ids = tokens.prompt_ids[position]
        number[position] = found.setdefault(ids.tobytes(), len(prompts))
        if number[position] == len(prompts):
            prompts.append(ids)
    return prompts, np.array([number[p] for p in prompt.tolist()], np.int64)
