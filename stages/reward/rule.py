"""Reward by rules: a weighted sum of simple, verifiable parts."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.errors import Problem
from pipeline.plan import Facts
from pipeline.registry import backend
from pipeline.stage import setting
from stages.reward.assembly import WorkerReward, WorkerRewardConfig
from stages.reward.rules import RuleScorer
from stages.reward.workers import Scorer


@dataclass(slots=True, kw_only=True)
class RuleWeights:
    """What each part, a number in 0..1, counts in the sum; 0: it is not computed. Below 0: a penalty."""

    exact: float = setting(1.0, doc="the response without surrounding space is the answer")
    numeric: float = setting(0.0, doc="the last number of the response equals the answer, exactly")
    contains: float = setting(0.0, doc="the answer's text stands in the response")
    regex: float = setting(0.0, doc="`pattern` is found in the response")
    length: float = setting(0.0, doc="the response has min_tokens to max_tokens tokens")
    maths_verify: float = setting(0.0, doc="math-verify finds response and answer equal (numbers, LaTeX)")


@dataclass(slots=True, kw_only=True)
class RuleRewardConfig(WorkerRewardConfig):
    """Settings of the rule reward."""

    weights: RuleWeights = setting(RuleWeights, doc="the score is the sum of weight times part")
    pattern: str = setting("", doc="for regex: searched anywhere; a group (?P<answer>...) must also be the answer")
    min_tokens: int = setting(0, min=0, doc="for length")
    max_tokens: int = setting(0, min=0, doc="for length; 0: no limit")


@backend("reward", "rule")
class RuleReward(WorkerReward):
    """Accuracy is 1 where every part with a weight above 0 is 1; length does not count, unless it is alone."""

    def __init__(self, cfg: RuleRewardConfig):
        super().__init__(cfg)
        self.rules = cfg

    def scorer(self) -> tuple[Callable[..., Scorer], tuple[Any, ...]]:
        weights = {name: w for name, w in asdict(self.rules.weights).items() if w}
        return RuleScorer, (weights, self.rules.pattern, self.rules.min_tokens, self.rules.max_tokens)

    def check(self, facts: Facts) -> Iterator[Problem]:
        cfg, weights = self.rules, asdict(self.rules.weights)
        at = f"{facts.key}.weights"
        for name in (n for n, w in weights.items() if not math.isfinite(w)):
            yield Problem(where=f"{at}.{name}", what=f"{weights[name]} is not allowed", hint="a finite number")
        if not any(weights.values()):
            hint = f"give one of these a weight: {', '.join(weights)}"
            yield Problem(where=at, what="are all 0, so every score would be 0", hint=hint)
        yield from self._check_pattern(facts.key)
        if weights["length"] and not (cfg.min_tokens or cfg.max_tokens):
            hint = "set min_tokens or max_tokens"
            yield Problem(where=f"{at}.length", what="has no limits, so every length is right", hint=hint)
        for name in ("min_tokens", "max_tokens") if not weights["length"] else ():
            if getattr(cfg, name):
                what, hint = "has no effect, since weights.length is 0", f"set {at}.length"
                yield Problem(where=f"{facts.key}.{name}", what=what, hint=hint, level="warning")
        if cfg.max_tokens and cfg.min_tokens > cfg.max_tokens:
            hint = f"at most max_tokens, which is {cfg.max_tokens}"
            yield Problem(where=f"{facts.key}.min_tokens", what=f"{cfg.min_tokens} is not allowed", hint=hint)

    def _check_pattern(self, key: str) -> Iterator[Problem]:
        pattern, weight = self.rules.pattern, self.rules.weights.regex
        at = f"{key}.pattern"
        if weight and not pattern:
            yield Problem(
                where=at, what=f"must be given, since weights.regex is {weight:g}", hint="a regular expression"
            )
        if pattern and not weight:
            hint = f"set {key}.weights.regex"
            yield Problem(where=at, what="has no effect, since weights.regex is 0", hint=hint, level="warning")
        try:
            re.compile(pattern)
        except re.error as e:
            yield Problem(where=at, what=f"'{pattern}' is not a regular expression: {e}", hint="see Python's re")
