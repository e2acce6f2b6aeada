"""The settings of `hydra/sweeper=optuna`: a search that raises (or lowers) a metric, instead of a grid."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from pipeline.errors import Problem


class Direction(Enum):
    maximize = "maximize"
    minimize = "minimize"


@dataclass(kw_only=True)
class Search:
    """`metric`: of the last step of each job. `trials`: jobs in all; `batch`: jobs that are chosen together, 0: as many
    as the launcher runs at once. `seed`: of the sampler. `params`: what is searched, in the syntax of the command line,
    which adds to it."""

    _target_: str = "hydra_plugins.headrace_search.OptunaSweeper"
    metric: str = ""
    direction: Direction = Direction.maximize
    trials: int = 20
    batch: int = 0
    seed: int = 0
    params: dict[str, Any] = field(default_factory=dict)

    def problems(self) -> Iterator[Problem]:
        if not self.metric:
            hint = "the metric that the search raises, such as eval/accuracy"
            yield Problem(where="hydra.sweeper.metric", what="must be given", hint=hint)
        for name, least in (("trials", 1), ("batch", 0), ("seed", 0)):
            if (value := getattr(self, name)) < least:
                yield Problem(where=f"hydra.sweeper.{name}", what=f"{value} is not allowed", hint=f"must be >= {least}")
        if importlib.util.find_spec("optuna") is None:
            hint = "install the extra: pip install -e '.[sweep]'"
            yield Problem(where="hydra/sweeper", what="needs the package 'optuna', which is not installed", hint=hint)
