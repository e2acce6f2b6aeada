"""Small records for tests: say what matters, get sensible values for every other column.

Rows are in the order of the contract: `group_id` counts prompts from `first_row`, `row_id = group_id * n + sample`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pipeline.config import RootConfig
from pipeline.plan import Facts
from pipeline.records import Ragged
from stages.records import (
    KEY_BYTES,
    AdvantageBatch,
    Finish,
    LogProbBatch,
    PromptBatch,
    Purpose,
    RewardBatch,
    RolloutBatch,
    Sampling,
    Status,
    TokenBatch,
    ValueBatch,
    no_keys,
)

Ids = Sequence[Sequence[int]]
Keys = Sequence[bytes]
Floats = Sequence[Sequence[float]]


def _task(
    prompts: Sequence[Any],
    answers: Sequence[Any] | None,
    n: int,
    step: int,
    purpose: Purpose,
    sampling: Sampling | None,
    data_source: str,
    extra: Sequence[Any] | None,
    first_row: int,
) -> dict[str, Any]:
    """The columns of TaskRows; the texts are given one a prompt and repeated for its n rows."""

    def spread(values: Sequence[Any]) -> list[Any]:
        if len(values) != len(prompts):
            raise ValueError(f"{len(values)} values for {len(prompts)} prompts")
        return [v for v in values for _ in range(n)]

    rows = len(prompts) * n
    return {
        "step": step,
        "row_id": np.arange(first_row * n, first_row * n + rows, dtype=np.int64),
        "group_id": np.repeat(np.arange(first_row, first_row + len(prompts), dtype=np.int64), n),
        "purpose": purpose,
        "group_size": n,
        "sampling": sampling or Sampling(),
        "prompt": Ragged.jsons(spread(prompts)),
        "ground_truth": Ragged.jsons(spread(answers if answers is not None else ["" for _ in prompts])),
        "data_source": Ragged.texts([data_source] * rows),
        "extra": Ragged.jsons(spread(extra if extra is not None else [{} for _ in prompts])),
    }


def _keys(keys: Keys | None, prompts: int, n: int) -> np.ndarray:
    """One key of 16 bytes a prompt, for its n rows; None: kept nowhere."""
    if keys is None:
        return no_keys(prompts * n)
    return np.repeat(np.frombuffer(b"".join(keys), np.uint8).reshape(prompts, KEY_BYTES), n, axis=0)


def _per_token(ids: Ragged, values: Any, dtype: Any) -> Ragged:
    """One value for all tokens, or one row of values a response."""
    if np.isscalar(values):
        return ids.with_values(np.full(len(ids.values), values, dtype))
    out = Ragged.of(values, dtype)
    if not np.array_equal(out.offsets, ids.offsets):
        raise ValueError(f"a column of tokens has lengths {out.lengths.tolist()}, not {ids.lengths.tolist()}")
    return out


def plan_facts(
    key: str, *, fed: Sequence[str] = (), evaluates: bool = False, nodes: Any = None, **values: Any
) -> Facts:
    """What a part's `check` is given at plan time: its config key and the facts of the others."""
    return Facts(key=key, root=RootConfig(), values=values, fed=frozenset(fed), evaluates=evaluates, nodes=nodes or {})


def prompt_batch(
    prompts: Sequence[Any],
    answers: Sequence[Any] | None = None,
    *,
    step: int = 1,
    purpose: Purpose = "train",
    sampling: Sampling | None = None,
    data_source: str = "test",
    extra: Sequence[Any] | None = None,
    first_row: int = 0,
) -> PromptBatch:
    """One row a prompt (a string or a list of chat messages)."""
    return PromptBatch(**_task(prompts, answers, 1, step, purpose, sampling, data_source, extra, first_row))


def token_batch(
    prompt_ids: Ids,
    prompts: Sequence[Any] | None = None,
    answers: Sequence[Any] | None = None,
    *,
    keys: Keys | None = None,
    step: int = 1,
    purpose: Purpose = "train",
    sampling: Sampling | None = None,
    data_source: str = "test",
    extra: Sequence[Any] | None = None,
    first_row: int = 0,
) -> TokenBatch:
    """One row a prompt, given as token ids; the text of a prompt defaults to its position."""
    texts = prompts if prompts is not None else [f"prompt {i}" for i in range(len(prompt_ids))]
    task = _task(texts, answers, 1, step, purpose, sampling, data_source, extra, first_row)
    return TokenBatch(**task, prompt_ids=Ragged.of(prompt_ids, np.int32), prompt_key=_keys(keys, len(prompt_ids), 1))


def rollout_batch(
    prompt_ids: Ids,
    response_ids: Ids,
    *,
    n: int = 1,
    keys: Keys | None = None,
    log_probs: Floats | None = None,
    loss_mask: Sequence[Sequence[bool]] | None = None,
    turn: Ids | None = None,
    responses: Sequence[str] | None = None,
    status: Sequence[int] | None = None,
    reasons: Sequence[str] | None = None,
    finish: Sequence[int] | None = None,
    version: int = 0,
    temperature: float = 1.0,
    prompts: Sequence[Any] | None = None,
    answers: Sequence[Any] | None = None,
    step: int = 1,
    purpose: Purpose = "train",
    sampling: Sampling | None = None,
    data_source: str = "test",
    extra: Sequence[Any] | None = None,
    first_row: int = 0,
) -> RolloutBatch:
    """`prompt_ids`, `keys`, `prompts`, `answers`, `extra`: one a prompt. Everything else: one a row, n rows a prompt.

    Log-probs default to -1, the mask to True, the response's text to its ids in decimal, all rows to OK.
    """
    if len(response_ids) != n * len(prompt_ids):
        raise ValueError(f"{len(prompt_ids)} prompts with n={n}, but {len(response_ids)} responses")
    texts = prompts if prompts is not None else [f"prompt {i}" for i in range(len(prompt_ids))]
    ids, rows = Ragged.of(response_ids, np.int32), len(response_ids)
    states = np.asarray(status if status is not None else [Status.OK] * rows, np.uint8)

    return RolloutBatch(
        **_task(texts, answers, n, step, purpose, sampling, data_source, extra, first_row),
        temperature=temperature,
        prompt_ids=Ragged.of([p for p in prompt_ids for _ in range(n)], np.int32),
        prompt_key=_keys(keys, len(prompt_ids), n),
        response_ids=ids,
        log_probs=_per_token(ids, -1.0 if log_probs is None else log_probs, np.float32),
        loss_mask=_per_token(ids, True if loss_mask is None else loss_mask, np.bool_),
        turn=_per_token(ids, 0 if turn is None else turn, np.int16),
        response=Ragged.texts(responses if responses is not None else [" ".join(map(str, r)) for r in response_ids]),
        status=states,
        reason=Ragged.texts(reasons if reasons is not None else ["" if s == Status.OK else "made so" for s in states]),
        finish=np.asarray(finish if finish is not None else [Finish.STOP] * rows, np.uint8),
        version_min=np.full(rows, version, np.int64),
        version_max=np.full(rows, version, np.int64),
    )


def reward_batch(
    scores: Sequence[float],
    *,
    n: int = 1,
    accuracy: Sequence[float] | None = None,
    part_names: Sequence[str] = ("exact",),
    parts: Sequence[Sequence[float]] | None = None,
    status: Sequence[int] | None = None,
    reasons: Sequence[str] | None = None,
    step: int = 1,
    first_row: int = 0,
) -> RewardBatch:
    """One score a rollout row; NaN is an unscored row. Accuracy and the parts default to the score."""
    score = np.asarray(scores, np.float32)
    by_score = np.where(np.isnan(score), Status.UNSCORED, Status.OK)
    states = np.asarray(by_score if status is None else status, np.uint8)
    row_id = np.arange(first_row * n, first_row * n + len(score), dtype=np.int64)
    values = parts if parts is not None else np.repeat(score[:, None], len(part_names), axis=1)
    return RewardBatch(
        step=step,
        row_id=row_id,
        group_id=row_id // n,
        score=score,
        accuracy=np.asarray(accuracy if accuracy is not None else score, np.float32),
        part_names=tuple(part_names),
        parts=np.asarray(values, np.float32).reshape(len(score), len(part_names)),
        status=states,
        reason=Ragged.texts(reasons if reasons is not None else ["" if s == Status.OK else "made so" for s in states]),
    )


def _like(rollouts: RolloutBatch) -> dict[str, Any]:
    return {"step": rollouts.step, "row_id": rollouts.row_id, "group_id": rollouts.group_id}


def log_prob_batch(
    rollouts: RolloutBatch, log_probs: Any = None, *, entropy: Any = 1.0, version: int = 0
) -> LogProbBatch:
    """For the response tokens of `rollouts`; log-probs default to those of the engine."""
    values = rollouts.log_probs if log_probs is None else _per_token(rollouts.response_ids, log_probs, np.float32)
    return LogProbBatch(
        **_like(rollouts),
        version=version,
        log_probs=values,
        entropy=_per_token(rollouts.response_ids, entropy, np.float32),
    )


def value_batch(rollouts: RolloutBatch, values: Any = 0.0) -> ValueBatch:
    return ValueBatch(**_like(rollouts), values=_per_token(rollouts.response_ids, values, np.float32))


def advantage_batch(rollouts: RolloutBatch, advantages: Any, returns: Any = 0.0, mask: Any = None) -> AdvantageBatch:
    """The mask defaults to the contract's: `loss_mask`, and False for rows that are not OK."""
    ok = np.repeat(rollouts.status == Status.OK, rollouts.response_ids.lengths)
    learned = rollouts.loss_mask.with_values(rollouts.loss_mask.values & ok)
    return AdvantageBatch(
        **_like(rollouts),
        advantages=_per_token(rollouts.response_ids, advantages, np.float32),
        returns=_per_token(rollouts.response_ids, returns, np.float32),
        mask=learned if mask is None else _per_token(rollouts.response_ids, mask, np.bool_),
    )
