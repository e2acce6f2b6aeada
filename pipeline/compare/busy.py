"""What other programs did to the machine while a run went: then its times say little.

All CPU time that the machine spent, less what the run's own processes took. Known when the run has ended.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BUSY = 0.1
"""Share of the machine's CPUs from which on a reader is told."""


class Others:
    """`cpus`: how many CPUs other programs have kept busy on average, and the host of a virtual machine has taken."""

    cpus = 0.0

    @contextmanager
    def during(self) -> Iterator[None]:
        """Of what is started and waited for inside. A process that nobody waits for counts as one of the others."""
        began, spent, own = time.monotonic(), _machine_s(), _children_s()
        try:
            yield
        finally:
            of_others = _machine_s() - spent - (_children_s() - own)
            self.cpus = max(0.0, of_others / (time.monotonic() - began))


def _machine_s() -> float:
    """Seconds that all CPUs together have worked since the machine was started (proc(5), /proc/stat)."""
    first = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, first[:8])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _children_s() -> float:
    """Of this process and all that it, or what it started, has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)
