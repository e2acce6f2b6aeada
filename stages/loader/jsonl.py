"""What loaders of a JSONL file share: everything but how a row is reached."""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.context import Context
from pipeline.errors import Problem, near
from pipeline.plan import Facts
from pipeline.records import Ragged, offsets_of
from stages.loader import Loader, LoaderConfig
from stages.loader.lines import refusal
from stages.loader.order import Order
from stages.loader.rows import DataError, Row, RowParser
from stages.paths import resolve
from stages.records import PromptBatch, Sampling, temperature_problems


class JsonlLoader(Loader):
    """A backend says how to open the file (`read`) and how to reach a row (`row`)."""

    def __init__(self, cfg: LoaderConfig):
        self.cfg = cfg
        self._calls = 0

    @abstractmethod
    def read(self, path: Path, parse: RowParser, limit: int) -> int:
        """Open the file, look at its first `limit` rows (0: all) and return their number; DataError if one is bad."""

    @abstractmethod
    def row(self, index: int) -> Row:
        """A row by its place among the rows of the file."""

    def facts(self) -> Mapping[str, Any]:
        cfg = self.cfg
        known: dict[str, Any] = {"prompts_per_step": cfg.batch_size} if cfg.batch_size else {}
        return known | ({"chat_prompts": True} if cfg.chat or cfg.system_prompt else {})

    def check(self, facts: Facts) -> Iterable[Problem]:
        if why := refusal(resolve(self.cfg.path)):
            yield Problem(where=f"{facts.key}.path", what=why)
        if self.cfg.purpose not in ("train", "eval"):
            hint = near(self.cfg.purpose, ("train", "eval"))
            yield Problem(where=f"{facts.key}.purpose", what=f"no purpose '{self.cfg.purpose}'", hint=hint)
        if (temperature := self.cfg.sampling.temperature) is not None:
            yield from temperature_problems(f"{facts.key}.sampling.temperature", temperature)
        yield from self._check_use(facts)
        if not self.cfg.fields.prompt:
            yield Problem(
                where=f"{facts.key}.fields.prompt", what="is empty", hint="name the key that holds the prompt"
            )

    def _check_use(self, facts: Facts) -> Iterable[Problem]:
        """A loader that evaluates says so, shares no row with one that trains, and only it overrides sampling."""
        key, cfg, wanted = facts.key, self.cfg, "eval" if facts.evaluates else "train"
        if cfg.purpose in ("train", "eval") and cfg.purpose != wanted:
            what = f"is '{cfg.purpose}', but this loader is wired to {'evaluate' if facts.evaluates else 'train'}"
            yield Problem(where=f"{key}.purpose", what=what, hint=f"set {key}.purpose={wanted}")
        overridden = [name for name, value in asdict(cfg.sampling).items() if value is not None]
        if overridden and not facts.evaluates:
            what = f"sets {', '.join(overridden)} for training, where the plan's sizes would not show it"
            yield Problem(where=f"{key}.sampling", what=what, hint="set them at the rollout: rollout.n, ...")
        others = {n: p for n, p in facts.nodes.items() if facts.evaluates and n != key and isinstance(p, JsonlLoader)}
        for other, part in others.items():
            if part.cfg.purpose == "train" and _overlap(cfg, part.cfg):
                what = f"shares rows with '{other}': accuracy would not be of held-out prompts"
                hint = f"give another file, or ranges that do not meet ({other}.skip, {key}.skip, limit)"
                yield Problem(where=f"{key}.path", what=what, hint=hint)

    def open(self, ctx: Context) -> None:
        super().open(ctx)
        path = resolve(self.cfg.path)
        if why := refusal(path):
            raise DataError(why)
        cfg = self.cfg
        found = self.read(path, RowParser(cfg, ctx.node), cfg.skip + cfg.limit if cfg.limit else 0)
        if not found:
            raise DataError(f"{path} has no rows, only blank lines")
        rows = found - cfg.skip
        if rows <= 0:
            raise DataError(
                f"{ctx.node}.skip is {cfg.skip}, but {path} has {found} rows; it may be at most {found - 1}"
            )
        if self.cfg.batch_size > rows:
            raise DataError(
                f"{ctx.node}.batch_size is {self.cfg.batch_size}, but {path} gives {rows} rows"
                f" ({ctx.node}.skip {cfg.skip}, limit {cfg.limit}); it may be at most that"
            )
        self._rows, self._batch = rows, self.cfg.batch_size or rows
        every = np.arange(rows)
        self._order = Order(rows, (lambda epoch: ctx.seed(ctx.node, epoch, every)) if self.cfg.shuffle else None)

    def run(self) -> PromptBatch:
        started = time.perf_counter()
        row_id = np.arange(self._calls * self._batch, (self._calls + 1) * self._batch, dtype=np.int64)
        rows = [self.row(i + self.cfg.skip) for i in self._order.at(row_id).tolist()]
        prompt, ground_truth, data_source, extra = (_column(c) for c in zip(*rows, strict=True))
        self._calls += 1
        batch = PromptBatch(
            step=self._calls,
            row_id=row_id,
            group_id=row_id,
            purpose="eval" if self.cfg.purpose == "eval" else "train",
            group_size=1,
            sampling=Sampling(**asdict(self.cfg.sampling)),
            prompt=prompt,
            ground_truth=ground_truth,
            data_source=data_source,
            extra=extra,
        )
        if batch.purpose == "train":
            self.ctx.meter.add("loader/rows_per_s", (len(batch), time.perf_counter() - started), "ratio")
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self._calls, "rows": self._rows, "batch_size": self._batch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """ValueError if the file or the batch has another size now: positions would mean other prompts."""
        for name, now in (("rows", self._rows), ("batch_size", self._batch)):
            if state[name] != now:
                raise ValueError(f"cannot go on: {self.ctx.node} had {name} = {state[name]} and has {now} now")
        self._calls = state["calls"]


def _column(rows: Iterable[bytes]) -> Ragged:
    rows = list(rows)
    return Ragged(np.frombuffer(b"".join(rows), np.uint8), offsets_of([len(r) for r in rows]))


def _overlap(a: LoaderConfig, b: LoaderConfig) -> bool:
    """Whether two loaders may give the same row of the same file."""
    end_a, end_b = (c.skip + c.limit if c.limit else math.inf for c in (a, b))
    return resolve(a.path) == resolve(b.path) and a.skip < end_b and b.skip < end_a
