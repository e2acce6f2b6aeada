"""How far the log-probs of one engine are from those of another, where both have made the same tokens.

Rows are told by their number: the same prompt and the same seed. An engine that draws otherwise makes other tokens at
some place of a row, and from there on the two log-probs are of different texts. So only the tokens before that place
are compared: the common prefix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipeline.kept import Column, kept
from pipeline.records import Ragged

_TOKENS, _LOG_PROBS, _PROMPT = "response_ids", "log_probs", "prompt_ids"


@dataclass(frozen=True, slots=True)
class Drift:
    """In nats, over the `tokens` that both have; `mean` and `most` of the absolute difference, None without a token.

    `rows` have the same prompt in both, `equal` of them the same tokens from first to last. `all_tokens`: what the
    baseline made in those rows.
    """

    mean: float | None
    most: float | None
    tokens: int
    all_tokens: int
    equal: int
    rows: int


def rollouts(run_dir: Path, step: int) -> Mapping[str, Column] | None:
    """The kept record of that step that has tokens with their log-probs; None if there is none."""
    records = kept(run_dir, step).values()
    return next((r for r in records if {_TOKENS, _LOG_PROBS, _PROMPT} <= r.keys()), None)


def drift(base: Mapping[str, Column], other: Mapping[str, Column]) -> Drift:
    """Of two records: `row_id` int64 [B], `prompt_ids`, `response_ids` int32 and `log_probs` float32 ragged [N].

    A log-prob that an engine does not tell (NaN) is not counted.
    """
    place = {int(r): i for i, r in enumerate(other["row_id"])}  # type: ignore[arg-type]
    pairs = [(i, place[int(r)]) for i, r in enumerate(base["row_id"]) if int(r) in place]  # type: ignore[arg-type]
    differences: list[np.ndarray] = []
    rows = equal = all_tokens = 0
    for i, j in pairs:
        if not np.array_equal(_row(base, _PROMPT, i), _row(other, _PROMPT, j)):
            continue
        ours, theirs = _row(base, _TOKENS, i), _row(other, _TOKENS, j)
        common = _common(ours, theirs)
        a, b = (_row(r, _LOG_PROBS, k)[:common].astype(np.float64) for r, k in ((base, i), (other, j)))
        differences.append(np.abs(a - b))
        rows, all_tokens = rows + 1, all_tokens + len(ours)
        equal += common == len(ours) == len(theirs)
    every = np.concatenate(differences) if differences else np.empty(0)
    every = every[~np.isnan(every)]
    mean, most = (float(every.mean()), float(every.max())) if len(every) else (None, None)
    return Drift(mean, most, len(every), all_tokens, equal, rows)


def _row(record: Mapping[str, Column], name: str, row: int) -> np.ndarray:
    column = record[name]
    assert isinstance(column, Ragged)
    return column[row]


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the common prefix."""
    size = min(len(a), len(b))
    differ = np.flatnonzero(a[:size] != b[:size])
    return int(differ[0]) if len(differ) else size
