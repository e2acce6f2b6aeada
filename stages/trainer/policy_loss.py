"""verl's policy losses by name: their settings, their check, and the gradient of a mini-batch in micro-batches.

How a mini-batch is cut into micro-batches changes neither loss nor gradient. For losses that are sums over tokens or
rows, verl's global batch information makes the parts add up. All others see the whole mini-batch: see `_whole`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.context import Context
from pipeline.errors import Problem, near
from pipeline.stage import setting
from stages import verl_door
from stages.batching import MicroBatch
from stages.device import send
from stages.learning import LearningConfig, batch_info
from stages.records import AdvantageBatch, LogProbBatch, RolloutBatch
from stages.verl_door import AGGREGATIONS, Layout

if TYPE_CHECKING:
    import torch

    Score = Callable[[MicroBatch, bool], tuple[torch.Tensor, torch.Tensor]]
    """Log-probs [N] and, if asked for, entropies [N] of a micro-batch, with gradients where they are on."""

SUMS = frozenset({"vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "dro", "cispo"})
"""verl's losses that are exact sums over tokens or rows: the test of micro-batches holds each to it."""

ONE_AGGREGATION = {"sapo": "seq-mean-token-mean", "geo_mean": "its own mean over rows"}
"""verl's losses that ignore `loss_agg_mode`, and what they do."""

BY_ENGINE = frozenset({"bypass_mode"})
"""verl's losses whose old log-probs must be those of the engine that sampled."""

LOSS_SETTINGS = (
    "clip_ratio",
    "clip_ratio_low",
    "clip_ratio_high",
    "clip_ratio_c",
    "tau_pos",
    "tau_neg",
    "clip_cov_ratio",
    "clip_cov_lb",
    "clip_cov_ub",
    "kl_cov_ratio",
    "ppo_kl_coef",
    "dro_beta",
    "rollout_correction",
)
"""Settings that only some losses read, under verl's names."""

METRICS = {
    "actor/pg_clipfrac": "policy/clip_fraction",
    "actor/pg_clipfrac_lower": "policy/clip_fraction_lower",
    "actor/ppo_kl": "policy/kl_in_loss",
}
"""Headrace's names for what verl's losses report."""


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
class PolicyLossConfig(LearningConfig):
    """Names of loss settings are verl's."""

    policy_loss: str = setting(
        "vanilla", doc="a name in verl's registry of policy losses; vanilla is PPO's clipped loss"
    )
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


def aggregation(cfg: PolicyLossConfig) -> str:
    """How token losses become one number: as set, or as the loss has it."""
    own = ONE_AGGREGATION.get(cfg.policy_loss)
    if own or cfg.loss_agg_mode:
        return own or cfg.loss_agg_mode
    return str(verl_door.policy_losses()[cfg.policy_loss].defaults.get("loss_agg_mode", AGGREGATIONS[0]))


def check(key: str, cfg: PolicyLossConfig) -> Iterable[Problem]:
    """What is wrong with the settings of the loss of node `key`; nothing is imported."""
    table, name = verl_door.policy_losses(), cfg.policy_loss
    if table and name not in table:  # an empty table is verl missing, which `requires` reports
        yield Problem(where=f"{key}.policy_loss", what=f"verl has no policy loss '{name}'", hint=near(name, table))
    if name == "dro" and cfg.dro_beta is None:
        hint = "a number above 0, such as 0.1"
        yield Problem(where=f"{key}.dro_beta", what="must be given for policy_loss=dro", hint=hint)
    yield from _check_correction(f"{key}.rollout_correction", cfg.rollout_correction)
    if cfg.loss_agg_mode:
        yield from _check_aggregation(key, cfg)
    if name in table:
        yield from _check_unread(key, cfg)


def _check_unread(key: str, cfg: PolicyLossConfig) -> Iterable[Problem]:
    """Settings that were changed and have no effect with the chosen loss."""
    table, default = verl_door.policy_losses(), PolicyLossConfig()
    for name in LOSS_SETTINGS if table[cfg.policy_loss].own else ():  # of a plug-in it is not known what it reads
        if getattr(cfg, name) != getattr(default, name) and name not in _reads(cfg):
            hint = f"read by: {', '.join(n for n, s in table.items() if name in s.reads)}"
            what = f"has no effect: {cfg.policy_loss} does not read it"
            yield Problem(where=f"{key}.{name}", what=what, hint=hint, level="warning")
    if cfg.loss_scale_factor is not None and (mode := aggregation(cfg)) != "seq-mean-token-sum-norm":
        what = f"has no effect: the aggregation is {mode}"
        hint = f"set {key}.loss_agg_mode=seq-mean-token-sum-norm"
        yield Problem(where=f"{key}.loss_scale_factor", what=what, hint=hint, level="warning")


def _reads(cfg: PolicyLossConfig) -> frozenset[str]:
    """Settings that the chosen loss of verl reads, itself or in the loss it hands over to."""
    table = verl_door.policy_losses()
    handed = cfg.policy_loss in BY_ENGINE and cfg.rollout_correction.loss_type == "ppo_clip"
    return table[cfg.policy_loss].reads | (table["vanilla"].reads if handed else frozenset())


def _check_correction(where: str, c: RolloutCorrection) -> Iterable[Problem]:
    for name, allowed in (("loss_type", ("ppo_clip", "reinforce")), ("rollout_is", ("token", "sequence", None))):
        if (value := getattr(c, name)) not in allowed:
            hint = near(value, (a or "null" for a in allowed))
            yield Problem(where=f"{where}.{name}", what=f"there is no '{value}'", hint=hint)
    if c.rollout_rs and c.rollout_rs_threshold is None:
        what = f"must be given for rollout_rs={c.rollout_rs}"
        yield Problem(where=f"{where}.rollout_rs_threshold", what=what, hint="a number above 0")


def _check_aggregation(key: str, cfg: PolicyLossConfig) -> Iterable[Problem]:
    where, mode = f"{key}.loss_agg_mode", cfg.loss_agg_mode
    if mode not in AGGREGATIONS:
        yield Problem(where=where, what=f"there is no '{mode}'", hint=near(mode, AGGREGATIONS))
    elif ONE_AGGREGATION.get(cfg.policy_loss, mode) != mode:
        what = f"{cfg.policy_loss} ignores it: it always takes {ONE_AGGREGATION[cfg.policy_loss]}"
        yield Problem(where=where, what=what, hint="leave it empty")
    elif mode == "seq-mean-token-sum-norm" and cfg.loss_scale_factor is None:
        what = f"must be given for loss_agg_mode={mode}, or the loss would depend on the padding"
        hint = "such as the value of rollout.max_new_tokens"
        yield Problem(where=f"{key}.loss_scale_factor", what=what, hint=hint)


@dataclass(frozen=True, slots=True)
class Targets:
    """What the loss compares the policy with, as flat tensors [N] over the response tokens of a batch."""

    old: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    offsets: np.ndarray

    @classmethod
    def gather(
        cls, cfg: PolicyLossConfig, device: str, rollouts: RolloutBatch, old: LogProbBatch, advantages: AdvantageBatch
    ) -> Targets:
        """ValueError if the loss needs log-probs of the engine, and it could not tell some."""
        before, mask = old.log_probs, advantages.mask.values
        if cfg.policy_loss in BY_ENGINE:
            before = rollouts.log_probs
            unknown = ~np.isfinite(before.values) & mask
            if unknown.any():
                rows = rollouts.row_id[np.unique(before.row_of_value()[unknown])][:8].tolist()
                raise ValueError(f"policy_loss={cfg.policy_loss} needs the engine's log-probs, which rows {rows} lack")
        gained = advantages.advantages.values
        sent = send(device, old=np.nan_to_num(before.values), advantages=gained, mask=mask)
        return cls(**sent, offsets=rollouts.response_ids.offsets)

    def of(self, rows: np.ndarray) -> tuple[Layout, dict[str, torch.Tensor]]:
        """For the given rows, in verl's names and [B, T]."""
        lengths = np.diff(self.offsets)[rows]
        layout = Layout(lengths, self.old.device)
        starts = np.repeat(self.offsets[rows] - np.cumsum(lengths) + lengths, lengths)
        place = send(self.old.device, place=starts + np.arange(len(starts)))["place"]
        names = {"old_log_prob": self.old, "advantages": self.advantages, "response_mask": self.mask}
        return layout, {name: layout.pad(values[place]) for name, values in names.items()}


class PolicyLoss:
    """One of verl's losses, open: importing verl takes seconds. Its metrics go to the context's meter."""

    def __init__(self, cfg: PolicyLossConfig, ctx: Context):
        core = verl_door.core_algos()
        self.cfg, self.ctx = cfg, ctx
        self._loss: Callable[..., tuple[torch.Tensor, dict[str, Any]]] = core.get_policy_loss_fn(cfg.policy_loss)
        self._agg_loss = core.agg_loss
        self._is_sum = cfg.policy_loss in SUMS and verl_door.is_own(self._loss)
        self._actor = _actor_config(cfg)

    def accumulate(self, micros: Sequence[MicroBatch], targets: Targets, score: Score, seed: int) -> float:
        """Add the mini-batch's gradient to the parameters, and return its loss. `seed`: for losses that draw."""
        layout, whole = targets.of(np.concatenate([m.rows for m in micros]))
        self._actor.global_batch_info.clear()
        self._actor.global_batch_info.update(batch_info(whole["response_mask"], self.cfg.loss_scale_factor))
        if len(micros) > 1 and not self._is_sum:
            return self._whole(micros, layout, whole, targets, score, seed)
        total = 0.0
        for micro in micros:
            part, inputs = targets.of(micro.rows) if len(micros) > 1 else (layout, whole)
            log_probs, entropy = score(micro, self.cfg.entropy_coef > 0)
            loss = self._call(part.pad(log_probs), inputs, seed) - self._bonus(part, entropy, inputs)
            loss.backward()
            total += float(loss.detach())
        return total

    def _whole(
        self,
        micros: Sequence[MicroBatch],
        layout: Layout,
        whole: dict[str, torch.Tensor],
        targets: Targets,
        score: Score,
        seed: int,
    ) -> float:
        """For a loss L that reads statistics of the mini-batch: first dL/dlogp of all tokens, then, micro-batch by
        micro-batch, the gradient of sum(dL/dlogp * logp), which is L's by the chain rule. Costs one more forward."""
        import torch

        with torch.no_grad():
            flat = torch.cat([score(m, False)[0] for m in micros])
        leaf = layout.pad(flat).requires_grad_()
        loss = self._call(leaf, whole, seed)
        total = float(loss.detach())
        slopes = layout.unpad(torch.autograd.grad(loss, leaf)[0]).split([len(m.targets) for m in micros])
        for micro, slope in zip(micros, slopes, strict=True):
            part, inputs = targets.of(micro.rows)
            log_probs, entropy = score(micro, self.cfg.entropy_coef > 0)
            bonus = self._bonus(part, entropy, inputs)
            ((slope * log_probs).sum() - bonus).backward()
            total -= float(bonus.detach())
        return total

    def _call(self, log_prob: torch.Tensor, inputs: dict[str, torch.Tensor], seed: int) -> torch.Tensor:
        """verl's loss of [B, T] log-probs; its metrics go to the meter, weighted by tokens."""
        with _seeded(seed, log_prob.device.type):
            loss, metrics = self._loss(
                log_prob=log_prob, loss_agg_mode=self._actor.loss_agg_mode, config=self._actor, **inputs
            )
        tokens = int(inputs["response_mask"].sum())
        for name, value in metrics.items():
            self.ctx.meter.add(
                METRICS.get(name, f"policy/{name.removeprefix('actor/')}"), (float(value) * tokens, tokens), "ratio"
            )
        return loss

    def _bonus(self, layout: Layout, entropy: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """The weighted entropy, aggregated like the loss."""
        if not self.cfg.entropy_coef:
            return entropy.sum()  # of no entries
        info = self._actor.global_batch_info
        return self.cfg.entropy_coef * self._agg_loss(
            layout.pad(entropy), inputs["response_mask"], self._actor.loss_agg_mode, **info
        )


def _actor_config(cfg: PolicyLossConfig) -> Any:
    """verl's ActorConfig: the settings that losses read. Nothing of it but these is used.

    verl's losses let `clip_ratio_low` and `clip_ratio_high`, which are never unset there, win over `clip_ratio`.
    """
    from verl.trainer.config.algorithm import RolloutCorrectionConfig
    from verl.workers.config import ActorConfig
    from verl.workers.config import PolicyLossConfig as VerlLossConfig

    c = cfg.rollout_correction
    correction = RolloutCorrectionConfig(
        rollout_is=c.rollout_is,
        rollout_is_threshold=c.rollout_is_threshold,
        rollout_is_batch_normalize=c.rollout_is_batch_normalize,
        rollout_rs=c.rollout_rs,
        rollout_rs_threshold=c.rollout_rs_threshold,
        loss_type=c.loss_type,
    )
    loss = VerlLossConfig(
        loss_mode=cfg.policy_loss,
        clip_cov_ratio=cfg.clip_cov_ratio,
        clip_cov_lb=cfg.clip_cov_lb,
        clip_cov_ub=cfg.clip_cov_ub,
        kl_cov_ratio=cfg.kl_cov_ratio,
        ppo_kl_coef=cfg.ppo_kl_coef,
        dro_beta=cfg.dro_beta,
        rollout_correction=correction,
    )
    mode = aggregation(cfg)
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
        loss_agg_mode=mode if mode in AGGREGATIONS else AGGREGATIONS[0],
        policy_loss=loss,
    )


@contextmanager
def _seeded(seed: int, device: str) -> Iterator[None]:
    """Inside, torch's global generators start from `seed` (clip_cov draws from them); outside they are untouched."""
    import torch

    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if device == "cuda" else []):
        torch.manual_seed(seed)
        yield
