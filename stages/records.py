"""What flows between stages. Every record is a frozen batch of rows on the host (see pipeline/records.py).

Shapes: B rows, N tokens of all rows together. Rows are in ascending order of `row_id`.
Token-level columns of one record share their offsets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Literal, Self

import numpy as np

from pipeline.errors import Problem
from pipeline.records import Packed, Ragged, Rows
from stages import by_reference

if TYPE_CHECKING:
    from pipeline.context import Context

Purpose = Literal["train", "eval"]

KEY_BYTES = 16
"""Length of the name of a prompt's token ids."""


def no_keys(rows: int) -> np.ndarray:
    """The `prompt_key` of rows whose ids are kept nowhere."""
    return np.zeros((rows, KEY_BYTES), np.uint8)


class Status(IntEnum):
    """What became of a row. Only OK rows are learned from; the reason stands beside it in words."""

    OK = 0
    FAILED = 1
    """The rollout could not be made."""
    UNSCORED = 2
    """The reward gave no usable score: it hung, raised, died, or abstained."""
    FILTERED = 3
    """A node between rollout and reward took it out."""


class Finish(IntEnum):
    """Why a response ended."""

    STOP = 0
    """The policy ended it: its last token is an end-of-sequence token."""
    LENGTH = 1
    """It was cut at the token limit; nothing is appended."""
    FAILED = 2
    """It was never finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters that a batch brings along; None leaves the rollout's own setting.

    `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 mean no filter. Temperature comes first, then top-k,
    then top-p on the renormalised rest, then min-p on the temperature-scaled distribution.
    """

    n: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    max_new_tokens: int | None = None


def temperature_problems(where: str, temperature: float) -> Iterator[Problem]:
    """At plan time: logits are divided by a temperature above 0, and must stay numbers in float32. (What is below 0
    the range of the setting refuses.)"""
    if not (temperature <= 0 or 0.01 <= temperature <= 100):
        yield Problem(where=where, what=f"{temperature:g} is not allowed", hint="0 (greedy), or 0.01 to 100")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TaskRows(Rows):
    """Columns that say what a row is about; they travel from the loader to the reward.

    `group_size` of Rows is always given.
    `prompt`: JSON, a string or a list of chat messages `{"role", "content"}`, as the file has it.
    `ground_truth`: JSON of whatever the file has as answer. `data_source`: text. `extra`: JSON object.
    `sampling`: see Sampling.
    """

    purpose: Purpose
    sampling: Sampling
    prompt: Ragged
    ground_truth: Ragged
    data_source: Ragged
    extra: Ragged


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptBatch(TaskRows):
    """From a loader: one row a prompt, `group_id == row_id`, which counts the prompts of the run."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptTokens(TaskRows):
    """Rows that know the token ids of their prompt.

    `prompt_ids`: int32 [N], the rendered prompt exactly as the policy will see it, special tokens included.
    `prompt_key`: uint8 [B, 16], the name under which a token cache keeps those ids; all zero: kept nowhere.
    """

    prompt_ids: Ragged
    prompt_key: np.ndarray

    def __post_init__(self) -> None:
        super(PromptTokens, self).__post_init__()  # a slotted dataclass is made anew, unknown to the bare super()
        key = self.prompt_key
        if key.dtype != np.uint8 or key.shape != (len(self), KEY_BYTES):
            what = f"{type(self).__name__}.prompt_key must be uint8 [{len(self)}, {KEY_BYTES}]"
            raise ValueError(f"{what}; got {key.dtype} {key.shape}")

    def pack(self, ctx: Context) -> Packed:
        return by_reference.pack(self, ctx)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenBatch(PromptTokens):
    """From a tokenizer cache: the prompts with their token ids."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RolloutBatch(PromptTokens):
    """From a rollout: `n` rows a prompt, `row_id == group_id * n + sample`.

    `response_ids`: int32, the response exactly as sampled, with its end token if it made one.
    `log_probs`: float32, of each response token under the sampling temperature, before top-k, top-p and
    min-p (greedy: under temperature 1); NaN where an engine cannot tell. Sampled at `temperature`.
    `loss_mask`: bool, the tokens the policy itself chose (tool output and the like is False).
    `turn`: int16, the turn each token belongs to. `response`: the text, special tokens left out.
    `status` uint8 (Status), `reason` text, `finish` uint8 (Finish), `version_min`, `version_max`: int64 [B],
    the oldest and newest policy version that made tokens of the row.
    """

    temperature: float
    response_ids: Ragged
    log_probs: Ragged
    loss_mask: Ragged
    turn: Ragged
    response: Ragged
    status: np.ndarray
    reason: Ragged
    finish: np.ndarray
    version_min: np.ndarray
    version_max: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RewardBatch(Rows):
    """From a reward: one score a rollout.

    `score`: float32 [B], NaN where unscored. `accuracy`: float32 [B], whether the answer is right, in 0..1,
    NaN where unscored. `parts`: float32 [B, P], the unweighted parts named by `part_names`, which are sorted;
    NaN where a row has no such part.
    `status` uint8 (Status): the rollout's own status, or UNSCORED; `reason`: text.
    """

    score: np.ndarray
    accuracy: np.ndarray
    part_names: tuple[str, ...]
    parts: np.ndarray
    status: np.ndarray
    reason: Ragged

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Which parts a score has may differ from row to row; the whole names all of them."""
        if len({p.part_names for p in parts}) > 1:
            names = tuple(sorted({n for p in parts for n in p.part_names}))
            parts = [p.with_parts(names) for p in parts]
        return super(RewardBatch, cls).concat(parts)  # slots=True makes a new class, so plain super() is lost

    def with_parts(self, names: tuple[str, ...]) -> Self:
        """The same rows with these columns of parts; NaN where there was none."""
        columns = np.full((len(self), len(names)), np.nan, np.float32)
        for i, name in enumerate(names):
            if name in self.part_names:
                columns[:, i] = self.parts[:, self.part_names.index(name)]
        return replace(self, part_names=names, parts=columns)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LogProbBatch(Rows):
    """Log-probs of the response tokens by a policy, at the rollout's temperature, without filters.

    `log_probs`, `entropy`: float32 [N] in nats, offsets of `response_ids`. `version`: of the policy.
    """

    version: int
    log_probs: Ragged
    entropy: Ragged


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ValueBatch(Rows):
    """From a critic: `values` float32 [N], the expected return before each response token."""

    values: Ragged


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AdvantageBatch(Rows):
    """From an advantage estimator, for the response tokens.

    `advantages`, `returns`: float32 [N]. `mask`: bool [N], the tokens that are learned from: `loss_mask` of
    the rollout, and False for every token of a row whose status is not OK.
    """

    advantages: Ragged
    returns: Ragged
    mask: Ragged
