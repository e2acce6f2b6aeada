"""Whether processes are gone, and what they left behind."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path

SHM = Path("/dev/shm")


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


def shm_names() -> set[str]:
    """Names in /dev/shm."""
    return {entry.name for entry in SHM.iterdir()}


def shm_left(before: set[str]) -> set[str]:
    """Names that are new since `before` and that no living process has mapped: other programs use /dev/shm too."""
    new = shm_names() - before
    return new - mapped_shm(int(name) for name in os.listdir("/proc") if name.isdigit()) if new else new


def mapped_shm(pids: Iterable[int]) -> set[str]:
    """Names in /dev/shm that these processes have mapped."""
    found: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            found |= {line.partition(f"{SHM}/")[2].removesuffix(" (deleted)") for line in lines}
    return found - {""}
