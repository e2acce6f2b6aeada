"""Role `loader`: prompts from files, in a seeded order, resumable at an exact position."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

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

    path: str = setting(doc="a JSONL file; a relative path is looked for here, then in the checkout")
    batch_size: int = setting(32, min=0, doc="prompts a step; 0: the whole file")
    shuffle: bool = setting(True, doc="a seeded permutation each epoch")
    skip: int = setting(0, min=0, doc="leave out the first rows of the file, to keep them for evaluation")
    limit: int = setting(0, min=0, doc="of the rest, use only the first rows; 0: all")
    purpose: str = setting("train", doc="train or eval: travels with the batch")
    fields: FieldNames = setting(FieldNames, doc="where in a row things are")
    system_prompt: str = setting("", doc="if set, the prompt becomes a chat with this system message")
    chat: bool = setting(False, doc="turn a text prompt into a chat with one user message")
    sampling: SamplingOverride = setting(SamplingOverride, doc="sampling parameters of these prompts")


class Loader(Stage):
    """One batch a call, over and over the file: an epoch ends in the middle of a batch if it must, and the
    next permutation goes on there, so that every row comes once an epoch and no batch is short.

    `row_id` counts the prompts of the run: prompt k of call c (both from 0) is `c * batch_size + k`, and
    `step` is c + 1. Loaders of one file give the same rows, in the same order, with the same errors, whatever
    the backend. A file is UTF-8, one JSON object a line; blank lines are skipped. All its rows are looked at
    when the loader opens: bad ones are an error that lists file, line, byte and reason of the first ten.
    State: the number of calls (and the sizes it counts in, to refuse another file).
    Facts: `prompts_per_step`, `chat_prompts`. Metric, for `purpose == "train"` only: `loader/rows_per_s`.
    """

    role: ClassVar[str] = "loader"

    @abstractmethod
    def run(self) -> PromptBatch: ...
