"""CPU time of other programs: what runs beside a run is in it, and what was waited for is not."""

from __future__ import annotations

import subprocess
import sys
import time

from pipeline.compare.busy import Others, _children_s, _machine_s

SPIN_S = 0.5
SPIN = f"import time\nend = time.process_time() + {SPIN_S}\nwhile time.process_time() < end: pass"


def test_what_was_waited_for_is_own_and_what_was_not_is_of_others() -> None:
    others, began, machine, own = Others(), time.monotonic(), _machine_s(), _children_s()
    with others.during(), subprocess.Popen([sys.executable, "-c", SPIN]) as child:
        while not ended(child.pid):  # it has spun, and nobody has waited for it
            time.sleep(0.02)
        assert _children_s() - own < SPIN_S
        assert _machine_s() - machine > 0.9 * SPIN_S
    assert _children_s() - own >= SPIN_S
    whole = _machine_s() - machine
    assert 0 <= others.cpus * (time.monotonic() - began) <= whole - SPIN_S + 0.1


def test_a_program_beside_is_seen() -> None:
    child = subprocess.Popen([sys.executable, "-c", SPIN])
    others, began = Others(), time.monotonic()
    with others.during():
        while not ended(child.pid):
            time.sleep(0.02)
        seconds = time.monotonic() - began
    child.wait()
    assert others.cpus * seconds > 0.8 * SPIN_S


def ended(pid: int) -> bool:
    """A zombie: it has ended, and nobody has waited for it."""
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] == "Z"
