"""The policy trained in this process: verl's policy losses by name, AdamW, micro-batches by token budget.

How a mini-batch is cut into micro-batches changes neither loss nor gradient. For losses that are sums over tokens or
rows, verl's global batch information makes the parts add up. All others see the whole mini-batch: see `_whole`.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.context import Context
from pipeline.errors import Problem, near
from pipeline.records import Ragged, Snapshot
from pipeline.registry import backend
from pipeline.stage import setting
from stages import learning, verl_door
from stages.batching import MicroBatch, micro_batches
from stages.learning import LearningConfig, Optimizer
from stages.model import Model
from stages.records import AdvantageBatch, LogProbBatch, RolloutBatch
from stages.trainer import Trainer
from stages.verl_door import AGGREGATIONS, Layout

if TYPE_CHECKING:
    import torch

    from pipeline.plan import Facts

SUMS = frozenset({"vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "dro", "cispo"})
"""verl's losses that are exact sums over tokens or rows: the test of micro-batches holds each to it."""

ONE_AGGREGATION = {"sapo": "seq-mean-token-mean", "geo_mean": "its own mean over rows"}
"""verl's losses that ignore `loss_agg_mode`, and what they do."""

BY_ENGINE = frozenset({"bypass_mode"})
"""verl's losses whose old log-probs must be those of the engine that sampled."""

KL_TOKENS, KL_SHARE = 1024, 16
"""The step's KL is measured on this many tokens (prompts included) of its last update, or on one of `KL_SHARE` parts if
that is more: a forward pass of small cost."""


@dataclass(slots=True, kw_only=True)
class RolloutCorrection:
    """verl's rollout correction, read by the loss `bypass_mode`."""

    loss_type: str = setting("ppo_clip", doc="ppo_clip or reinforce")
    rollout_is: str | None = setting("sequence", doc="importance weights by token or sequence; null: none")
    rollout_is_threshold: float = setting(2.0, above=0, doc="weights are cut here")
    rollout_is_batch_normalize: bool = setting(False, doc="scale weights to mean 1")
    rollout_rs: str | None = setting(None, doc="rejection, such as token_k1, seq_mean_k3; null: none")
    rollout_rs_threshold: float | None = setting(None, above=0, doc="limit of the rejection")


@dataclass(slots=True, kw_only=True)
class TorchTrainerConfig(LearningConfig):
    """Names of loss settings are verl's."""

    policy_loss: str = setting("vanilla", doc="a name in verl's registry of policy losses; vanilla is PPO's clipped loss")
    loss_agg_mode: str = setting("", doc=f"{', '.join(AGGREGATIONS)}; empty: the loss's own")
    loss_scale_factor: float | None = setting(None, above=0, doc="divisor of seq-mean-token-sum-norm, in tokens")
    clip_ratio: float = setting(0.2, min=0, doc="how far the ratio of new to old probability may move from 1")
    clip_ratio_low: float | None = setting(None, min=0, max=1, doc="below 1; null: clip_ratio")
    clip_ratio_high: float | None = setting(None, min=0, doc="above 1; null: clip_ratio")
    clip_ratio_c: float = setting(3.0, above=1, doc="dual clip: the largest ratio where the advantage is negative")
    entropy_coef: float = setting(0.0, min=0, doc="weight of the entropy that is added to the objective")
    tau_pos: float = setting(1.0, above=0, doc="sapo: temperature for positive advantages")
    tau_neg: float = setting(1.05, above=0, doc="sapo: temperature for negative advantages")
    clip_cov_ratio: float = setting(0.0002, min=0, max=1, doc="clip_cov: share of tokens that is clipped")
    clip_cov_lb: float = setting(1.0, doc="clip_cov: lowest covariance that is clipped")
    clip_cov_ub: float = setting(5.0, doc="clip_cov: highest covariance that is clipped")
    kl_cov_ratio: float = setting(0.0002, min=0, max=1, doc="kl_cov: share of tokens that is penalised")
    ppo_kl_coef: float = setting(0.1, min=0, doc="kl_cov: weight of the penalty")
    dro_beta: float | None = setting(None, above=0, doc="dro: weight of the squared log-ratio; needed by dro")
    rollout_correction: RolloutCorrection = setting(RolloutCorrection, doc="bypass_mode")


@dataclass(frozen=True, slots=True)
class _Targets:
    """What the loss compares the policy with, as flat tensors [N] over the response tokens of a batch."""

    old: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    offsets: np.ndarray

    def of(self, rows: np.ndarray) -> tuple[Layout, dict[str, torch.Tensor]]:
        """For the given rows, in verl's names and [B, T]."""
        import torch

        lengths = np.diff(self.offsets)[rows]
        layout = Layout(lengths, self.old.device)
        starts = np.repeat(self.offsets[rows] - np.cumsum(lengths) + lengths, lengths)
        place = torch.from_numpy(starts + np.arange(len(starts))).to(self.old.device)
        names = {"old_log_prob": self.old, "advantages": self.advantages, "response_mask": self.mask}
        return layout, {name: layout.pad(values[place]) for name, values in names.items()}


@backend("trainer", "torch")
class TorchTrainer(Trainer):
    """The model stays in eval mode: without dropout the first update's ratio is 1, as PPO assumes. Weights and
    AdamW are in float32; a bfloat16 model computes under autocast.

    `version` counts the calls of `learn` that changed the weights.
    """

    requires = ("torch", "transformers", "verl")

    def __init__(self, cfg: TorchTrainerConfig, model: Model):
        self.cfg, self.model = cfg, model

    # -- plan ------------------------------------------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        loss = verl_door.policy_losses().get(self.cfg.policy_loss)
        return {"policy_loss": self.cfg.policy_loss, "loss_agg_mode": self._aggregation()} if loss else {}

    def _aggregation(self) -> str:
        own = ONE_AGGREGATION.get(self.cfg.policy_loss)
        if own or self.cfg.loss_agg_mode:
            return own or self.cfg.loss_agg_mode
        return str(verl_door.policy_losses()[self.cfg.policy_loss].defaults.get("loss_agg_mode", AGGREGATIONS[0]))

    def check(self, facts: Facts) -> Iterable[Problem]:
        cfg, key, table = self.cfg, facts.key, verl_door.policy_losses()
        yield from learning.check_mini_batch(facts, cfg.mini_batch)
        if table and cfg.policy_loss not in table:
            yield Problem(where=f"{key}.policy_loss", what=f"verl has no policy loss '{cfg.policy_loss}'", hint=near(cfg.policy_loss, table))
        if cfg.policy_loss == "dro" and cfg.dro_beta is None:
            yield Problem(where=f"{key}.dro_beta", what="must be given for policy_loss=dro", hint="a number above 0, such as 0.1")
        correction, where = cfg.rollout_correction, f"{key}.rollout_correction"
        if correction.loss_type not in (types := ("ppo_clip", "reinforce")):
            yield Problem(where=f"{where}.loss_type", what=f"there is no '{correction.loss_type}'", hint=near(correction.loss_type, types))
        if correction.rollout_is not in (None, "token", "sequence"):
            yield Problem(where=f"{where}.rollout_is", what=f"there is no '{correction.rollout_is}'", hint=near(correction.rollout_is, ("token", "sequence")))
        if correction.rollout_rs and correction.rollout_rs_threshold is None:
            yield Problem(where=f"{where}.rollout_rs_threshold", what=f"must be given for rollout_rs={correction.rollout_rs}", hint="a number above 0")
        if cfg.loss_agg_mode:
            yield from self._check_aggregation(key)

    def _check_aggregation(self, key: str) -> Iterable[Problem]:
        cfg = self.cfg
        if cfg.loss_agg_mode not in AGGREGATIONS:
            yield Problem(where=f"{key}.loss_agg_mode", what=f"there is no '{cfg.loss_agg_mode}'", hint=near(cfg.loss_agg_mode, AGGREGATIONS))
        elif ONE_AGGREGATION.get(cfg.policy_loss, cfg.loss_agg_mode) != cfg.loss_agg_mode:
            what = f"{cfg.policy_loss} ignores it: it always takes {ONE_AGGREGATION[cfg.policy_loss]}"
            yield Problem(where=f"{key}.loss_agg_mode", what=what, hint="leave it empty")
        elif cfg.loss_agg_mode == "seq-mean-token-sum-norm" and cfg.loss_scale_factor is None:
            what = "must be given for loss_agg_mode=seq-mean-token-sum-norm, or the loss would depend on the padding"
            yield Problem(where=f"{key}.loss_scale_factor", what=what, hint="such as the value of rollout.max_new_tokens")

    # -- life ------------------------------------------------------------------------------------------------

    def open(self, ctx: Context) -> None:
        import torch

        super().open(ctx)
        core = verl_door.core_algos()
        torch.set_num_threads(ctx.threads)
        self._loss: Callable[..., tuple[torch.Tensor, dict[str, Any]]] = core.get_policy_loss_fn(self.cfg.policy_loss)
        self._agg_loss = core.agg_loss
        self._is_sum = self.cfg.policy_loss in SUMS and verl_door.is_own(self._loss)
        self._module = self.model.load(ctx.device).float().eval()
        self._optimizer = Optimizer(self._module.parameters(), self.cfg, ctx)
        self._actor = self._actor_config()
        self._version = 0
        self._published: int | None = None
        self._moved = False

    def _actor_config(self) -> Any:
        """verl's ActorConfig: the settings that losses read. Nothing of it but these is used.

        verl's losses let `clip_ratio_low` and `clip_ratio_high`, which are never unset there, win over `clip_ratio`.
        """
        from verl.trainer.config.algorithm import RolloutCorrectionConfig
        from verl.workers.config import ActorConfig, PolicyLossConfig

        cfg, c = self.cfg, self.cfg.rollout_correction
        correction = RolloutCorrectionConfig(
            rollout_is=c.rollout_is,
            rollout_is_threshold=c.rollout_is_threshold,
            rollout_is_batch_normalize=c.rollout_is_batch_normalize,
            rollout_rs=c.rollout_rs,
            rollout_rs_threshold=c.rollout_rs_threshold,
            loss_type=c.loss_type,
        )
        loss = PolicyLossConfig(
            loss_mode=cfg.policy_loss,
            clip_cov_ratio=cfg.clip_cov_ratio,
            clip_cov_lb=cfg.clip_cov_lb,
            clip_cov_ub=cfg.clip_cov_ub,
            kl_cov_ratio=cfg.kl_cov_ratio,
            ppo_kl_coef=cfg.ppo_kl_coef,
            dro_beta=cfg.dro_beta,
            rollout_correction=correction,
        )
        aggregation = self._aggregation()
        return ActorConfig(
            strategy="headrace",
            rollout_n=1,
            use_dynamic_bsz=True,
            clip_ratio=cfg.clip_ratio,
            clip_ratio_low=cfg.clip_ratio if cfg.clip_ratio_low is None else cfg.clip_ratio_low,
            clip_ratio_high=cfg.clip_ratio if cfg.clip_ratio_high is None else cfg.clip_ratio_high,
            clip_ratio_c=cfg.clip_ratio_c,
            tau_pos=cfg.tau_pos,
            tau_neg=cfg.tau_neg,
            loss_agg_mode=aggregation if aggregation in AGGREGATIONS else AGGREGATIONS[0],
            policy_loss=loss,
        )

    def state_dict(self) -> dict[str, Any]:
        return {"module": learning.cloned(self._module.state_dict()), "optimizer": self._optimizer.state_dict(), "version": self._version}

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
        check = zlib.crc32(snapshot.data)
        if self._moved and check == self._published:
            what = f"version {self._version}: the updates since the last publication changed no bit of the weights"
            raise ValueError(f"{what}; {self.ctx.node}.lr={self.cfg.lr} is too small for float32, or another module is trained")
        self._published, self._moved = check, False
        return snapshot

    # -- log-probs -------------------------------------------------------------------------------------------

    def run(self, rollouts: RolloutBatch) -> LogProbBatch:
        import torch

        out = np.zeros((2, len(rollouts.response_ids.values)), np.float32)
        offsets = rollouts.response_ids.offsets
        with torch.no_grad():
            for micro in micro_batches(rollouts, np.arange(len(rollouts)), self.cfg.micro_tokens, self.ctx.device):
                log_probs, entropy = self._forward(micro, temperature_of(rollouts), entropy=True)
                values = torch.stack([log_probs, entropy]).cpu().numpy()
                out[:, np.concatenate([np.arange(offsets[r], offsets[r + 1]) for r in micro.rows])] = values
        self._measure_drift(rollouts, out[0])
        return LogProbBatch(
            step=rollouts.step,
            row_id=rollouts.row_id,
            group_id=rollouts.group_id,
            version=self._version,
            log_probs=rollouts.response_ids.with_values(out[0]),
            entropy=rollouts.response_ids.with_values(out[1]),
        )

    def _forward(self, micro: MicroBatch, temperature: float, *, entropy: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs, and with `entropy` also entropies (else an empty tensor), [N] in float32, of the response
        tokens under softmax(logits / temperature)."""
        import torch

        with torch.autocast(micro.ids.device.type, torch.bfloat16, enabled=self.model.dtype_name == "bfloat16"), _only(self._module, micro.predicts):
            logits = self._module(input_ids=micro.ids, use_cache=False).logits[0]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if temperature != 1.0:
            logits = logits / temperature
        normaliser = logits.logsumexp(-1)
        log_probs = logits.gather(-1, micro.targets[:, None])[:, 0] - normaliser
        if not entropy:
            return log_probs, log_probs.new_zeros(0)
        return log_probs, normaliser - (logits.softmax(-1) * logits).sum(-1)

    def _measure_drift(self, rollouts: RolloutBatch, ours: np.ndarray) -> None:
        """How far the engine's log-probs are from the trainer's; a greedy batch is no sample of a policy."""
        theirs = rollouts.log_probs.values
        told = rollouts.loss_mask.values & np.isfinite(theirs)
        if rollouts.temperature > 0:
            self.ctx.meter.add("policy/engine_drift", (np.abs(ours[told] - theirs[told]).sum(dtype=np.float64), told.sum()), "ratio")

    # -- updates ---------------------------------------------------------------------------------------------

    def learn(self, rollouts: RolloutBatch, old: LogProbBatch, advantages: AdvantageBatch) -> None:
        started, seen, done = time.monotonic(), 0, 0
        targets = self._targets(rollouts, old, advantages)
        last: np.ndarray | None = None
        for number, rows in enumerate(learning.mini_batches(self.ctx, self.cfg, advantages)):
            micros = list(micro_batches(rollouts, rows, self.cfg.micro_tokens, self.ctx.device))
            seed = int(self.ctx.seed(f"{self.ctx.node}/loss", rollouts.step, number))
            self.ctx.meter.add("policy/loss", self._accumulate(micros, targets, temperature_of(rollouts), seed))
            norm = self._optimizer.step()
            if norm is not None:
                self.ctx.meter.add("policy/grad_norm", norm)
                done, last = done + 1, rows
                self._moved |= norm > 0
            seen += sum(m.tokens for m in micros)
            slots = sum(m.slots for m in micros)
            self.ctx.meter.add(f"{self.ctx.node}/padding_ratio", (slots - sum(m.tokens for m in micros), slots), "ratio")
        self._version += done > 0
        mask = advantages.mask.values
        self.ctx.meter.add("policy/entropy", (old.entropy.values[mask].sum(dtype=np.float64), mask.sum()), "ratio")
        self.ctx.meter.add("policy/lr", self.cfg.lr, "last")
        self.ctx.meter.add(f"{self.ctx.node}/tokens_per_s", (seen, time.monotonic() - started), "ratio")
        if last is not None:
            self._measure_kl(rollouts, last, old.log_probs, advantages.mask)

    def _targets(self, rollouts: RolloutBatch, old: LogProbBatch, advantages: AdvantageBatch) -> _Targets:
        import torch

        before = old.log_probs
        if self.cfg.policy_loss in BY_ENGINE:
            before = rollouts.log_probs
            unknown = ~np.isfinite(before.values) & advantages.mask.values
            if unknown.any():
                rows = rollouts.row_id[np.unique(before.row_of_value()[unknown])]
                raise ValueError(f"policy_loss={self.cfg.policy_loss} needs the engine's log-probs, which rows {rows[:8].tolist()} lack")
        mask = torch.from_numpy(np.array(advantages.mask.values)).to(self.ctx.device)
        old_values, adv_values = (torch.from_numpy(np.nan_to_num(x)).to(self.ctx.device) for x in (before.values, advantages.advantages.values))
        return _Targets(old_values, adv_values, mask, rollouts.response_ids.offsets)

    def _accumulate(self, micros: Sequence[MicroBatch], targets: _Targets, temperature: float, seed: int) -> float:
        """Add the mini-batch's gradient to the parameters, and return its loss."""
        rows = np.concatenate([m.rows for m in micros])
        layout, whole = targets.of(rows)
        self._actor.global_batch_info.clear()
        self._actor.global_batch_info.update(learning.batch_info(whole["response_mask"], self.cfg.loss_scale_factor))
        if len(micros) > 1 and not self._is_sum:
            return self._whole(micros, layout, whole, targets, temperature, seed)
        total = 0.0
        for micro in micros:
            part, inputs = targets.of(micro.rows) if len(micros) > 1 else (layout, whole)
            log_probs, entropy = self._forward(micro, temperature, entropy=self.cfg.entropy_coef > 0)
            loss = self._policy_loss(part.pad(log_probs), inputs, seed) - self._bonus(part, entropy, inputs)
            loss.backward()
            total += float(loss.detach())
        return total

    def _whole(
        self, micros: Sequence[MicroBatch], layout: Layout, whole: dict[str, torch.Tensor], targets: _Targets, temperature: float, seed: int
    ) -> float:
        """For a loss L that reads statistics of the mini-batch: first dL/dlogp of all tokens, then, micro-batch by
        micro-batch, the gradient of sum(dL/dlogp * logp), which is L's by the chain rule. Costs one more forward."""
        import torch

        with torch.no_grad():
            flat = torch.cat([self._forward(m, temperature)[0] for m in micros])
        leaf = layout.pad(flat).requires_grad_()
        loss = self._policy_loss(leaf, whole, seed)
        total = float(loss.detach())
        slopes = layout.unpad(torch.autograd.grad(loss, leaf)[0]).split([len(m.targets) for m in micros])
        for micro, slope in zip(micros, slopes, strict=True):
            part, inputs = targets.of(micro.rows)
            log_probs, entropy = self._forward(micro, temperature, entropy=self.cfg.entropy_coef > 0)
            bonus = self._bonus(part, entropy, inputs)
            ((slope * log_probs).sum() - bonus).backward()
            total -= float(bonus.detach())
        return total

    def _policy_loss(self, log_prob: torch.Tensor, inputs: dict[str, torch.Tensor], seed: int) -> torch.Tensor:
        """verl's loss of [B, T] log-probs; its metrics go to the meter, weighted by tokens."""
        with _seeded(seed, log_prob.device.type):
            loss, metrics = self._loss(log_prob=log_prob, loss_agg_mode=self._actor.loss_agg_mode, config=self._actor, **inputs)
        tokens = int(inputs["response_mask"].sum())
        for name, value in metrics.items():
            self.ctx.meter.add(METRICS.get(name, f"policy/{name.removeprefix('actor/')}"), (float(value) * tokens, tokens), "ratio")
        return loss

    def _bonus(self, layout: Layout, entropy: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """The weighted entropy, aggregated like the loss."""
        if not self.cfg.entropy_coef:
            return entropy.sum()  # of no entries
        info = self._actor.global_batch_info
        return self.cfg.entropy_coef * self._agg_loss(layout.pad(entropy), inputs["response_mask"], self._actor.loss_agg_mode, **info)

    def _measure_kl(self, rollouts: RolloutBatch, rows: np.ndarray, old: Ragged, mask: Ragged) -> None:
        """KL(before the step || after it), by the estimator r - 1 - log r with r = new / old (Schulman 2020, k3), on
        some of the last update's rows. What verl's losses report is taken before their own update: 0 for the first."""
        import torch

        lengths = (rollouts.prompt_ids.lengths + rollouts.response_ids.lengths)[rows]
        tokens = max(KL_TOKENS, int(lengths.sum()) // KL_SHARE)
        rows = rows[: max(int(np.searchsorted(np.cumsum(lengths), tokens, side="right")), 1)]
        with torch.no_grad():
            for micro in micro_batches(rollouts, rows, self.cfg.micro_tokens, self.ctx.device):
                new = self._forward(micro, temperature_of(rollouts))[0].cpu().numpy().astype(np.float64)
                chosen = mask.take(micro.rows).values
                log_ratio = (new - old.take(micro.rows).values)[chosen]
                self.ctx.meter.add("policy/kl", (np.sum(np.expm1(log_ratio) - log_ratio), chosen.sum()), "ratio")


METRICS = {"actor/pg_clipfrac": "policy/clip_fraction", "actor/pg_clipfrac_lower": "policy/clip_fraction_lower", "actor/ppo_kl": "policy/kl_in_loss"}
"""Headrace's names for what verl's losses report."""


def temperature_of(rollouts: RolloutBatch) -> float:
    """The temperature of the log-probs: a greedy batch has those of temperature 1."""
    return rollouts.temperature or 1.0


@contextmanager
def _only(module: torch.nn.Module, positions: torch.Tensor):
    """Inside, the model's head sees only these of the flattened [R * L] positions, so logits are [1, N, V].

    A hook, and not the head called by hand: what a model does to its logits afterwards (scaling, soft-capping) stays.
    """
    head = module.get_output_embeddings()  # pyright: ignore[reportCallIssue]
    hook = head.register_forward_pre_hook(lambda _, args: (args[0].flatten(0, 1)[positions][None],))
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def _seeded(seed: int, device: str):
    """Inside, torch's global generators start from `seed` (clip_cov draws from them); outside they are untouched."""
    import torch

    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if device == "cuda" else []):
        torch.manual_seed(seed)
        yield
