"""Whether processes are gone."""

from __future__ import annotations

import time
from pathlib import Path


def wait_gone(pids: list[int], seconds: float) -> list[int]:
    """Those of the processes that still exist after `seconds`."""
    deadline = time.monotonic() + seconds
    alive = list(pids)
    while (alive := [p for p in alive if _runs(p)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return alive


def _runs(pid: int) -> bool:
    """Whether the process exists and is not a zombie (state after the name in parentheses, proc(5))."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
