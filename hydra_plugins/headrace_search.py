"""`hydra/sweeper=optuna`: Optuna chooses the next points from how the last ones did.

hydra-optuna-sweeper 1.3.0 pins optuna below 3, of 2022; this is what is needed of it, with Optuna's ask and tell.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from pipeline.sweep.points import Points
from pipeline.sweep.search import Search

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution

ConfigStore.instance().store(group="hydra/sweeper", name="optuna", node=Search, provider="headrace")


class OptunaSweeper(Sweeper):
    """Tree-structured Parzen estimator (Bergstra et al. 2011), in batches: a batch is chosen and run, then the next."""

    def __init__(self, **settings: Any):
        self.search = Search(**settings)

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        assert isinstance(task_function, Points)
        self.points, self.config, self.hydra_context = task_function, config, hydra_context
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        import optuna

        assert self.config is not None
        search, batch = self.search, self.search.batch or OmegaConf.select(self.config, "hydra.launcher.at_once") or 1
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        sampler = optuna.samplers.TPESampler(seed=search.seed, constant_liar=batch > 1)
        study = optuna.create_study(sampler=sampler, direction=search.direction.name)
        fixed, space = self._space([f"{key}={value}" for key, value in search.params.items()] + arguments)
        folder = Path(str(self.config.hydra.sweep.dir))
        folder.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(self.config, folder / "multirun.yaml")
        for first in range(0, search.trials, batch):
            if self.points.stop.signals:
                break
            self._batch(study, fixed, space, range(first, min(first + batch, search.trials)))
        self._tell_best(study, folder)

    def _space(self, texts: Sequence[str]) -> tuple[list[str], dict[str, BaseDistribution]]:
        """Overrides that stay, and what is searched by key. The last of several with one key counts."""
        assert self.hydra_context is not None
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        given = {o.get_key_element(): o for o in parser.parse_overrides(list(texts))}
        fixed = [f"{k}={o.get_value_element_as_str()}" for k, o in given.items() if not o.is_sweep_override()]
        return fixed, {k: distribution(o) for k, o in given.items() if o.is_sweep_override()}

    def _batch(
        self, study: Study, fixed: list[str], space: Mapping[str, BaseDistribution], numbers: Sequence[int]
    ) -> None:
        from optuna.trial import TrialState

        assert self.launcher is not None
        trials = [study.ask(dict(space)) for _ in numbers]
        overrides = [[f"{k}={v}" for k, v in trial.params.items()] + fixed for trial in trials]
        results = self.launcher.launch(overrides, initial_job_idx=numbers[0])
        for number, trial, result in zip(numbers, trials, results, strict=True):
            value = (result.return_value or {}).get(self.search.metric)
            study.tell(trial, value, state=TrialState.FAIL if value is None else TrialState.COMPLETE)
            if result.return_value and value is None:
                print(f"job {number} has no {self.search.metric} in its last step: the search learns nothing of it")

    def _tell_best(self, study: Study, folder: Path) -> None:
        done = [trial for trial in study.get_trials(deepcopy=False) if trial.value is not None]
        if not done:
            print(f"no job ended with {self.search.metric}")
            return
        best = study.best_trial
        found = {"job": best.number, "metric": self.search.metric, "value": best.value, "overrides": best.params}
        (folder / "best.json").write_text(json.dumps(found, indent=1) + "\n", "utf-8")
        chosen = " ".join(f"{key}={value}" for key, value in best.params.items())
        print(f"best of {len(done)}: job {best.number}, {self.search.metric} {best.value:.4g}: {chosen}")


def distribution(override: Override) -> BaseDistribution:
    """What Optuna draws from; a choice is drawn as text, in the syntax of the command line."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    value = override.value()
    if isinstance(value, IntervalSweep):
        whole = isinstance(value.start, int) and isinstance(value.end, int)
        make = IntDistribution if whole else FloatDistribution
        return make(value.start, value.end, log="log" in value.tags)  # type: ignore[arg-type]
    if isinstance(value, RangeSweep):
        values = sorted(value.range())
        make = IntDistribution if all(isinstance(v, int) for v in values) else FloatDistribution
        return make(values[0], values[-1], step=abs(value.step))  # type: ignore[arg-type]
    return CategoricalDistribution(list(override.sweep_string_iterator()))
