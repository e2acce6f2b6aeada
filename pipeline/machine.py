"""What memory this machine has, without importing torch."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from pathlib import Path

_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
"""Limit and use of version 2 and 1 (docs.kernel.org/admin-guide/cgroup-v2.html), as a container sees its own."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of a device, and how many of them are free now."""

    total: int
    free: int


def host() -> Memory | None:
    """The host's, or a container's share of it. None where the system does not say (it is no Linux)."""
    try:
        known = dict(re.findall(r"(\w+):\s+(\d+) kB", Path("/proc/meminfo").read_text()))
        memory = Memory(int(known["MemTotal"]) * 1024, int(known["MemAvailable"]) * 1024)
    except (OSError, KeyError):
        return None
    for limit, used in _CGROUPS:
        most, now = _number(limit), _number(used)
        if most is not None and most < memory.total:
            memory = Memory(most, min(memory.free, max(most - (now or 0), 0)))
    return memory


def _number(file: str) -> int | None:
    """None if there is no such file, or no limit (it says `max`)."""
    try:
        text = Path(file).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


class _NvmlMemory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


def cuda() -> Memory | None:
    """The first NVIDIA device's, by the driver's own library (docs.nvidia.com/deploy/nvml-api). None if there is
    none. `CUDA_VISIBLE_DEVICES` is not looked at: devices of one host are nearly always alike."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    device, memory = ctypes.c_void_p(), _NvmlMemory()
    if nvml.nvmlInit_v2() != 0:
        return None
    try:
        found = nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)) == 0
        told = found and nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) == 0
    finally:
        nvml.nvmlShutdown()
    return Memory(memory.total, memory.free) if told else None
