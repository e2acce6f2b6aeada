"""How much memory a run takes: its controlling process and every process that it, or they, have started.

Asked after a step, from /proc. No stage has to say anything, so processes that a library starts count too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

GIB = 2**20
"""In KiB, the unit of /proc."""


class Usage:
    """The most host memory that a run has held, as far as one can tell after each step.

    Of each living process: what it holds now, where a page that k processes share counts 1/k in each (PSS), plus by
    how much its own peak was above what it holds now (VmHWM - VmRSS). The sum takes all peaks as if they had come at
    the same time, so it is an upper bound for living processes, but for two things: a process that ended before the end
    of the step it was started in is not seen, and a library that programs outside the run have mapped too counts in
    part only. See proc(5), `status` and `smaps_rollup`.
    """

    def __init__(self) -> None:
        self._most = 0.0

    def peak_gb(self) -> float:
        """In units of 2^30 bytes. It never falls."""
        self._most = max(self._most, sum(map(_kib, family(os.getpid()))) / GIB)
        return self._most


def _kib(pid: int) -> int:
    """0 for a process that has just ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        now = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    peak, resident, shared_out = _field(status, "VmHWM"), _field(status, "VmRSS"), _field(now, "Pss")
    return shared_out + max(0, peak - resident)


def _field(text: str, name: str) -> int:
    """0 where it is missing: a process that is ending has no memory."""
    found = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) if found else 0


def family(pid: int) -> list[int]:
    """A process and its living descendants."""
    children: dict[int, list[int]] = {}
    for child, parent in _parents():
        children.setdefault(parent, []).append(child)
    found = [pid]
    for member in found:
        found += children.get(member, [])
    return found


def _parents() -> Iterator[tuple[int, int]]:
    """Every process with its parent (proc(5), field 4 of stat)."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            stat = Path(f"/proc/{name}/stat").read_text()
        except OSError:
            continue
        yield int(name), int(stat.rpartition(")")[2].split()[1])
