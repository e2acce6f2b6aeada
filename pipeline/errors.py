"""What can go wrong, in the words a person needs: where, what value, what is allowed, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong with a configuration, found before anything heavy is loaded.

    `where` is a config path (`rollout.temperature`); `level` is `error` (the run cannot start) or
    `warning` (this machine lacks something that only an execution needs).
    """

    where: str
    what: str
    hint: str = ""
    level: str = "error"

    def __str__(self) -> str:
        return f"{self.where}: {self.what}" + (f"\n    {self.hint}" if self.hint else "")


class PlanError(Exception):
    """The configuration cannot run; carries every problem found, not just the first."""

    def __init__(self, problems: Sequence[Problem]):
        self.problems = tuple(problems)
        super().__init__("\n".join(str(p) for p in self.problems))


class StageError(Exception):
    """A stage broke while the run was under way.

    `node`, `step` and `rows` say where; `detail` holds the traceback of the process it happened in.
    """

    def __init__(self, node: str, step: int, what: str, *, rows: Sequence[int] = (), detail: str = ""):
        self.node, self.step, self.what, self.rows, self.detail = node, step, what, tuple(rows), detail
        shown = f", rows {_some(self.rows)}" if self.rows else ""
        super().__init__(f"stage '{node}' failed in step {step}{shown}: {what}")

    def __reduce__(self):
        return (_rebuild_stage_error, (self.node, self.step, self.what, self.rows, self.detail))


def _rebuild_stage_error(node: str, step: int, what: str, rows: Sequence[int], detail: str) -> StageError:
    return StageError(node, step, what, rows=rows, detail=detail)


def _some(rows: Sequence[int], most: int = 8) -> str:
    head = ", ".join(str(r) for r in rows[:most])
    return head if len(rows) <= most else f"{head} and {len(rows) - most} more"


def near(word: str, allowed: Iterable[str]) -> str:
    """'did you mean ...?' for a mistyped word, and the whole list of what is allowed."""
    names = sorted(set(allowed))
    match = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    guess = f"did you mean '{match[0]}'? " if match else ""
    return f"{guess}allowed: {', '.join(names) if names else '(nothing)'}"
