"""Scoring functions as verl calls them: no import of this project."""

from __future__ import annotations

from pathlib import Path


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """What the rule `exact` gives."""
    return 1.0 if solution_str.strip() == ground_truth else 0.0


def with_parts(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    """A dict: the score, whether the answer is right, and a part of its own."""
    right = solution_str.strip() == ground_truth
    return {"score": right + bonus, "acc": right, "letters": len(solution_str)}


def hangs_once(data_source, solution_str, ground_truth, extra_info=None, *, calls, at):
    """Like `compute_score`, but call number `at` never comes back. `calls`: a file with one byte a call."""
    with Path(calls).open("ab") as f:
        f.write(b".")
        number = f.tell()
    while number == at:
        pass
    return compute_score(data_source, solution_str, ground_truth)
