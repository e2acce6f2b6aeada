"""Token ids that all processes of a run read: one piece of anonymous memory, published in the run directory.

The memory is a memfd (ADR 0008): it has no name, so nothing is left behind, whoever dies when; it cannot shrink
(sealed), so reading it cannot end in SIGBUS; its pages are there from the start, so writing cannot either. Other
processes of the same user open it by way of `/proc/<pid>/fd/<fd>` of its owner, which the run directory names.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import mmap
import os
import secrets
import select
import stat
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import numpy as np

from pipeline.process import started
from stages.locks import FileLock, ThreadLock
from stages.memory import free_memory, show_bytes
from stages.ring import SMALLEST, BadRing, Ring, entry_bytes, format_ring

__all__ = ["HANDLE", "SMALLEST", "Arena", "BadRing", "Handle", "NoRoom", "entry_bytes"]
log = logging.getLogger(__name__)

HANDLE = "tokens.arena.json"
"""Name of the file in a run directory that says where the arena is."""
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class NoRoom(MemoryError):
    """The memory that an arena needs is not there; the message says how much is."""


@dataclass(frozen=True, slots=True)
class Handle:
    """Where an arena is: a descriptor of a process, which its start time tells from a later one of that number."""

    pid: int
    started: int
    fd: int
    job: str


class Arena:
    """Made by `create` in the process that owns it, found by `of_run` in the others. Safe in several threads.

    `get_many` takes no lock and costs one copy a row: a view would change under its reader when the entry's turn to
    be overwritten comes.
    """

    def __init__(self, fd: int, *, write: bool, job: bytes | None):
        """Takes over the descriptor. BadRing if it is not an arena (of this job)."""
        self._fd, self._published, self._ring = fd, None, None
        self._closing = ThreadLock()
        try:
            _check_memfd(fd)
            prot = mmap.PROT_READ | (mmap.PROT_WRITE if write else 0)
            memory = mmap.mmap(fd, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=prot)
            # A description of its own for the lock: the mapping keeps its own alive in forked children.
            self._lock = FileLock(f"/proc/self/fd/{fd}") if write else None
            self._ring = Ring(memory, self._lock.held if self._lock else None, job)
        except BaseException:
            os.close(fd)
            raise
        self.job, self.size = self._ring.job, len(memory)
        self.evictions = 0

    # -- the owner -------------------------------------------------------------------------------------------

    @classmethod
    def create(cls, max_bytes: int) -> Self:
        """An empty arena whose memory is all there from now on. NoRoom if the machine has not so much left."""
        size = -(-max(max_bytes, SMALLEST) // mmap.PAGESIZE) * mmap.PAGESIZE
        if size > (free := free_memory()):
            raise NoRoom(f"a token arena needs {show_bytes(size)}, and {show_bytes(free)} of memory are free")
        job = secrets.token_bytes(16)
        # The kernel shows the name in /proc for whoever looks what a process holds; nothing can be opened by it.
        fd = os.memfd_create(f"headrace-tokens-{job.hex()}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(fd, 0o600)
            _fill(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            with mmap.mmap(fd, size) as memory:
                format_ring(memory, job)
        except BaseException:
            os.close(fd)
            raise
        arena = cls(fd, write=True, job=None)
        _owned[arena.job] = arena
        return arena

    def publish(self, run_dir: Path) -> None:
        """Let other processes of the run find it; `close` takes that back."""
        pid = os.getpid()
        handle = Handle(pid, started(pid) or 0, self._fd, self.job.hex())
        file, new = run_dir / HANDLE, run_dir / f".{HANDLE}.{pid}"
        new.touch(0o600)
        new.write_text(json.dumps(asdict(handle)))
        new.replace(file)
        self._published = (file, handle)

    # -- the others ------------------------------------------------------------------------------------------

    @classmethod
    def of_run(cls, run_dir: Path, write: bool = False) -> Arena | None:
        """The arena of a run, opened once in each process; not for the caller to close.

        None where there is none, or where its owner is gone. In the owner's own process, the owner's.
        """
        file = os.fspath(run_dir / HANDLE)
        with _attach_lock:
            stamp = _stamp(file)
            known = _attached.get((file, write))
            if known is None or known.stamp != stamp or not known.alive():
                if known and known.owner is not None and known.arena:
                    known.arena.close()
                known = _attached[file, write] = _attach(file, stamp, write)
            return known.arena

    # -- everyone --------------------------------------------------------------------------------------------

    def get_many(self, keys: Sequence[bytes]) -> list[np.ndarray | None]:
        """For each key its ids, int32 and read-only, or None."""
        ring = self._ring
        return ring.get(keys) if ring else [None] * len(keys)

    def put_many(self, items: Sequence[tuple[bytes, np.ndarray]]) -> None:
        """Keep these for the whole run's processes. PermissionError if it was opened for reading.

        Where another writer holds the lock for too long (it may have been stopped), nothing is kept.
        """
        if ring := self._ring:
            self.evictions += ring.put(items)

    def has_many(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether an entry is named by each key; cheaper than `get_many`, which alone says that it is whole."""
        ring = self._ring
        return [ring.has(key) for key in keys] if ring else [False] * len(keys)

    @property
    def bytes(self) -> int:
        return self._ring.bytes if self._ring else 0

    @property
    def entries(self) -> int:
        return self._ring.state().entries if self._ring else 0

    @property
    def total_evictions(self) -> int:
        """By all processes so far; `evictions` are this one's."""
        return self._ring.state().evictions if self._ring else 0

    @property
    def skipped(self) -> int:
        """Entries that were not kept because the lock was not to be had."""
        return self._ring.skipped if self._ring else 0

    def close(self) -> None:
        """The memory goes when the last process that maps it lets go. Safe to call twice."""
        with self._closing:
            ring, self._ring = self._ring, None
            if ring is None:
                return
            _owned.pop(self.job, None)
            self._withdraw()
            if self._lock:
                self._lock.close()
            os.close(self._fd)  # a thread that is just reading still holds the mapping

    def _withdraw(self) -> None:
        """Take the handle back, if it is still ours: not in a forked child, not after another one was published."""
        file, handle = self._published or (None, None)
        if file and handle and handle.pid == os.getpid() and _read_handle(file) == handle:
            with contextlib.suppress(OSError):
                file.unlink()


@dataclass(slots=True)
class _Attached:
    """What `of_run` found: for this version of the handle's file, while the owner lives."""

    stamp: tuple[int, ...] | None
    arena: Arena | None = None
    owner: int | None = None
    """A pidfd, which is readable when the process has ended (pidfd_open(2))."""

    def alive(self) -> bool:
        if self.owner is None:
            return True
        ended = select.poll()
        ended.register(self.owner, select.POLLIN)
        return not ended.poll(0)

    def __del__(self) -> None:
        if self.owner is not None:
            os.close(self.owner)


_owned: weakref.WeakValueDictionary[bytes, Arena] = weakref.WeakValueDictionary()
_attached: dict[tuple[str, bool], _Attached] = {}
_attach_lock = ThreadLock()


def _stamp(file: str) -> tuple[int, ...] | None:
    try:
        info = os.stat(file)
    except OSError:
        return None
    return info.st_dev, info.st_ino, info.st_mtime_ns, os.getpid()


def _attach(file: str, stamp: tuple[int, ...] | None, write: bool) -> _Attached:
    handle = _read_handle(Path(file)) if stamp else None
    if handle is None:
        return _Attached(stamp)
    if handle.pid == os.getpid():
        return _Attached(stamp, _owned.get(bytes.fromhex(handle.job)))
    found = _Attached(stamp)
    try:
        found.owner = os.pidfd_open(handle.pid)
        if started(handle.pid) == handle.started:
            flags = (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC | os.O_NONBLOCK
            fd = os.open(f"/proc/{handle.pid}/fd/{handle.fd}", flags)
            found.arena = Arena(fd, write=write, job=bytes.fromhex(handle.job))
    except ProcessLookupError:
        pass  # the owner is gone
    except (OSError, ValueError) as e:
        log.warning("the token arena of process %d cannot be opened (%s): ids travel with the records", handle.pid, e)
    return found


def _fill(fd: int, size: int) -> None:
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as e:
        raise NoRoom(f"a token arena needs {show_bytes(size)} of memory: {e.strerror}") from e


def _check_memfd(fd: int) -> None:
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise BadRing("it is not a private piece of memory of this user")
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:  # an ordinary file has none
        seals = 0
    if seals & _SEALS != _SEALS:
        raise BadRing("it is not sealed")


def _read_handle(file: Path) -> Handle | None:
    try:
        content = json.loads(file.read_text())
        handle = Handle(**content)
        bytes.fromhex(handle.job)
    except (OSError, ValueError, TypeError):
        return None
    return handle if {type(handle.pid), type(handle.started), type(handle.fd)} == {int} else None
