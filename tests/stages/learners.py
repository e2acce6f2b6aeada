"""What tests of trainers, critics and advantage estimators share: random rollouts, facts, and open stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pipeline import registry
from pipeline.config import RootConfig
from pipeline.context import Context
from pipeline.metrics import summarise
from pipeline.plan import Facts
from pipeline.registry import Entry
from pipeline.stage import component_types
from stages.records import RolloutBatch
from tests.builders import rollout_batch

BASE = Path(__file__).resolve().parents[2] / "data" / "base"
VOCABULARY = 259

registry.discover("stages")


def entry_of(role: str, name: str) -> Entry:
    return next(e for e in registry.entries(role) if e.name == name)


def build(entry: Entry, **settings: Any) -> Any:
    """A stage with these settings, and the tiny model where it takes one."""
    held: dict[str, Any] = {}
    for name in component_types(entry.cls):
        assert name == "model", f"{entry.role}={entry.name} takes a component that these tests do not know: {name}"
        model = entry_of("model", "hf")
        held[name] = model.cls(model.config(path=str(BASE)))  # pyright: ignore[reportCallIssue]
    return entry.cls(entry.config(**settings), **held)  # pyright: ignore[reportCallIssue]


def opened(entry: Entry, make_context: Callable[..., Context], **settings: Any) -> Any:
    stage = build(entry, **settings)
    stage.open(make_context(entry.role))
    return stage


def metrics(stage: Any) -> dict[str, float]:
    """What the stage measured since the last call."""
    return summarise(stage.ctx.meter.drain())


def random_rollouts(prompts: int = 4, n: int = 2, *, seed: int = 0, longest: int = 7, **more: Any) -> RolloutBatch:
    """Random tokens: prompts of 2 to 6, responses of 1 to `longest`."""
    draw = np.random.default_rng(seed)

    def rows(count: int, low: int, high: int) -> list[list[int]]:
        return [draw.integers(3, VOCABULARY, draw.integers(low, high + 1)).tolist() for _ in range(count)]

    return rollout_batch(rows(prompts, 2, 6), rows(prompts * n, 1, longest), n=n, **more)


def holes(rollouts: RolloutBatch, seed: int = 0) -> list[list[bool]]:
    """A mask of response tokens with holes, and one row that is masked whole."""
    draw = np.random.default_rng(seed)
    out = [(draw.random(n) < 0.7).tolist() for n in rollouts.response_ids.lengths]
    out[0] = [True] * len(out[0])
    out[-1] = [False] * len(out[-1])
    return out


def per_token(rollouts: RolloutBatch, values: np.ndarray) -> list[list[float]]:
    return [r.tolist() for r in rollouts.response_ids.with_values(values).rows()]


def facts(key: str, *, values: Mapping[str, Any] | None = None, fed: tuple[str, ...] = ()) -> Facts:
    return Facts(key=key, values=dict(values or {}), fed=frozenset(fed), root=RootConfig())


def aggregate(losses: list[np.ndarray], mode: str, scale: float = 1.0) -> float:
    """verl's loss_agg_mode, by its definition, over rows of token losses that all count."""
    kept = [np.asarray(r, np.float64) for r in losses if len(r)]
    if mode == "token-mean":
        return float(np.concatenate(kept).mean())
    if mode == "token-sum":
        return float(np.concatenate(kept).sum())
    by_row = {
        "seq-mean-token-sum": np.sum,
        "seq-mean-token-mean": np.mean,
        "seq-mean-token-sum-norm": lambda r: np.sum(r) / scale,
    }
    return float(np.mean([by_row[mode](r) for r in kept]))
