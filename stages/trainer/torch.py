"""The policy trained in this process: one of verl's policy losses, AdamW, micro-batches by token budget."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.context import Context
from pipeline.errors import Problem
from pipeline.records import Ragged, Snapshot
from pipeline.registry import backend
from stages import learning, verl_door
from stages.batching import MicroBatch, micro_batches
from stages.learning import Optimizer
from stages.model import Model
from stages.records import AdvantageBatch, LogProbBatch, RolloutBatch
from stages.scoring import score, temperature_of
from stages.trainer import Trainer, policy_loss
from stages.trainer.policy_loss import PolicyLoss, PolicyLossConfig, Targets

if TYPE_CHECKING:
    import torch

    from pipeline.plan import Facts

KL_TOKENS, KL_SHARE = 1024, 16
"""The step's KL is measured on this many tokens (prompts included) of its last update, or on one of `KL_SHARE` parts if
that is more: a forward pass of small cost."""


@dataclass(slots=True, kw_only=True)
class TorchTrainerConfig(PolicyLossConfig):
    """Nothing beyond the settings of learning and of the loss."""


@backend("trainer", "torch")
class TorchTrainer(Trainer):
    """The model stays in eval mode: without dropout the first update's ratio is 1, as PPO assumes. Weights and
    AdamW are in float32; a bfloat16 model computes under autocast.

    `version` counts the calls of `learn` that changed the weights.
    """

    requires = ("torch", "transformers", "verl")

    def __init__(self, cfg: TorchTrainerConfig, model: Model):
        self.cfg, self.model = cfg, model

    def facts(self) -> dict[str, Any]:
        known = self.cfg.policy_loss in verl_door.policy_losses()
        mode = {"loss_agg_mode": policy_loss.aggregation(self.cfg)} if known else {}
        return {"policy_loss": self.cfg.policy_loss, **mode}

    def check(self, facts: Facts) -> Iterable[Problem]:
        yield from learning.check_mini_batch(facts, self.cfg.mini_batch)
        yield from policy_loss.check(facts.key, self.cfg)

    def sizes(self, facts: Facts) -> dict[str, int | str]:
        return learning.sizes(facts, self.cfg)

    def memory(self, facts: Facts) -> dict[str, int]:
        """As any learner; and what is published lies on the host once, in float32."""
        own = learning.memory(facts, self.cfg, self.model)
        return {**own, "host/snapshot": own["weights"]} if own else {}

    def open(self, ctx: Context) -> None:
        super().open(ctx)
        self._loss = PolicyLoss(self.cfg, ctx)
        import torch

        torch.set_num_threads(ctx.threads)
        self._module = self.model.load(ctx.device).float().eval()
        self._optimizer = Optimizer(self._module.parameters(), self.cfg, ctx)
        self._version = 0
        self._published: int | None = None
        self._moved = False

    def state_dict(self) -> dict[str, Any]:
        return {
            "module": learning.cloned(self._module.state_dict()),
            "optimizer": self._optimizer.state_dict(),
            "version": self._version,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._module.load_state_dict(state["module"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._version, self._published, self._moved = state["version"], None, False

    def export(self, folder: str) -> None:
        self.model.save(self._module, folder)

    def publish(self) -> Snapshot:
        """ValueError if an update left every bit of the weights as it was."""
        from stages.weights import snapshot_of

        snapshot = snapshot_of(self._module, self._version)
        check = zlib.crc32(snapshot.data.data)
        if self._moved and check == self._published:
            what = f"version {self._version}: the updates since the last publication changed no bit of the weights"
            raise ValueError(
                f"{what}; {self.ctx.node}.lr={self.cfg.lr} is too small for float32, or another module is trained"
            )
        self._published, self._moved = check, False
        return snapshot

    # -- log-probs -------------------------------------------------------------------------------------------

    def run(self, rollouts: RolloutBatch) -> LogProbBatch:
        import torch

        out = np.zeros((2, len(rollouts.response_ids.values)), np.float32)
        offsets = rollouts.response_ids.offsets
        with torch.no_grad():
            for micro in micro_batches(rollouts, np.arange(len(rollouts)), self.cfg.micro_tokens, self.ctx.device):
                log_probs, entropy = self._score(micro, rollouts, entropy=True)
                values = torch.stack([log_probs, entropy]).cpu().numpy()
                out[:, np.concatenate([np.arange(offsets[r], offsets[r + 1]) for r in micro.rows])] = values
        self._measure_drift(rollouts, out[0])
        self.ctx.meter.add("rollout/staleness_max", self._version - rollouts.version_min, "max")
        return LogProbBatch(
            step=rollouts.step,
            row_id=rollouts.row_id,
            group_id=rollouts.group_id,
            version=self._version,
            log_probs=rollouts.response_ids.with_values(out[0]),
            entropy=rollouts.response_ids.with_values(out[1]),
        )

    def _score(self, micro: MicroBatch, rollouts: RolloutBatch, *, entropy: bool) -> tuple[torch.Tensor, torch.Tensor]:
        bfloat16 = self.model.dtype_name == "bfloat16"
        return score(self._module, micro, temperature_of(rollouts), entropy=entropy, bfloat16=bfloat16)

    def _measure_drift(self, rollouts: RolloutBatch, ours: np.ndarray) -> None:
        """How far the engine's log-probs are from the trainer's; a greedy batch is no sample of a policy."""
        theirs = rollouts.log_probs.values
        told = rollouts.loss_mask.values & np.isfinite(theirs)
        if rollouts.temperature > 0:
            self.ctx.meter.add(
                "policy/engine_drift", (np.abs(ours[told] - theirs[told]).sum(dtype=np.float64), told.sum()), "ratio"
            )

    # -- updates ---------------------------------------------------------------------------------------------

    def learn(self, rollouts: RolloutBatch, old: LogProbBatch, advantages: AdvantageBatch) -> None:
        started, seen, done = time.monotonic(), 0, 0
        targets = Targets.gather(self.cfg, self.ctx.device, rollouts, old, advantages)
        last: np.ndarray | None = None
        for number, rows in enumerate(learning.mini_batches(self.ctx, self.cfg, advantages)):
            micros = list(micro_batches(rollouts, rows, self.cfg.micro_tokens, self.ctx.device))
            seed = int(self.ctx.seed(f"{self.ctx.node}/loss", rollouts.step, number))
            loss = self._loss.accumulate(micros, targets, lambda m, e: self._score(m, rollouts, entropy=e), seed)
            self.ctx.meter.add("policy/loss", loss)
            norm = self._optimizer.step()
            if norm is not None:
                self.ctx.meter.add("policy/grad_norm", norm)
                done, last = done + 1, rows
                self._moved |= norm > 0
            seen += sum(m.tokens for m in micros)
            slots = sum(m.slots for m in micros)
            self.ctx.meter.add(
                f"{self.ctx.node}/padding_ratio", (slots - sum(m.tokens for m in micros), slots), "ratio"
            )
        self._version += done > 0
        mask = advantages.mask.values
        self.ctx.meter.add("policy/entropy", (old.entropy.values[mask].sum(dtype=np.float64), mask.sum()), "ratio")
        self.ctx.meter.add("policy/lr", self.cfg.lr, "last")
        self.ctx.meter.add(f"{self.ctx.node}/tokens_per_s", (seen, time.monotonic() - started), "ratio")
        if last is not None:
            self._measure_kl(rollouts, last, old.log_probs, advantages.mask)

    def _measure_kl(self, rollouts: RolloutBatch, rows: np.ndarray, old: Ragged, mask: Ragged) -> None:
        """KL(before the step || after it), by the estimator r - 1 - log r with r = new / old (Schulman 2020, k3), on
        some of the last update's rows. What verl's losses report is taken before their own update: 0 for the first."""
        import torch

        lengths = (rollouts.prompt_ids.lengths + rollouts.response_ids.lengths)[rows]
        tokens = max(KL_TOKENS, int(lengths.sum()) // KL_SHARE)
        rows = rows[: max(int(np.searchsorted(np.cumsum(lengths), tokens, side="right")), 1)]
        with torch.no_grad():
            for micro in micro_batches(rollouts, rows, self.cfg.micro_tokens, self.ctx.device):
                new = self._score(micro, rollouts, entropy=False)[0].cpu().numpy().astype(np.float64)
                chosen = mask.take(micro.rows).values
                log_ratio = (new - old.take(micro.rows).values)[chosen]
                self.ctx.meter.add("policy/kl", (np.sum(np.expm1(log_ratio) - log_ratio), chosen.sum()), "ratio")
