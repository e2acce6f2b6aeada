"""What a stage of your own imports: the names of this project that stay where they are (docs/extending.md).

Where they are defined is nobody's business but ours; what they promise stands in their docstrings.
"""

from __future__ import annotations

from pipeline.context import Context
from pipeline.errors import Problem
from pipeline.plan import Facts
from pipeline.records import Ragged, Rows, Snapshot
from pipeline.registry import backend
from pipeline.runner import Runner
from pipeline.stage import Component, Stage, setting
from pipeline.tracker import Tracker
from stages.advantage import Advantage
from stages.critic import Critic
from stages.loader import Loader, LoaderConfig
from stages.model import Model
from stages.records import (
    AdvantageBatch,
    Finish,
    LogProbBatch,
    PromptBatch,
    RewardBatch,
    RolloutBatch,
    Sampling,
    Status,
    TokenBatch,
    ValueBatch,
)
from stages.reward import Reward, RewardConfig
from stages.reward.assembly import WorkerReward, WorkerRewardConfig
from stages.reward.workers import Outcome, Sample, Scorer, Unscorable
from stages.rollout import Rollout, RolloutConfig
from stages.rollout.assembly import Settings
from stages.rollout.in_process import InProcessRollout, Responses
from stages.sampler import Sampler, SamplingParams
from stages.tokenizer_cache import TokenizerCache, TokenizerCacheConfig
from stages.trainer import Trainer

__all__ = [
    "Advantage",
    "AdvantageBatch",
    "Component",
    "Context",
    "Critic",
    "Facts",
    "Finish",
    "InProcessRollout",
    "Loader",
    "LoaderConfig",
    "LogProbBatch",
    "Model",
    "Outcome",
    "Problem",
    "PromptBatch",
    "Ragged",
    "Responses",
    "Reward",
    "RewardBatch",
    "RewardConfig",
    "Rollout",
    "RolloutBatch",
    "RolloutConfig",
    "Rows",
    "Runner",
    "Sample",
    "Sampler",
    "Sampling",
    "SamplingParams",
    "Scorer",
    "Settings",
    "Snapshot",
    "Stage",
    "Status",
    "TokenBatch",
    "TokenizerCache",
    "TokenizerCacheConfig",
    "Tracker",
    "Trainer",
    "Unscorable",
    "ValueBatch",
    "WorkerReward",
    "WorkerRewardConfig",
    "backend",
    "setting",
]
