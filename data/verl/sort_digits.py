"""A reward file as verl takes it (`custom_reward_function.path`), and `reward=function` too. It imports neither.

verl calls `compute_score` once a row. What it returns is a number, or a dict whose `score` is the reward and whose
other numbers are told apart.
"""

from __future__ import annotations

from typing import Any

SHARE = 0.2
"""What digits in their right places are worth where the whole answer is not right."""


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, float]:
    """1 for the right answer; else a share of `SHARE`, by how many digits stand where they should."""
    given = solution_str.strip()
    places = max(len(given), len(ground_truth))
    in_place = sum(a == b for a, b in zip(given, ground_truth, strict=False)) / places if places else 0.0
    right = float(given == ground_truth)
    return {"score": right or SHARE * in_place, "acc": right, "in_place": in_place}
