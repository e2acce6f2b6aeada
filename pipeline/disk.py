"""Writing what a run leaves: whole or not at all, and in words where it cannot be done."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

_WHY = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the quota is used up",
    errno.EFBIG: "the file would be larger than is allowed (ulimit -f)",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.ENOENT: "its directory is gone: was it moved or removed?",
    errno.ESTALE: "its directory is gone: was it moved or removed?",
    errno.ENOTDIR: "a part of its path is a file",
}
LEAST = 2**20
"""Bytes that must be free where a run is to write. It will need more; how much, nobody knows."""
ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class DiskError(Exception):
    """What a run leaves cannot be written. The message says what, why, where, how much is free and what to do."""


def why(error: OSError, path: Path) -> str:
    reason = _WHY.get(error.errno or 0) or error.strerror or str(error)
    todo = "make room there" if error.errno in ROOM else "make it writable"
    hint = f"{todo}, or choose another place with hydra.run.dir"
    return f"'{path}' cannot be written: {reason}; {room(path)}; {hint}"


def room(path: Path) -> str:
    """How much is free where the path is, or would be."""
    there = existing(path)
    try:
        disk = os.statvfs(there)
    except OSError:
        return f"'{there}' cannot be looked at"
    free, whole = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
    return f"{free / 1e9:.3f} GB of {whole / 1e9:.3f} GB are free in '{there}'"


def existing(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    path = path.absolute()
    while path != path.parent and not os.path.lexists(path):
        path = path.parent
    return path


def unfit(folder: Path) -> str:
    """Why nothing can be written there, before anything is; empty if something can."""
    there = existing(folder)
    if not there.is_dir():
        return f"'{folder}' is no directory" if there == folder else f"'{folder}' cannot be made: '{there}' is a file"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"'{folder}' cannot be written: '{there}' is read-only, or not for this user"
    disk = os.statvfs(there)
    if disk.f_bavail * disk.f_frsize < LEAST or (disk.f_files and not disk.f_favail):
        return f"'{folder}' cannot be written: the disk is full; {room(folder)}"
    return ""


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """An OSError inside becomes a DiskError about `path`."""
    try:
        yield
    except OSError as e:
        raise DiskError(why(e, path)) from e


def write_whole(path: Path, text: str, *, new: bool = False) -> None:
    """A file, whole or not at all; it takes the place of one that was there. DiskError if it cannot be written.

    `new`: FileExistsError if there is one.
    """
    beside = path.with_name(f".{path.name}.part")
    try:
        beside.write_text(text, "utf-8")
        if new:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o666))
        beside.replace(path)
    except BaseException as e:
        with contextlib.suppress(OSError):
            beside.unlink()
        if isinstance(e, OSError) and not isinstance(e, FileExistsError):
            raise DiskError(why(e, path)) from e
        raise


class Appended:
    """A new file that grows by whole pieces: each is there in full or not at all, and it is there when `add` returns.

    FileExistsError if there is one. DiskError if a piece cannot be written, or if the file is not at its path any
    more: the run directory was moved or removed.
    """

    def __init__(self, path: Path):
        self.path = path
        self._fd: int | None = None
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o666)
        except FileExistsError:
            raise
        except OSError as e:
            raise DiskError(why(e, path)) from e

    def add(self, piece: bytes) -> None:
        """ValueError after `close`."""
        if self._fd is None:
            raise ValueError(f"'{self.path}' is closed")
        with writing(self.path):
            if not os.path.samestat(os.stat(self.path), os.fstat(self._fd)):
                raise FileNotFoundError(errno.ENOENT, "another file is in its place")
            size = os.fstat(self._fd).st_size
            try:
                rest = memoryview(piece)
                while rest:
                    rest = rest[os.write(self._fd, rest) :]
            except BaseException:  # a signal's, too
                os.ftruncate(self._fd, size)
                raise

    def close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)
