"""What trainer and critic have in common when they learn: settings, mini-batches, the guarded optimizer step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.context import Context
from pipeline.errors import Problem
from pipeline.stage import setting
from stages import footprint
from stages.records import AdvantageBatch

if TYPE_CHECKING:
    import torch

    from pipeline.plan import Facts
    from stages.model import Model

MOST_SKIPPED = 3
"""Updates in a row whose gradient is not finite before the run is given up."""


@dataclass(slots=True, kw_only=True)
class LearningConfig:
    """Settings of every stage that learns by AdamW (Loshchilov and Hutter 2019)."""

    lr: float = setting(1e-3, above=0, doc="learning rate; 1e-6 is usual for models of a billion parameters")
    weight_decay: float = setting(0.0, min=0, doc="decoupled weight decay")
    beta1: float = setting(0.9, min=0, max=0.9999, doc="decay of Adam's first moment")
    beta2: float = setting(0.999, min=0, max=0.999999, doc="decay of Adam's second moment")
    clip_grad: float = setting(1.0, min=0, doc="largest gradient norm; 0: no limit")
    mini_batch: int = setting(0, min=0, doc="rows an update; 0, or more than a step has: all rows of the step")
    epochs: int = setting(1, min=1, doc="passes over the rows of a step")
    micro_tokens: int = setting(8192, min=1, doc="tokens, padding and prompts included, of one forward pass")


def rows_per_step(facts: Facts) -> int | None:
    """Rows of a step, where the plan knows."""
    prompts, samples = facts.values.get("prompts_per_step"), facts.values.get("samples_per_prompt")
    return prompts * samples if prompts and samples else None


def check_mini_batch(facts: Facts, mini_batch: int) -> Iterable[Problem]:
    """A mini-batch size that does not divide the rows of a step would give some rows more weight than others."""
    rows = rows_per_step(facts)
    if rows and 0 < mini_batch < rows and rows % mini_batch:
        made = f"{facts.values['prompts_per_step']} prompts x {facts.values['samples_per_prompt']} samples"
        what = f"{mini_batch} rows do not divide the {rows} rows of a step ({made})"
        yield Problem(where=f"{facts.key}.mini_batch", what=what, hint=_nearest(rows, mini_batch))


def sizes(facts: Facts, cfg: LearningConfig) -> dict[str, int | str]:
    """Rows and updates, where the plan knows the rows of a step, and the tokens that bound the memory."""
    out: dict[str, int | str] = {}
    if rows := rows_per_step(facts):
        size = min(cfg.mini_batch, rows) or rows
        updates = rows // size * cfg.epochs
        out = {"rows an update": size, "updates a step": updates, "updates a run": updates * facts.root.run.steps}
    return out | {"tokens a forward pass": f"at most {cfg.micro_tokens:,}"}


def memory(facts: Facts, cfg: LearningConfig, model: Model, *, critic: bool = False) -> dict[str, int]:
    """Bytes of a model that learns by AdamW in float32; {} if its folder does not say its shape.

    Weights, gradients and moments: `footprint.adamw`. Activations: of one micro-batch, `micro_tokens` tokens, or the
    rows of an update if they are fewer and the lengths of prompts are bounded; under autocast also a bfloat16 copy of
    the weights. A critic has one linear output in the place of logits.
    """
    shape, bfloat16 = footprint.shape_of(model), model.dtype_name == "bfloat16"
    if shape is None:
        return {}
    tokens = response = cfg.micro_tokens
    row = min(tokens, facts.values.get("context_length", tokens))
    prompt, new = facts.values.get("max_prompt_tokens"), facts.values.get("max_new_tokens")
    if prompt and new:
        row, rows = prompt + new, rows_per_step(facts)
        most = (min(cfg.mini_batch, rows) or rows) * row if rows else tokens
        tokens = max(min(tokens, most), row)
        response = tokens * new // row
    parameters = shape.parameters - shape.head + shape.hidden + 1 if critic else shape.parameters
    activations = footprint.kept_for_backward(shape, tokens, min(row, tokens), bfloat16=bfloat16)
    activations += 0 if critic else footprint.logits(shape, response, bfloat16=bfloat16)
    activations += footprint.BFLOAT16 * parameters if bfloat16 else 0
    return {**footprint.adamw(parameters), "activations": activations}


def _nearest(rows: int, mini_batch: int) -> str:
    small = [n for n in range(1, min(math.isqrt(rows), 10**6) + 1) if rows % n == 0]  # of absurd sizes, some
    legal = [*small, *(rows // n for n in small)]
    below, above = max(n for n in legal if n < mini_batch), min(n for n in legal if n > mini_batch)
    return f"nearest that do: {below} or {above}; 0 takes all rows"


def mini_batches(ctx: Context, cfg: LearningConfig, advantages: AdvantageBatch) -> Iterator[np.ndarray]:
    """Positions of the rows of each update, in a seeded order; only rows with something to learn.

    Sizes come from all rows, so an update may have fewer, or none: those are counted and left out. ValueError if
    the rows cannot be divided so; the plan does not know their number where a loader takes its whole file a step.
    """
    total, given = len(advantages), cfg.mini_batch
    if 0 < given < total and total % given:
        raise ValueError(
            f"{ctx.node}.mini_batch: {given} rows do not divide the {total} rows of this step; {_nearest(total, given)}"
        )
    learnable = np.zeros(len(advantages), bool)
    learnable[advantages.mask.row_of_value()[advantages.mask.values]] = True
    size = cfg.mini_batch or max(len(advantages), 1)
    for epoch in range(cfg.epochs):
        order = np.argsort(ctx.seed(f"{ctx.node}/order/{epoch}", advantages.step, advantages.row_id), kind="stable")
        for start in range(0, len(order), size):
            rows = order[start : start + size]
            rows = rows[learnable[rows]]
            if len(rows):
                yield rows
            else:
                ctx.meter.add(f"{ctx.node}/empty_mini_batches", 1, "sum")


def batch_info(mask: torch.Tensor, loss_scale_factor: float | None) -> dict[str, Any]:
    """verl's counts of a mini-batch, with which its micro-batches' losses add up to the whole's.

    `mask` bool [B, T]. Rows without a valid token are not counted, so the sum equals the plain mean.
    """
    rows = int(mask.any(-1).sum())
    return {
        "dp_size": 1,
        "batch_num_tokens": int(mask.sum()),
        "global_batch_size": rows,
        "loss_scale_factor": loss_scale_factor,
    }


class Optimizer:
    """AdamW with clipping, and a guard: a gradient that is not finite changes neither weights nor moments."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], cfg: LearningConfig, ctx: Context):
        import torch

        self.cfg, self.ctx = cfg, ctx
        self.parameters = [p for p in parameters if p.requires_grad]
        self.adam = torch.optim.AdamW(
            self.parameters, lr=cfg.lr, betas=(cfg.beta1, cfg.beta2), weight_decay=cfg.weight_decay
        )
        self._skipped = 0

    def step(self) -> float | None:
        """Update with the gradients that were accumulated, and clear them; the gradient's norm before clipping.

        None if it was not finite and the update was skipped; ArithmeticError after several in a row.
        """
        import torch

        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, self.cfg.clip_grad or math.inf))
        finite = math.isfinite(norm)
        if finite:
            self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        self._skipped = 0 if finite else self._skipped + 1
        self.ctx.meter.add(f"{self.ctx.node}/updates", int(finite), "sum")
        self.ctx.meter.add(f"{self.ctx.node}/skipped_updates", int(not finite), "sum")
        if self._skipped >= MOST_SKIPPED:
            what = f"{self._skipped} updates in a row had a gradient that is not finite, and were skipped"
            raise ArithmeticError(
                f"{what}; lower {self.ctx.node}.lr (now {self.cfg.lr}), or look for extreme rewards and log-probs"
            )
        return norm if finite else None

    def state_dict(self) -> dict[str, Any]:
        return {"adam": cloned(self.adam.state_dict()["state"]), "skipped": self._skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Moments come from the state; the learning rate and its kin from the settings of this run."""
        self.adam.load_state_dict(
            {"state": cloned(state["adam"]), "param_groups": self.adam.state_dict()["param_groups"]}
        )
        self._skipped = state["skipped"]


def cloned(value: Any) -> Any:
    """A deep copy of nested dicts of tensors, on the host: later updates do not reach it."""
    if isinstance(value, dict):
        return {k: cloned(v) for k, v in value.items()}
    return value.detach().to("cpu", copy=True) if hasattr(value, "detach") else value
