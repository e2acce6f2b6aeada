"""What can go wrong, in the words a person needs: where, what value, what is allowed, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong with a configuration, found before anything heavy is loaded.

    `where` is a config path (`rollout.temperature`); `level` is `error` (the run cannot start) or
    `warning` (this machine lacks something that only an execution needs).
    """

    where: str
    what: str
    hint: str = ""
    level: Literal["error", "warning"] = "error"

    def __str__(self) -> str:
        return f"{self.where}: {self.what}" + (f"\n    {self.hint}" if self.hint else "")


class PlanError(Exception):
    """The configuration cannot run; carries every problem found, not just the first."""

    def __init__(self, problems: Iterable[Problem]):
        self.problems = tuple(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        return "\n".join(str(p) for p in self.problems)


class StageError(Exception):
    """A stage broke while the run was under way.

    `node`, `step` and `rows` say where; `detail` holds the traceback of the process it happened in.
    """

    def __init__(self, node: str, step: int, what: str, rows: Sequence[int] = (), detail: str = ""):
        self.node, self.step, self.what, self.rows, self.detail = node, step, what, tuple(rows), detail
        super().__init__(node, step, what, self.rows, detail)

    def __str__(self) -> str:
        return f"stage '{self.node}' failed in step {self.step}{_rows(self.rows)}: {self.what}"


def _rows(rows: Sequence[int], most: int = 8) -> str:
    shown = ", ".join(str(r) for r in rows[:most])
    more = f" and {len(rows) - most} more" if len(rows) > most else ""
    return f", rows {shown}{more}" if rows else ""


def near(word: str, allowed: Iterable[str], heading: str = "allowed") -> str:
    """'did you mean ...?' for a mistyped word, and the whole list of what is allowed."""
    names = sorted(set(allowed))
    match = closest(word, names)
    return (f"did you mean '{match}'? " if match else "") + f"{heading}: {listed(names)}"


def closest(word: str, names: Iterable[str]) -> str | None:
    """The name that was probably meant; None if none is like the word.

    A part of a name between underscores counts too: `vlm` is near `vllm_async`.
    """
    names = list(names)
    if match := difflib.get_close_matches(word, names, n=1, cutoff=0.6):
        return match[0]
    parts = {part: name for name in reversed(names) for part in name.split("_") if len(part) > 2}
    match = difflib.get_close_matches(word, parts, n=1, cutoff=0.8)
    return parts[match[0]] if match else None


def listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "(nothing)"
