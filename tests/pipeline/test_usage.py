"""Memory of a run: all its processes count, each page once, and a peak that is over stays in the number."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from pipeline.usage import Usage, family

MIB = 2**20
GROW = """
import mmap, os, sys
size, keep, fork = int(sys.argv[1]), sys.argv[2] == "keep", sys.argv[3] == "fork"
block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for at in range(0, size, 4096): block[at] = 1
if not keep: block.close()
child = os.fork() if fork else 0
if fork and not child:
    sum(block[at] for at in range(0, size, 4096))
    os.write(1, b"ready\\n"); os.read(0, 1); os._exit(0)
if not fork: os.write(1, b"ready\\n")
os.read(0, 1)
"""


@contextmanager
def growing(size: int, keep: str, fork: str) -> Iterator[int]:
    """A child that has touched `size` bytes; it keeps them or not, and shares them with a child of its own or not."""
    command = [sys.executable, "-c", GROW, str(size), keep, fork]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout
        assert child.stdin
        assert child.stdout.readline() == b"ready\n"
        yield child.pid
        child.stdin.close()


def added(size: int, keep: str, fork: str) -> float:
    """By how many MiB the peak grows while such a child lives, less what one that touches nothing takes."""
    grown = []
    for touched in (4096, size):
        before = Usage().peak_gb()
        with growing(touched, keep, fork):
            grown.append((Usage().peak_gb() - before) * 1024)
    return grown[1] - grown[0]


def test_children_count_and_a_peak_that_is_over_stays() -> None:
    for keep in ("keep", "drop"):
        assert 90 < added(100 * MIB, keep, "alone") < 115, keep


def test_pages_that_two_processes_share_count_once() -> None:
    assert 90 < added(100 * MIB, "keep", "fork") < 125


def test_the_number_never_falls_and_nears_what_the_kernel_says_of_one_process() -> None:
    usage = Usage()
    before = usage.peak_gb()
    with growing(80 * MIB, "keep", "alone"):
        high = usage.peak_gb()
    assert high - before > 70 / 1024
    assert usage.peak_gb() >= high
    with open("/proc/self/status") as f:
        peak_kib = next(int(line.split()[1]) for line in f if line.startswith("VmHWM"))
    # What others have mapped too, such as the C library, counts in part only.
    assert 0.6 * peak_kib / 2**20 < Usage().peak_gb() < 1.05 * peak_kib / 2**20


def test_a_family_is_a_process_and_its_descendants() -> None:
    with growing(4096, "keep", "fork") as pid:
        found = family(pid)
        assert found[0] == pid
        assert len(found) == 2
        assert set(found) <= set(family(os.getpid()))
    assert pid not in family(os.getpid())
