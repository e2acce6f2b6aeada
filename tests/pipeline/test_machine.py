"""Memory is what the system says, and no more than a container may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipeline import machine
from pipeline.machine import Memory


def test_the_hosts_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_CGROUPS", ())
    memory = machine.host()
    assert memory is not None
    assert memory.total == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < memory.free <= memory.total


@pytest.mark.parametrize(
    ("limit", "used", "expected"),
    [
        ("2000000000", "500000000", Memory(2 * 10**9, 15 * 10**8)),
        ("max", "500000000", None),
        ("1000", "9000", Memory(1000, 0)),
    ],
)
def test_a_container_has_its_share(
    limit: str, used: str, expected: Memory | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "limit").write_text(f"{limit}\n")
    (tmp_path / "used").write_text(f"{used}\n")
    monkeypatch.setattr(machine, "_CGROUPS", ())
    whole = machine.host()
    monkeypatch.setattr(
        machine, "_CGROUPS", ((str(tmp_path / "limit"), str(tmp_path / "used")), ("/no/file", "/no/file"))
    )
    seen = machine.host()
    assert whole is not None
    assert seen is not None
    assert (seen.total, seen.free) == (
        (expected.total, min(expected.free, seen.free)) if expected else (whole.total, seen.free)
    )


@pytest.mark.gpu
def test_the_devices_memory() -> None:
    import torch

    memory = machine.cuda()
    assert memory is not None
    assert abs(memory.total / torch.cuda.get_device_properties(0).total_memory - 1) < 0.02
    assert 0 < memory.free <= memory.total
