"""Role `loader`: prompts from files, in a seeded order, resumable at an exact position."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from pipeline.stage import Stage, setting
from stages.records import PromptBatch


@dataclass(slots=True, kw_only=True)
class FieldNames:
    """Which keys of a JSON row hold what. A dot goes into nested objects: `reward_model.ground_truth`."""

    prompt: str = setting("prompt", doc="a string, or a list of chat messages")
    ground_truth: str = setting("answer", doc="the answer, which the reward is given; empty: rows have none")
    ground_truth_after: str = setting("", doc="if set, the answer is the text after the last of these marks, stripped")
    data_source: str = setting("data_source", doc="a name; may be missing")
    extra: str = setting("extra_info", doc="an object for the reward; may be missing")


@dataclass(slots=True, kw_only=True)
class SamplingOverride:
    """Sampling parameters for this loader's prompts; null leaves the rollout's own setting."""

    n: int | None = setting(None, min=1, doc="samples a prompt")
    temperature: float | None = setting(None, min=0, doc="0 is greedy")
    top_k: int | None = setting(None, min=0, doc="0: no filter")
    top_p: float | None = setting(None, above=0, max=1, doc="1: no filter")
    min_p: float | None = setting(None, min=0, max=1, doc="0: no filter")
    max_new_tokens: int | None = setting(None, min=1, doc="tokens")


@dataclass(slots=True, kw_only=True)
class LoaderConfig:
    """Settings of every loader."""

    path: Any = setting(
        doc="a file, a glob, or a list of them; relative: looked for here, then in the checkout", text=True
    )
    batch_size: int = setting(32, min=0, doc="prompts a step, of each shard; 0: all rows")
    shuffle: bool = setting(True, doc="a seeded permutation each epoch")
    skip: int = setting(0, min=0, doc="leave out the first rows of the files, to keep them for evaluation")
    limit: int = setting(0, min=0, doc="of the rest, use only the first rows; 0: all")
    shards: int = setting(1, min=1, doc="loaders that share the rows of a run, each with its own `shard`")
    shard: int = setting(0, min=0, doc="which of them this one is, from 0")
    prefetch: int = setting(2, min=0, doc="batches prepared ahead in the background, for training only; 0: none")
    validate: str = setting("full", doc="full: look at every row, once a version of a file; sample: at some; off")
    on_bad_row: str = setting("stop", doc="stop before training, or skip: leave it out and list it in bad_rows.jsonl")
    index_dir: str = setting("", doc="where to keep indexes; empty: beside each file, or in the user's cache folder")
    max_prompt_tokens: int = setting(0, min=0, doc="leave out prompts with more tokens than this; 0: keep all")
    purpose: str = setting("train", doc="train or eval: travels with the batch")
    fields: FieldNames = setting(FieldNames, doc="where in a row things are")
    system_prompt: str = setting("", doc="if set, the prompt becomes a chat with this system message")
    chat: bool = setting(False, doc="turn a text prompt into a chat with one user message")
    sampling: SamplingOverride = setting(SamplingOverride, doc="sampling parameters of these prompts")


class Loader(Stage):
    """One batch a call, over and over the rows: an epoch ends in the middle of a batch if it must, and the next
    permutation goes on there, so that every row comes once an epoch and no batch is short.

    `row_id` counts the prompts of the run, and `step` is the number of the call, from 1. With one shard, prompt k of
    call c (both from 0) is `c * batch_size + k`. Shard r of R has `(c * R + r) * batch_size + k`: the batches of all
    shards, one after the other, are the batch of one loader that is R times as large.

    Loaders give the same rows, in the same order, with the same errors, whatever the backend and the format. Several
    files follow one another as if they were one. A text file is UTF-8, one JSON object a line; blank lines are
    skipped. Before the first batch the rows are looked at (`validate`); bad ones are an error that lists place and
    reason of the first ten, or are left out (`on_bad_row`). Rows that are left out, here or by `max_prompt_tokens`,
    keep their place in the order: others do not move. A file that changes while it is read is an error.

    State: the number of calls, the position in the order, and what positions are counted in, to refuse another file.
    Facts: `prompts_per_step`, `chat_prompts`, `max_prompt_tokens`. Metrics, for `purpose == "train"` only:
    `loader/rows_per_s`, and `loader/wait_s`: how long a step waited for its batch.
    """

    role: ClassVar[str] = "loader"

    @abstractmethod
    def run(self) -> PromptBatch: ...
