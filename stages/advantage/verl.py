"""verl's registered advantage estimators, called by name.

The registered function is called directly. verl's own wrapper (`ray_trainer.compute_advantage`) drops settings
of some estimators and takes twice as long to import.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.context import Context
from pipeline.errors import Problem, near
from pipeline.registry import backend
from pipeline.stage import setting
from stages import verl_door
from stages.advantage import Advantage
from stages.records import AdvantageBatch, LogProbBatch, RewardBatch, RolloutBatch, Status, ValueBatch
from stages.verl_door import Layout, Signature

if TYPE_CHECKING:
    from pipeline.plan import Facts

PORTS = {"values": "values", "old_log_probs": "old"}
"""Inputs of estimators that come from optional ports of this node."""

ALWAYS = ("token_level_rewards", "response_mask", "index", "config", "non_tensor_batch", "batch")
"""Inputs that this stage makes from the rollouts and rewards."""

SETTINGS = ("gamma", "lam", "norm_adv_by_std_in_grpo", "epsilon", "f_norm")
"""Inputs that are settings, under their own names."""

MAKERS = {
    "values": "a critic: graph.forward.{key}.values",
    "old_log_probs": "a trainer's log-probs: graph.forward.{key}.old",
    "reward_baselines": "the reward of a greedy response to each prompt, which no stage here makes",
    "sum_pi_squared": "the sum of squared token probabilities, which no trainer here computes",
}

WHITENS = frozenset({"gae", "gdpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"})
"""Estimators of verl that divide by the standard deviation over all tokens, which one token does not have."""

LEAST_GROUP = {"grpo_passk": 2}
"""Rows a group must have for estimators that refuse smaller ones."""


@dataclass(slots=True, kw_only=True)
class VerlAdvantageConfig:
    """Names of settings are verl's. A setting that the chosen estimator does not read is a warning of the plan."""

    estimator: str = setting("gae", doc="a name in verl's registry of advantage estimators")
    gamma: float = setting(1.0, min=0, max=1, doc="discount per token")
    lam: float = setting(1.0, min=0, max=1, doc="lambda of GAE: 1 is the return, 0 the one-step error")
    norm_adv_by_std_in_grpo: bool = setting(True, doc="divide by the standard deviation of the group (false: Dr. GRPO)")
    epsilon: float | None = setting(None, above=0, doc="added to standard deviations; null: the estimator's own")
    f_norm: float | None = setting(None, above=0, doc="divisor of gpg; null: the estimator's own")
    reward_weights: list[float] = setting([], doc="weights of the reward's parts, for gdpo; empty: 1 each")


@backend("advantage", "verl")
class VerlAdvantage(Advantage):
    """Rows that are not OK, and rows without a learnable token, are taken out before the estimator sees the
    batch: masking a row would leave its score in the mean and deviation of its group."""

    requires = ("torch", "verl")

    def __init__(self, cfg: VerlAdvantageConfig):
        self.cfg = cfg

    def open(self, ctx: Context) -> None:
        super().open(ctx)
        self._function = verl_door.core_algos().get_adv_estimator_fn(self.cfg.estimator)
        self._signature = verl_door.estimators()[self.cfg.estimator]

    # -- plan ------------------------------------------------------------------------------------------------

    def check(self, facts: Facts) -> Iterable[Problem]:
        table, where, name = verl_door.estimators(), f"{facts.key}.estimator", self.cfg.estimator
        if not table:  # verl is missing, which `requires` reports
            return
        if name not in table:
            yield Problem(where=where, what=f"verl has no advantage estimator '{name}'", hint=near(name, table))
            return
        yield from self._unfed(table[name], facts, where)
        yield from self._useless(table[name], facts, where)
        least, rows = LEAST_GROUP.get(name, 1), facts.values.get("samples_per_prompt")
        if rows is not None and rows < least:
            yield Problem(
                where=where,
                what=f"{name} compares {least} or more samples of a prompt, and there is {rows}",
                hint="raise rollout.n",
            )
        elif rows == 1 and table[name].takes("index") and table[name].own:
            yield Problem(
                where=where,
                what=f"{name} compares the samples of a prompt, and there is only one",
                hint="raise rollout.n",
                level="warning",
            )

    def _unfed(self, signature: Signature, facts: Facts, where: str) -> Iterable[Problem]:
        """Inputs that the estimator needs and nothing feeds."""
        have = {*ALWAYS, *SETTINGS, *(n for n, port in PORTS.items() if port in facts.fed)}
        missing = [n for n in signature.required if n not in have]
        if missing:
            able = [n for n, s in verl_door.estimators().items() if have.issuperset(s.required)]
            feeds = "; ".join(f"{n}: {MAKERS.get(n, 'no stage here makes it').format(key=facts.key)}" for n in missing)
            what = f"{self.cfg.estimator} needs {', '.join(missing)}, which nothing feeds"
            yield Problem(
                where=where,
                what=what,
                hint=f"{feeds}. Estimators that need no more than is wired: {', '.join(sorted(able))}",
            )

    def _useless(self, signature: Signature, facts: Facts, where: str) -> Iterable[Problem]:
        """What is wired or set and has no effect."""
        name = self.cfg.estimator
        if "values" in facts.fed and not signature.takes("values"):
            able = [n for n, s in verl_door.estimators().items() if s.takes("values")]
            hint = f"take the critic out of graph.forward and graph.learn, or choose one of: {', '.join(able)}"
            yield Problem(
                where=where, what=f"{name} uses no values: the critic's work is for nothing", hint=hint, level="warning"
            )
        default = VerlAdvantageConfig()
        for key in SETTINGS:
            if getattr(self.cfg, key) != getattr(default, key) and not signature.takes(key):
                yield Problem(
                    where=f"{facts.key}.{key}", what=f"has no effect: {name} does not read it", level="warning"
                )
        if self.cfg.reward_weights and not signature.takes("gdpo_reward_weights"):
            yield Problem(
                where=f"{facts.key}.reward_weights", what=f"has no effect: {name} does not read it", level="warning"
            )

    # -- run -------------------------------------------------------------------------------------------------

    def run(
        self,
        rollouts: RolloutBatch,
        rewards: RewardBatch,
        old: LogProbBatch | None = None,
        values: ValueBatch | None = None,
    ) -> AdvantageBatch:
        """ValueError if a row with status OK has no finite score, or the estimator gives what is not finite."""
        mask = learnable(rollouts, rewards)
        rows, lone = self._kept(rollouts, mask)
        self.ctx.meter.add("advantage/lone_rows", lone, "sum")
        seen = np.isin(rollouts.loss_mask.row_of_value(), rows)
        mask &= seen
        advantages, returns = np.zeros(len(mask), np.float32), np.zeros(len(mask), np.float32)
        if len(rows):
            advantages[seen], returns[seen] = self._estimate(rollouts, rewards, old, values, rows, mask[seen])
        _measure(self.ctx, rollouts, rewards, advantages[mask])
        ragged = rollouts.loss_mask.with_values
        return AdvantageBatch(
            step=rollouts.step,
            row_id=rollouts.row_id,
            group_id=rollouts.group_id,
            advantages=ragged(advantages),
            returns=ragged(returns),
            mask=ragged(mask),
        )

    def _kept(self, rollouts: RolloutBatch, mask: np.ndarray) -> tuple[np.ndarray, int]:
        """Positions of the rows that the estimator sees, and how many it does not, for want of a group.

        Of a group that shrank to one row verl takes the mean as 0 and the deviation as 1: the raw reward would be
        the advantage, and push up whatever row was left.
        """
        rows = np.unique(rollouts.loss_mask.row_of_value()[mask])
        groups, sizes = np.unique(rollouts.group_id[rows], return_counts=True)
        compares = self._signature.own and self._signature.takes("index") and rollouts.group_size > 1
        least = LEAST_GROUP.get(self.cfg.estimator, 2 if compares else 1)
        kept = rows[np.isin(rollouts.group_id[rows], groups[sizes >= least])]
        return kept, len(rows) - len(kept)

    def _estimate(
        self,
        rollouts: RolloutBatch,
        rewards: RewardBatch,
        old: LogProbBatch | None,
        values: ValueBatch | None,
        rows: np.ndarray,
        mask: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Advantages and returns, float32, of all response tokens of `rows`; zero where `mask` is False."""
        import torch

        kept = rollouts.loss_mask.take(rows)
        scores, before = rewards.score[rows], values.values.take(rows).values if values else None
        if not np.isfinite(scores).all():
            bad = rollouts.row_id[rows][~np.isfinite(scores)]
            raise ValueError(f"rows {bad[:8].tolist()} have status OK, but their score is not a finite number")
        token_rewards = scores_on_last(scores, kept.with_values(mask).rows())
        if mask.sum() == 1 and self._signature.own and self.cfg.estimator in WHITENS:
            # One token has no deviation to divide by: what is left is the plain advantage of the only row.
            baseline = (
                before if before is not None and self._signature.takes("values") else np.zeros_like(token_rewards)
            )
            return np.where(mask, token_rewards - baseline, 0), token_rewards
        layout = Layout(kept.lengths)
        inputs: dict[str, Any] = {
            "token_level_rewards": layout.pad(token_rewards),
            "response_mask": layout.pad(mask.astype(np.float32)),
            "index": verl_door.group_index(rollouts.group_id[rows]),
            **self._config_and_parts(rewards, rows, layout),
        }
        if before is not None:
            inputs["values"] = layout.pad(before.astype(np.float32))
        if old is not None:
            inputs["old_log_probs"] = layout.pad(old.log_probs.take(rows).values.astype(np.float32))
        inputs |= {k: v for k in SETTINGS if (v := getattr(self.cfg, k)) is not None}
        if not self._signature.takes_any or self._signature.own:
            inputs = {k: v for k, v in inputs.items() if k in (*self._signature.required, *self._signature.optional)}
        with torch.no_grad():
            out = [layout.unpad(x).numpy() for x in self._function(**inputs)]
        advantages, returns = (np.where(mask, x, 0).astype(np.float32) for x in out)
        if not (np.isfinite(advantages).all() and np.isfinite(returns).all()):
            bad = rollouts.row_id[rows][
                np.unique(kept.row_of_value()[~np.isfinite(advantages) | ~np.isfinite(returns)])
            ]
            raise ValueError(
                f"estimator '{self.cfg.estimator}' gave advantages that are not finite for rows {bad[:8].tolist()}"
            )
        return advantages, returns

    def _config_and_parts(self, rewards: RewardBatch, rows: np.ndarray, layout: Layout) -> dict[str, Any]:
        """verl's AlgoConfig, and the parts of the reward for estimators that normalise them one by one.

        A reward of one part is its score: there is nothing to take apart.
        """
        import torch
        from verl.trainer.config import AlgoConfig

        cfg, names = self.cfg, list(rewards.part_names)
        apart = len(names) > 1 and self._signature.takes("gdpo_reward_keys")
        if apart and cfg.reward_weights and len(cfg.reward_weights) != len(names):
            raise ValueError(
                f"reward_weights has {len(cfg.reward_weights)} numbers, "
                f"but the reward has {len(names)} parts: {', '.join(names)}"
            )
        config = AlgoConfig(
            gamma=cfg.gamma,
            lam=cfg.lam,
            adv_estimator=cfg.estimator,
            norm_adv_by_std_in_grpo=cfg.norm_adv_by_std_in_grpo,
            gdpo_reward_keys=names if apart else None,
            gdpo_reward_weights=(cfg.reward_weights or [1.0] * len(names)) if apart else None,
        )
        if not apart:
            return {"config": config}
        present = layout.pad(np.ones(layout.tokens, np.int64))
        batch = {"prompts": torch.zeros(len(rows), 0), "attention_mask": present}
        return {
            "config": config,
            "non_tensor_batch": {n: rewards.parts[rows, i] for i, n in enumerate(names)},
            "batch": batch,
        }


def learnable(rollouts: RolloutBatch, rewards: RewardBatch) -> np.ndarray:
    """bool [N]: the tokens that the policy chose, of rows whose rollout and reward are OK."""
    fine = (rollouts.status == Status.OK) & (rewards.status == Status.OK)
    return rollouts.loss_mask.values & fine[rollouts.loss_mask.row_of_value()]


def scores_on_last(scores: np.ndarray, masks: list[np.ndarray]) -> np.ndarray:
    """float32 [N]: each row's score on its last learnable token, zero elsewhere.

    A score on a token that is masked (a tool's answer, say) would be lost to every estimator that goes by token.
    """
    out: list[np.ndarray] = []
    for score, mask in zip(scores, masks, strict=True):
        row = np.zeros(len(mask), np.float32)
        row[np.flatnonzero(mask)[-1]] = score
        out.append(row)
    return np.concatenate(out)


def _measure(ctx: Context, rollouts: RolloutBatch, rewards: RewardBatch, advantages: np.ndarray) -> None:
    """Metrics; a group counts if at least two of its rows have a score."""
    if len(advantages):
        ctx.meter.add("advantage/mean", advantages.mean(dtype=np.float64))
        ctx.meter.add("advantage/std", advantages.std(dtype=np.float64))
    fine = (rollouts.status == Status.OK) & (rewards.status == Status.OK)
    index, scores = verl_door.group_index(rollouts.group_id[fine]), rewards.score[fine]
    size = np.bincount(index)
    low, high = np.full(len(size), np.inf), np.full(len(size), -np.inf)
    np.minimum.at(low, index, scores)
    np.maximum.at(high, index, scores)
    ctx.meter.add("advantage/zero_variance_groups", (np.sum((size >= 2) & (low == high)), np.sum(size >= 2)), "ratio")
