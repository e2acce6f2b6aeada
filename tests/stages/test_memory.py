"""What is left of memory and disk, from the files that the kernel shows."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stages.memory import free_disk, free_memory, show_bytes

MIB = 2**20


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """`proc` says that 100 MiB are available, and that the process is in no group."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(
        f"MemTotal: 999999 kB\nMemFree: 5 kB\nMemAvailable:  {100 * 1024} kB\nBuffers: 1 kB\n"
    )
    (tmp_path / "proc/self/cgroup").write_text("")
    return tmp_path


def free(machine: Path) -> float:
    return free_memory(machine / "proc", machine / "cgroup") / MIB


def group(machine: Path, path: str, line: str, **files: str) -> None:
    folder = machine / "cgroup" / path
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")
    (machine / "proc/self/cgroup").write_text(line + "\n")


def test_without_groups_it_is_what_the_kernel_calls_available(machine: Path) -> None:
    assert free(machine) == 100


def test_a_group_of_version_2_limits_it(machine: Path) -> None:
    line = "0::/a/b"
    group(machine, "a/b", line, memory__max=str(60 * MIB), memory__current=str(20 * MIB))
    assert free(machine) == 40
    group(machine, "a/b", line, memory__stat=f"anon 7\ninactive_file {5 * MIB}\n")  # files that can be dropped
    assert free(machine) == 45
    group(machine, "a", line, memory__max=str(30 * MIB), memory__current=str(25 * MIB))  # and so do those above it
    assert free(machine) == 5
    group(machine, "a", line, memory__current=str(31 * MIB))
    assert free(machine) == 0
    group(machine, "a", line, memory__max="max")
    assert free(machine) == 45


def test_a_group_of_version_1_limits_it(machine: Path) -> None:
    line = "5:cpu,cpuacct:/x\n4:memory:/job"
    limits = {"memory__limit_in_bytes": str(50 * MIB), "memory__usage_in_bytes": str(40 * MIB)}
    group(machine, "memory/job", line, **limits)
    assert free(machine) == 10
    group(machine, "memory/job", line, memory__stat=f"total_inactive_file {MIB}\n")
    assert free(machine) == 11
    group(machine, "memory/job", line, memory__limit_in_bytes=str(2**63 - 4096))  # none
    assert free(machine) == 100


def test_in_a_container_the_root_that_is_seen_is_its_group(machine: Path) -> None:
    group(machine, ".", "0::/docker/0123", memory__max=str(9 * MIB), memory__current=str(MIB))
    assert free(machine) == 8


def test_this_machine_has_some() -> None:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < free_memory() < total


def test_the_disk_of_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    now = os.statvfs(tmp_path)
    assert free_disk(tmp_path / "a" / "b") == pytest.approx(now.f_bavail * now.f_frsize, rel=0.1)


@pytest.mark.parametrize(
    ("size", "shown"),
    [(0, "0 bytes"), (999, "999 bytes"), (1024, "1 KiB"), (1536 * 1024, "1.5 MiB"), (2**30, "1 GiB"), (2**43, "8 TiB")],
)
def test_sizes_are_shown_in_three_digits(size: int, shown: str) -> None:
    assert show_bytes(size) == shown
