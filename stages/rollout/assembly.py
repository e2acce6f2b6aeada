"""What every rollout does around its engine: settings of a batch, rows of its prompts, and the record of what was made.

    settings = resolve(cfg, tokens.sampling)
    rows = expand(tokens, settings.n)
    drafts = [...]                                    # by the engine, in any order
    batch = assemble(tokens, rows, drafts, settings, tokenizer)
    measure(ctx.meter, batch, seconds)

A rollout that streams does the last two for each part of the drafts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.errors import Problem
from pipeline.metrics import Meter
from pipeline.records import Ragged
from stages.model import context_length
from stages.records import Finish, RolloutBatch, Sampling, Status, TokenBatch, temperature_problems
from stages.sampler import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from pipeline.context import Context
    from pipeline.plan import Facts
    from stages.model import Model
    from stages.rollout import RolloutConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a batch is sampled: the rollout's own settings, with those in their place that the batch brings."""

    n: int
    max_new_tokens: int
    params: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRows:
    """The rows to be made, n a prompt, in ascending order of `row_id`; all int64 [R].

    `prompt` is the position of the row's prompt in the token batch.
    """

    prompt: np.ndarray
    row_id: np.ndarray
    group_id: np.ndarray

    def __len__(self) -> int:
        return len(self.row_id)

    def seeds(self, ctx: Context, tokens: TokenBatch) -> np.ndarray:
        """uint64 [R]: what the tokens of a row depend on besides weights and prompt."""
        return ctx.seed(f"{ctx.node}/{tokens.purpose}", tokens.step, self.row_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """One response, as an engine made it.

    `row`: position in SampleRows. `ids`, `log_probs`: the response tokens as sampled, the end token included, and
    their log-probs as RolloutBatch defines them. `version_min`, `version_max`: of the policies that made them.
    A row that could not be made has `finish` FAILED and a `reason`; what it has of tokens stays.
    """

    row: int
    ids: Sequence[int] | np.ndarray
    log_probs: Sequence[float] | np.ndarray
    finish: Finish
    version_min: int
    version_max: int
    reason: str = ""

    def __post_init__(self) -> None:
        if (self.finish is Finish.FAILED) != bool(self.reason):
            raise ValueError(f"row {self.row}: finish {self.finish.name} with reason '{self.reason}'")
        if len(self.ids) != len(self.log_probs):
            raise ValueError(f"row {self.row}: {len(self.ids)} tokens but {len(self.log_probs)} log-probs")


def resolve(cfg: RolloutConfig, sampling: Sampling) -> Settings:
    """The settings for a batch; a value of 0 that a batch brings counts, only None means the rollout's own."""

    def value(name: str) -> int | float:
        brought = getattr(sampling, name)
        return getattr(cfg, name) if brought is None else brought

    params = SamplingParams(
        temperature=float(value("temperature")),
        top_k=int(value("top_k")),
        top_p=float(value("top_p")),
        min_p=float(value("min_p")),
    )
    return Settings(n=int(value("n")), max_new_tokens=int(value("max_new_tokens")), params=params)


def expand(tokens: TokenBatch, n: int) -> SampleRows:
    """n rows a prompt: sample j of group g is row `g * n + j`."""
    order = np.argsort(tokens.group_id, kind="stable")
    group_id = np.repeat(tokens.group_id[order], n)
    sample = np.tile(np.arange(n), len(order))
    return SampleRows(prompt=np.repeat(order, n), row_id=group_id * n + sample, group_id=group_id)


def without_prompt(tokens: TokenBatch, rows: SampleRows, version: int) -> list[Draft]:
    """Drafts of the rows whose prompt has no tokens, after which no engine can sample; they have failed."""
    empty = np.flatnonzero(tokens.prompt_ids.lengths[rows.prompt] == 0)
    failed: dict[str, Any] = {"ids": (), "log_probs": (), "finish": Finish.FAILED, "reason": "the prompt has no tokens"}
    return [Draft(row=row, version_min=version, version_max=version, **failed) for row in empty.tolist()]


def assemble(
    tokens: TokenBatch,
    rows: SampleRows,
    drafts: Sequence[Draft],
    settings: Settings,
    tokenizer: PreTrainedTokenizerBase,
) -> RolloutBatch:
    """The record of the drafts, which may be some of the rows or all, in ascending order of `row_id`."""
    drafts = sorted(drafts, key=lambda d: d.row)
    index = np.array([d.row for d in drafts], np.int64)
    task = tokens.take(rows.prompt[index])
    ids = Ragged.of([d.ids for d in drafts], np.int32)
    fast: Any = tokenizer  # a model's tokenizer is a fast one: all rows in one call, and no spaces tidied
    texts = fast.backend_tokenizer.decode_batch([r.tolist() for r in ids.rows()], skip_special_tokens=True)
    failed = np.array([d.finish is Finish.FAILED for d in drafts], bool)
    return RolloutBatch(
        step=tokens.step,
        row_id=rows.row_id[index],
        group_id=rows.group_id[index],
        purpose=tokens.purpose,
        group_size=settings.n,
        sampling=tokens.sampling,
        prompt=task.prompt,
        ground_truth=task.ground_truth,
        data_source=task.data_source,
        extra=task.extra,
        temperature=settings.params.temperature,
        prompt_ids=task.prompt_ids,
        prompt_key=task.prompt_key,
        response_ids=ids,
        log_probs=Ragged.of([d.log_probs for d in drafts], np.float32),
        loss_mask=ids.with_values(np.ones(len(ids.values), bool)),
        turn=ids.with_values(np.zeros(len(ids.values), np.int16)),
        response=Ragged.texts(texts),
        status=np.where(failed, Status.FAILED, Status.OK).astype(np.uint8),
        reason=Ragged.texts(d.reason for d in drafts),
        finish=np.array([d.finish for d in drafts], np.uint8),
        version_min=np.array([d.version_min for d in drafts], np.int64),
        version_max=np.array([d.version_max for d in drafts], np.int64),
    )


def measure(meter: Meter, batch: RolloutBatch, seconds: float) -> None:
    """The metrics of a batch, or of a part of it that took `seconds`. Failed rows have no length."""
    if batch.purpose != "train":
        return
    made = batch.status == Status.OK
    meter.add("rollout/length", batch.response_ids.lengths[made], "spread")
    meter.add("rollout/truncated_ratio", batch.finish[made] == Finish.LENGTH)
    meter.add("rollout/tokens_per_s", (len(batch.response_ids.values), seconds), "ratio")
    meter.add("rollout/failed", np.count_nonzero(~made), "sum")


def settings_problems(cfg: RolloutConfig, model: Model, facts: Facts) -> Iterable[Problem]:
    """What contradicts in the settings of a rollout, at plan time."""
    yield from _sampling_problems(cfg, facts.key)
    limit = context_length(model.config())
    prompt = max(1, facts.values.get("max_prompt_tokens", 0))
    if limit is not None and prompt + cfg.max_new_tokens > limit:
        yield Problem(
            where=f"{facts.key}.max_new_tokens",
            what=f"{cfg.max_new_tokens} new tokens after a prompt of {prompt} do not fit the model's {limit} positions",
            hint=(
                f"at most {limit - prompt} for such a prompt; or shorten prompts, or choose another model.path"
                if limit > prompt
                else "no response has room behind such a prompt: lower max_prompt_tokens, in loader or tokenizer_cache"
            ),
        )


def sizes(cfg: RolloutConfig, facts: Facts) -> dict[str, int | str]:
    """Prompts, rows and tokens of a step, as far as the plan knows them."""
    prompts, longest = facts.values.get("prompts_per_step"), facts.values.get("max_prompt_tokens")
    out: dict[str, int | str] = {"samples a prompt": cfg.n, "tokens a response": f"at most {cfg.max_new_tokens:,}"}
    unbounded = "any, as tokenizer_cache.max_prompt_tokens is 0"
    out["tokens a prompt"] = f"at most {longest:,}" if longest else unbounded
    if not prompts:
        return out
    rows = prompts * cfg.n
    new = {"prompts a step": prompts, "rows a step": rows, "rows a run": rows * facts.root.run.steps}
    return {**new, **out, "response tokens a step": f"at most {rows * cfg.max_new_tokens:,}"}


def _sampling_problems(cfg: RolloutConfig, key: str) -> Iterator[Problem]:
    yield from temperature_problems(f"{key}.temperature", cfg.temperature)
    greedy = "temperature" if cfg.temperature == 0 else "top_k" if cfg.top_k == 1 else ""
    if greedy and cfg.n > 1:
        yield Problem(
            where=f"{key}.n",
            what=f"{cfg.n} samples a prompt, but with {greedy} {getattr(cfg, greedy)} they are all the same",
            hint=f"set {key}.n=1, or another {key}.{greedy}",
        )
    filters = [name for name, off in (("top_k", 0), ("top_p", 1), ("min_p", 0)) if getattr(cfg, name) != off]
    if cfg.temperature == 0 and filters:
        yield Problem(
            where=f"{key}.temperature",
            what=f"0 is greedy, so {', '.join(filters)} change nothing",
            hint="leave them at their defaults, or set a temperature above 0",
            level="warning",
        )


def require_room(tokens: TokenBatch, settings: Settings, limit: int | None) -> None:
    """ValueError if a prompt and its response might not fit the model's positions."""
    longest = int(tokens.prompt_ids.lengths.max(initial=0))
    if limit is not None and longest + settings.max_new_tokens > limit:
        rows = tokens.row_id[tokens.prompt_ids.lengths + settings.max_new_tokens > limit]
        raise ValueError(
            f"{len(rows)} prompts are too long for the model's {limit} positions with max_new_tokens="
            f"{settings.max_new_tokens}: the longest has {longest} tokens (rows {rows[:8].tolist()}). "
            f"Lower max_new_tokens to {limit - longest}, or limit prompts by tokenizer_cache.max_prompt_tokens."
        )
