"""`hydra/launcher=basic`, the default: each job a process of its own, some at a time, GPUs shared out.

It takes the place of Hydra's launcher of that name, which runs all jobs in this process, one after the other, where
they share modules, seeds and CUDA contexts. Under another name it would have to be chosen by an `override` in
`conf/config.yaml`, and then no recipe could choose another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from pipeline.sweep.jobs import Job, run_all
from pipeline.sweep.lanes import Lanes
from pipeline.sweep.points import Points

ConfigStore.instance().store(group="hydra/launcher", name="basic", node=Lanes, provider="headrace")


class HeadraceLauncher(Launcher):
    """Runs the jobs of a batch; a job that fails stops no other."""

    def __init__(self, **lanes: Any):
        self.lanes = Lanes(**lanes)

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        assert isinstance(task_function, Points)
        self.context, self.points, self.config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        numbered = dict(enumerate(job_overrides, initial_job_idx))
        jobs = (self._job(number, overrides) for number, overrides in numbered.items())
        results = run_all(jobs, self.points.stop, self.lanes.environments())
        done = JobStatus.COMPLETED  # also where it failed: the sweep goes on, and the board knows
        return [JobReturn(overrides=o, status=done, _return_value=results.get(n)) for n, o in numbered.items()]

    def _job(self, number: int, overrides: Sequence[str]) -> Job:
        config = self.context.config_loader.load_sweep_config(self.config, list(overrides))
        with open_dict(config):
            config.hydra.job.num, config.hydra.job.id = number, str(number)
        HydraConfig.instance().set_config(config)  # for ${hydra:...} in the name of the directory
        return self.points.job(config.hydra)
