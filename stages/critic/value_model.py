"""A critic with a language model's backbone and a linear head of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.context import Context
from pipeline.errors import Problem, near
from pipeline.registry import backend
from pipeline.stage import setting
from stages import learning, verl_door
from stages.batching import MicroBatch, micro_batches
from stages.critic import Critic
from stages.device import send
from stages.learning import LearningConfig, Optimizer
from stages.model import Model
from stages.records import AdvantageBatch, RolloutBatch, ValueBatch
from stages.verl_door import AGGREGATIONS, Layout

if TYPE_CHECKING:
    import torch

    from pipeline.plan import Facts


@dataclass(slots=True, kw_only=True)
class ValueModelCriticConfig(LearningConfig):
    """Names of loss settings are verl's."""

    cliprange_value: float = setting(0.5, above=0, doc="how far a value may move from the old one before it is clipped")
    loss_agg_mode: str = setting("token-mean", doc=", ".join(AGGREGATIONS))
    loss_scale_factor: float | None = setting(None, above=0, doc="divisor of seq-mean-token-sum-norm, in tokens")


@backend("critic", "value_model")
class ValueModelCritic(Critic):
    """The value before a token is a linear function of the hidden state that predicts the token. The backbone
    starts as the base model's, the head at zero: every value of the first step is 0."""

    requires = ("torch", "transformers", "verl")

    def __init__(self, cfg: ValueModelCriticConfig, model: Model):
        self.cfg, self.model = cfg, model

    def check(self, facts: Facts) -> Iterable[Problem]:
        cfg, key = self.cfg, facts.key
        yield from learning.check_mini_batch(facts, cfg.mini_batch)
        if cfg.loss_agg_mode not in AGGREGATIONS:
            yield Problem(
                where=f"{key}.loss_agg_mode",
                what=f"there is no '{cfg.loss_agg_mode}'",
                hint=near(cfg.loss_agg_mode, AGGREGATIONS),
            )
        if cfg.loss_agg_mode == "seq-mean-token-sum-norm" and cfg.loss_scale_factor is None:
            what = "must be given for loss_agg_mode=seq-mean-token-sum-norm, or the loss would depend on the padding"
            yield Problem(
                where=f"{key}.loss_scale_factor", what=what, hint="such as the value of rollout.max_new_tokens"
            )

    def sizes(self, facts: Facts) -> dict[str, int | str]:
        return learning.sizes(facts, self.cfg)

    def memory(self, facts: Facts) -> dict[str, int]:
        return learning.memory(facts, self.cfg, self.model, critic=True)

    def open(self, ctx: Context) -> None:
        import torch

        super().open(ctx)
        self._loss = verl_door.core_algos().compute_value_loss
        torch.set_num_threads(ctx.threads)
        model = self.model.load(ctx.device).float().eval()
        head = torch.nn.Linear(int(model.config.hidden_size), 1, device=ctx.device)
        torch.nn.init.zeros_(head.weight)
        torch.nn.init.zeros_(head.bias)
        self._module = torch.nn.ModuleDict({"backbone": model.base_model, "head": head})
        self._optimizer = Optimizer(self._module.parameters(), self.cfg, ctx)

    def state_dict(self) -> dict[str, Any]:
        return {"module": learning.cloned(self._module.state_dict()), "optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._module.load_state_dict(state["module"])
        self._optimizer.load_state_dict(state["optimizer"])

    def run(self, rollouts: RolloutBatch) -> ValueBatch:
        import torch

        values = np.zeros(len(rollouts.response_ids.values), np.float32)
        offsets = rollouts.response_ids.offsets
        with torch.no_grad():
            for micro in micro_batches(rollouts, np.arange(len(rollouts)), self.cfg.micro_tokens, self.ctx.device):
                place = np.concatenate([np.arange(offsets[r], offsets[r + 1]) for r in micro.rows])
                values[place] = self._forward(micro).cpu().numpy()
        return ValueBatch(
            step=rollouts.step,
            row_id=rollouts.row_id,
            group_id=rollouts.group_id,
            values=rollouts.response_ids.with_values(values),
        )

    def _forward(self, micro: MicroBatch) -> torch.Tensor:
        """Values [N] in float32 before each response token."""
        import torch

        with torch.autocast(micro.ids.device.type, torch.bfloat16, enabled=self.model.dtype_name == "bfloat16"):
            hidden = self._module["backbone"](input_ids=micro.ids, use_cache=False).last_hidden_state
        hidden = hidden.flatten(0, 1)[micro.predicts]
        return self._module["head"](hidden.to(self._module["head"].weight.dtype))[:, 0]

    def learn(self, rollouts: RolloutBatch, values: ValueBatch, advantages: AdvantageBatch) -> None:
        for rows in learning.mini_batches(self.ctx, self.cfg, advantages):
            micros = list(micro_batches(rollouts, rows, self.cfg.micro_tokens, self.ctx.device))
            self.ctx.meter.add("critic/loss", self._accumulate(micros, values, advantages))
            norm = self._optimizer.step()
            if norm is not None:
                self.ctx.meter.add("critic/grad_norm", norm)
        mask = advantages.mask.values
        explained = explained_variance(values.values.values[mask], advantages.returns.values[mask])
        self.ctx.meter.add("critic/explained_variance", explained)

    def _accumulate(self, micros: Sequence[MicroBatch], values: ValueBatch, advantages: AdvantageBatch) -> float:
        """Add the mini-batch's gradient to the parameters, and return its loss."""
        whole = advantages.mask.take(np.concatenate([m.rows for m in micros]))
        info = learning.batch_info(Layout(whole.lengths).pad(whole.values), self.cfg.loss_scale_factor)
        total = 0.0
        for micro in micros:
            layout = Layout(advantages.mask.lengths[micro.rows], self.ctx.device)
            columns = {"old": values.values, "returns": advantages.returns, "mask": advantages.mask}
            sent = send(self.ctx.device, **{n: c.take(micro.rows).values for n, c in columns.items()})
            old, returns, mask = (layout.pad(sent[n]) for n in columns)
            loss, clipped = self._loss(
                vpreds=layout.pad(self._forward(micro)),
                returns=returns,
                values=old,
                response_mask=mask,
                cliprange_value=self.cfg.cliprange_value,
                loss_agg_mode=self.cfg.loss_agg_mode,
                **info,
            )
            loss.backward()
            total += float(loss.detach())
            tokens = int(mask.sum())
            self.ctx.meter.add("critic/clip_fraction", (float(clipped) * tokens, tokens), "ratio")
        return total


def explained_variance(values: np.ndarray, returns: np.ndarray) -> float:
    """1 - Var(returns - values) / Var(returns): 1 for a perfect critic, 0 for a constant; NaN if Var(returns) is 0."""
    spread = returns.var(dtype=np.float64) if len(returns) else 0.0
    return float(1 - (returns - values).var(dtype=np.float64) / spread) if spread > 0 else float("nan")
