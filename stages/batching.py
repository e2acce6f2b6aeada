"""From ragged rollouts to the tensors of one forward pass: micro-batches by token budget, padding, positions.

Rows are padded on the right. A token's position is then its index, and causal attention never looks at the
padding, so a row's numbers are the same alone, padded, or beside others, without an attention mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from stages.device import Parcel, ahead
from stages.records import RolloutBatch

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """R rows of one forward pass, L tokens wide, with N response tokens in all.

    `rows` int64 [R]: their positions in the batch. `ids` int64 [R, L]. `predicts` int64 [N]: for each response
    token, row after row, the index into the flattened [R * L] positions of the token before it, whose
    hidden state predicts it. `targets` int64 [N]: the response tokens. `tokens`: real tokens, prompts included.
    """

    rows: np.ndarray
    ids: torch.Tensor
    predicts: torch.Tensor
    targets: torch.Tensor
    tokens: int

    @property
    def slots(self) -> int:
        """Places of the padded tensor."""
        return self.ids.numel()


def cut(lengths: np.ndarray, budget: int) -> list[np.ndarray]:
    """Positions of rows, longest first, in runs whose padded size is at most `budget` tokens.

    A row longer than the budget is a run of its own. Rows of equal length keep their order.
    """
    order = np.argsort(-lengths, kind="stable")
    out: list[np.ndarray] = []
    at = 0
    while at < len(order):
        widest = max(int(lengths[order[at]]), 1)
        count = max(budget // widest, 1)
        out.append(order[at : at + count])
        at += count
    return out


def micro_batches(rollouts: RolloutBatch, rows: np.ndarray, budget: int, device: str) -> Iterator[MicroBatch]:
    """The given rows (positions in `rollouts`) in micro-batches; rows without a response are left out. Each is on its
    way to the device before the one in front of it is given out."""
    lengths = rollouts.response_ids.lengths[rows]
    rows, lengths = rows[lengths > 0], (rollouts.prompt_ids.lengths[rows] + lengths)[lengths > 0]
    packed = ((part, _pack(rollouts, rows[part], device)) for part in cut(lengths, budget))
    for part, parcel in ahead(packed):
        yield MicroBatch(rows=rows[part], tokens=int(lengths[part].sum()), **parcel.receive())


def _pack(rollouts: RolloutBatch, rows: np.ndarray, device: str) -> Parcel:
    prompts, responses = rollouts.prompt_ids.take(rows), rollouts.response_ids.take(rows)
    before, after = prompts.lengths, responses.lengths
    if not before.all():
        bad = rollouts.row_id[rows[before == 0]]
        raise ValueError(f"rows {bad[:8].tolist()} have no prompt token: nothing predicts their first response token")
    width, total = int((before + after).max()), len(responses.values)
    parcel = Parcel(
        device, ids=((len(rows), width), np.int64), predicts=((total,), np.int64), targets=((total,), np.int64)
    )
    column = np.arange(width)
    parcel.host["ids"][column < before[:, None]] = prompts.values
    parcel.host["ids"][(column >= before[:, None]) & (column < (before + after)[:, None])] = responses.values
    starts = np.repeat(np.arange(len(rows)) * width + before - 1 - responses.offsets[:-1], after)
    np.add(starts, np.arange(total), out=parcel.host["predicts"])
    parcel.host["targets"][:] = responses.values
    return parcel.send()
