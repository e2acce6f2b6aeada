"""What a plan can say of a loader's settings before a row is read."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

from pipeline.errors import Problem, near
from pipeline.registry import entries
from stages.loader import LoaderConfig
from stages.loader.files import find, identity, is_empty, kind_of_file, refusal
from stages.loader.validation import HOW
from stages.paths import instead_of
from stages.records import temperature_problems

ON_BAD_ROW = ("stop", "skip")
PURPOSES = ("train", "eval")


def of_files(key: str, cfg: LoaderConfig, reads: Collection[str]) -> Iterator[Problem]:
    """Files that are not there or cannot be read. One that is empty beside others is a warning."""
    found = find(cfg.path)
    for problem in found.problems:
        yield Problem(where=f"{key}.path", what=problem, hint="give a file, a glob such as data/*.jsonl, or a list")
    empty = [f for f in found.files if is_empty(f)]
    spared = empty if len(empty) < len(found.files) else []
    for path in found.files:
        if why := refusal(path, reads):
            hint, level = ("", "warning") if path in spared else (_able(path, reads), "error")
            yield Problem(where=f"{key}.path", what=why, hint=hint, level=level)


def _able(path: Path, reads: Collection[str]) -> str:
    """What lies there in place of a file that does not; or loaders that read what this one does not."""
    if not path.exists():
        return instead_of(path)
    kind = kind_of_file(path)
    able = [str(e) for e in entries("loader") if kind and kind not in reads and kind in getattr(e.cls, "reads", ())]
    return f"or choose a loader that reads it: {', '.join(able)}" if able else ""


def of_settings(key: str, cfg: LoaderConfig) -> Iterator[Problem]:
    for name, allowed in (("purpose", PURPOSES), ("validate", HOW), ("on_bad_row", ON_BAD_ROW)):
        value = getattr(cfg, name)
        if value not in allowed:
            yield Problem(where=f"{key}.{name}", what=f"no {name} '{value}'", hint=near(value, allowed))
    if not cfg.fields.prompt:
        yield Problem(where=f"{key}.fields.prompt", what="is empty", hint="name the key that holds the prompt")
    if (temperature := cfg.sampling.temperature) is not None:
        yield from temperature_problems(f"{key}.sampling.temperature", temperature)
    if cfg.shard >= cfg.shards:
        hint = f"of {key}.shards={cfg.shards} the last is {cfg.shards - 1}"
        yield Problem(where=f"{key}.shard", what=f"{cfg.shard} is not allowed", hint=hint)
    if not cfg.batch_size and cfg.shards > 1:
        hint = f"give {key}.batch_size, the rows of each shard"
        yield Problem(where=f"{key}.batch_size", what="is 0, all rows, which shards cannot share", hint=hint)
    if not cfg.batch_size and cfg.on_bad_row == "skip" and cfg.validate != "full":
        what = f"is 0, all rows, and {key}.validate={cfg.validate} does not tell how many can be used"
        yield Problem(where=f"{key}.batch_size", what=what, hint=f"set {key}.validate=full, or a batch_size")
    yield from _of_index_dir(f"{key}.index_dir", cfg.index_dir)


def _of_index_dir(where: str, index_dir: str) -> Iterator[Problem]:
    """The nearest folder that is there must let us write."""
    if not index_dir:
        return
    folder = Path(index_dir).expanduser().absolute()
    there = next(p for p in (folder, *folder.parents) if p.exists())
    if not there.is_dir():
        yield Problem(where=where, what=f"{there} is not a folder")
    elif not os.access(there, os.W_OK | os.X_OK):
        yield Problem(where=where, what=f"{there} cannot be written to", hint="choose another folder")


def of_use(key: str, cfg: LoaderConfig, evaluates: bool) -> Iterator[Problem]:
    """A loader that evaluates says so, and only it overrides sampling."""
    wanted = "eval" if evaluates else "train"
    if cfg.purpose in PURPOSES and cfg.purpose != wanted:
        what = f"is '{cfg.purpose}', but this loader is wired to {'evaluate' if evaluates else 'train'}"
        yield Problem(where=f"{key}.purpose", what=what, hint=f"set {key}.purpose={wanted}")
    overridden = [name for name, value in asdict(cfg.sampling).items() if value is not None]
    if overridden and not evaluates:
        what = f"sets {', '.join(overridden)} for training, where the plan's sizes would not show it"
        yield Problem(where=f"{key}.sampling", what=what, hint="set them at the rollout: rollout.n, ...")


def of_room(key: str, cfg: LoaderConfig, positions: int) -> Iterator[Problem]:
    """A response length of its own must fit behind a prompt, as that of the rollout must. `positions` 0: not known."""
    new, prompt = cfg.sampling.max_new_tokens, max(1, cfg.max_prompt_tokens)
    if positions and new and prompt + new > positions:
        what = f"{new} new tokens after a prompt of {prompt} do not fit the model's {positions} positions"
        hint = f"at most {positions - prompt} for such a prompt" if positions > prompt else ""
        yield Problem(where=f"{key}.sampling.max_new_tokens", what=what, hint=hint or f"lower {key}.max_prompt_tokens")


def of_held_out_rows(key: str, cfg: LoaderConfig, others: Mapping[str, LoaderConfig]) -> Iterator[Problem]:
    """A loader that evaluates shares no row with one that trains."""
    for other, part in others.items():
        if part.purpose == "train" and (shared := _shared(cfg, part)):
            what = f"shares {shared} with '{other}': accuracy would not be of held-out prompts"
            hint = f"give another file, or ranges that do not meet ({other}.skip, {key}.skip, limit)"
            yield Problem(where=f"{key}.path", what=what, hint=hint)


def _shared(a: LoaderConfig, b: LoaderConfig) -> str:
    """What two loaders may both read, in words, or ''.

    Of the same files in the same order, the ranges of rows tell. Of others, a file in both is enough: which of its
    rows lie in a range depends on how many rows the files before it have, which is known only after reading them.
    """
    files_a, files_b = ([identity(f) for f in find(c.path).files] for c in (a, b))
    if files_a == files_b and files_a:
        end_a, end_b = (c.skip + c.limit if c.limit else math.inf for c in (a, b))
        return "rows" if a.skip < end_b and b.skip < end_a else ""
    common = [f for f, i in zip(find(a.path).files, files_a, strict=True) if i in files_b]
    return f"the file {common[0]}" if common else ""
