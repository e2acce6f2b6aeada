"""verl's own scorers by `data_source` (`verl.utils.reward_score`), for `reward=function`.

A `data_source` that verl has no scorer for is a row without a score. In GSM8K's, an answer is right after `#### `.
"""

from verl.utils.reward_score import default_compute_score as compute_score

__all__ = ["compute_score"]
