"""Reward by a function of the user's: a Python file and a name, with verl's calling convention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pipeline.errors import Problem
from pipeline.plan import Facts
from pipeline.registry import backend
from pipeline.stage import setting
from stages.paths import resolve
from stages.reward.assembly import WorkerReward, WorkerRewardConfig
from stages.reward.userfile import FunctionScorer, flaws
from stages.reward.workers import Scorer


@dataclass(slots=True, kw_only=True)
class FunctionRewardConfig(WorkerRewardConfig):
    """Settings of the function reward."""

    path: str = setting(doc="a Python file")
    name: str = setting("compute_score", doc="the function in it")
    kwargs: dict[str, Any] = setting({}, doc="further keyword arguments of the function; they win over the row's")
    correct_at: float = setting(1.0, doc="a score from here on counts as right, where the function returns no acc")


@backend("reward", "function")
class FunctionReward(WorkerReward):
    """Calls `name(data_source=, solution_str=, ground_truth=, extra_info=, **kwargs)` for each row.

    It returns a number, or a dict with `score`, optionally `acc` (0..1, or a bool), and other numbers, which
    become parts. It may be `async`. None abstains. Whatever else it does (returns NaN, text or a tuple,
    raises, hangs, ends its process) leaves the row unscored, with the reason. `ground_truth` is passed as
    the data file has it, after `target`. The function runs on the CPU, and what it prints goes to run.log.
    """

    def __init__(self, cfg: FunctionRewardConfig):
        super().__init__(cfg)
        self.function = cfg

    def scorer(self) -> tuple[Callable[..., Scorer], tuple[Any, ...]]:
        cfg = self.function
        return FunctionScorer, (str(resolve(cfg.path)), cfg.name, cfg.kwargs, cfg.correct_at)

    def check(self, facts: Facts) -> Iterator[Problem]:
        cfg = self.function
        for key, what, hint in flaws(resolve(cfg.path), cfg.name, cfg.kwargs):
            yield Problem(where=f"{facts.key}.{key}", what=what, hint=hint)
