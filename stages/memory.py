"""How much memory and disk there is left, before it is asked for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_UNLIMITED = 2**60
"""A limit of this many bytes and more means none (cgroup v1 writes a number near 2^63)."""


def free_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this process may still take without pushing others out: what the kernel counts as available,
    or less where a control group of this process (version 2 or 1) or one above it has a limit."""
    return max(0, min(_available(proc), *_left_in_groups(proc, cgroups)))


def free_disk(folder: Path) -> int:
    """Bytes that this user may still write in `folder`, which may not exist yet."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def show_bytes(size: int) -> str:
    """`64 MiB`; three digits at most."""
    value, unit = float(size), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1000:
            break
        value, unit = value / 1024, larger
    return f"{value:.3g} {unit}"


def _available(proc: Path) -> int:
    for line in (proc / "meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return _UNLIMITED


def _left_in_groups(proc: Path, cgroups: Path) -> Iterator[int]:
    yield _UNLIMITED
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _left(cgroups, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _left(cgroups / "memory", path, *names)


def _left(root: Path, path: str, limit: str, used: str, cache: str) -> Iterator[int]:
    """For the group and those above it. In a container its own group may be the root that is seen."""
    group = root / path.lstrip("/")
    for folder in (group, *group.parents):
        if folder != root and root not in folder.parents:
            return
        most, now = _number(folder / limit), _number(folder / used)
        if most is not None and now is not None and most < _UNLIMITED:
            yield most - now + _cached(folder / "memory.stat", cache)


def _number(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _cached(file: Path, name: str) -> int:
    """Bytes of files that the kernel can drop when it needs room."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return 0
    return next((int(v) for n, _, v in (line.partition(" ") for line in lines) if n == name), 0)
