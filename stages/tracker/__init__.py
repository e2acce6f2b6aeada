"""Role `tracker` for this field: what every tracker keeps of the rollouts. The contract is in pipeline/tracker.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.records import Record
from stages.records import Finish, LogProbBatch, RewardBatch, RolloutBatch, Status


def rollout_rows(step: int, records: Mapping[str, Record]) -> Iterator[dict[str, Any]]:
    """The rows of `rollouts.jsonl`: prompt, response, reward parts, status, policy versions.

    Records are found by type, so that any graph can be shown: the first RolloutBatch, and the RewardBatch and
    LogProbBatch that belong to it.
    """
    rollouts = of_type(records, RolloutBatch)
    if rollouts is None:
        return
    rewards, policy = of_type(records, RewardBatch), of_type(records, LogProbBatch)
    rewards = rewards.align(rollouts.row_id) if rewards else None
    policy = policy.align(rollouts.row_id) if policy else None
    for i in range(len(rollouts)):
        status, reason = Status(int(rollouts.status[i])), rollouts.reason.text(i)
        row: dict[str, Any] = {
            "step": step,
            "purpose": rollouts.purpose,
            "row_id": int(rollouts.row_id[i]),
            "group_id": int(rollouts.group_id[i]),
            "prompt": rollouts.prompt.json(i),
            "ground_truth": rollouts.ground_truth.json(i),
            "response": rollouts.response.text(i),
            "tokens": int(rollouts.response_ids.lengths[i]),
            "finish": Finish(int(rollouts.finish[i])).name.lower(),
        }
        if rewards:
            status, reason = Status(int(rewards.status[i])), rewards.reason.text(i)
            row["reward"] = float(rewards.score[i])
            row["reward_parts"] = {n: float(v) for n, v in zip(rewards.part_names, rewards.parts[i], strict=True)}
        if policy:
            row["engine_log_prob"] = float(rollouts.log_probs[i].sum())
            row["policy_log_prob"] = float(policy.log_probs[i].sum())
        row |= {"status": status.name.lower(), "reason": reason}
        yield row | {"version_min": int(rollouts.version_min[i]), "version_max": int(rollouts.version_max[i])}


def of_type(records: Mapping[str, Record], kind: type) -> Any:
    """The first record of a type, or None."""
    return next((r for r in records.values() if isinstance(r, kind)), None)
