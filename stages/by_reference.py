"""Prompts that cross to another process by name: both sides read the token ids from the run's arena."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np
from xxhash import xxh3_64_intdigest

from pipeline.records import Packed, Ragged, Unresolved, offsets_of
from stages.arena import Arena

if TYPE_CHECKING:
    from pipeline.context import Context
    from stages.records import PromptTokens

P = TypeVar("P", bound="PromptTokens")


def pack(rows: PromptTokens, ctx: Context) -> Packed:
    """The rows without the ids that `prompt_key` names, if there is an arena that may hold them; else the rows."""
    named = np.any(rows.prompt_key, axis=1)
    if not named.any() or Arena.of_run(ctx.run_dir) is None:
        return rows
    ids = rows.prompt_ids
    kept = Ragged(ids.values[np.repeat(~named, ids.lengths)], offsets_of(np.where(named, 0, ids.lengths)))
    return NamedPrompts(replace(rows, prompt_ids=kept), int(named.sum()), ids.offsets, _digest(ids.values))


@dataclass(frozen=True, slots=True)
class NamedPrompts(Generic[P]):
    """`rest`: the rows, in whose `prompt_ids` the named rows are empty. `offsets` and `digest` are those of the whole
    column: what the arena gives must be what the sender had, whoever put it there."""

    rest: P
    named: int
    offsets: np.ndarray
    digest: int

    def unpack(self, ctx: Context) -> P:
        keys, counts = _runs(self.rest.prompt_key)
        found, kept = _from_arena(keys, ctx), self.rest.prompt_ids
        ids: list[np.ndarray] = []
        for key, count in zip(keys, counts, strict=True):
            ids += [found[key]] * count if key in found else [kept[len(ids) + i] for i in range(count)]
        values, offsets = np.concatenate(ids), offsets_of(list(map(len, ids)))
        values.flags.writeable = False
        if not np.array_equal(offsets, self.offsets) or _digest(values) != self.digest:
            raise Unresolved("the arena holds other ids under a prompt's key")
        return replace(self.rest, prompt_ids=Ragged(values, offsets))


def _runs(column: np.ndarray) -> tuple[list[bytes], list[int]]:
    """Keys of adjacent rows with the same one, as the samples of a prompt are, and how many rows each stands for."""
    starts = np.flatnonzero(np.append(True, np.any(column[1:] != column[:-1], axis=1)))
    return [key.tobytes() for key in column[starts]], np.diff(np.append(starts, len(column))).tolist()


def _from_arena(keys: list[bytes], ctx: Context) -> dict[bytes, np.ndarray]:
    """The ids of each distinct key; a key of zeros names nothing."""
    arena, wanted = Arena.of_run(ctx.run_dir), [key for key in dict.fromkeys(keys) if any(key)]
    if arena is None:
        raise Unresolved("the run has no token arena")
    found = {k: ids for k, ids in zip(wanted, arena.get_many(wanted), strict=True) if ids is not None}
    if lost := len(wanted) - len(found):
        raise Unresolved(f"the token arena holds {lost} of {len(wanted)} prompts no more")
    return found


def _digest(values: np.ndarray) -> int:
    """Of the numbers and their type."""
    return xxh3_64_intdigest(np.ascontiguousarray(values).data, seed=values.dtype.num)
