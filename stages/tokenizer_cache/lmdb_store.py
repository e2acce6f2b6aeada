"""Token ids on disk, kept from run to run: an LMDB environment, mapped by every process that reads it.

    ids      key -> checksum, format, number of ids, sequence number, ids
    order    sequence number -> key, the oldest first

What LMDB does not see to by itself, and is seen to here:

- A value is believed only if its format, length and checksum (over the key too) are right. Else it is a miss, and is
  written anew (allenai/open-instruct PR 1509).
- The map has one fixed size. Above some three quarters of it the oldest entries go: deleting takes free pages, too.
  A map that is full all the same costs the put, never the run (jnwatson/py-lmdb issue 269).
- Writers exclude each other by a lock of ours, as LMDB's own is waited for without end, for a stopped process too.
- An environment must not be used after a fork, nor be opened twice in a process (py-lmdb issues 289, 340).
- LMDB's lock file is mapped and written to, so its blocks are taken beforehand; a data file that was cut short is made
  as long as it says it is. Else a full disk or a damaged file would end the run by SIGBUS (PowerDNS/lmdb-go issue 40).
- Where writing fails (no space, read-only), it is given up with one warning, and reading goes on.
"""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from xxhash import xxh3_64_intdigest

from pipeline.errors import Problem
from stages.locks import FileLock, ThreadLock
from stages.memory import free_disk, show_bytes
from stages.paths import cache_folder
from stages.tokenizer_cache.store import Item, TokenStore

if TYPE_CHECKING:
    import lmdb

log = logging.getLogger("headrace")

FORMAT = 1
SMALLEST = 2**20
LOCK_FILE_BYTES = 64 * 2**10
"""About a thousand readers at the same time."""
_VALUE = struct.Struct("<QIIQ")
_SEQ = struct.Struct(">Q")
_IDS = np.dtype(np.int32)
_PAGE = 4096
_AT_ONCE = 8
"""Entries that go before it is looked whether that was enough."""


class LmdbStore(TokenStore):
    """In the folder `path`, which is made, 0700. Any number of processes may read and write."""

    slow: ClassVar[bool] = True

    def __init__(self, path: Path, max_bytes: int, setting: str = "max_bytes"):
        self.path, self.setting = path.expanduser().absolute(), setting
        self.max_bytes = max(max_bytes // _PAGE * _PAGE, SMALLEST)
        self.evictions = self.skipped = self.damaged = 0
        self._aging = 0
        self._writable = self._usable = True
        self._lock: FileLock | None = None
        self._opened: _Environment | None = None
        self._opening = ThreadLock()
        self._environment()

    # -- the environment -------------------------------------------------------------------------------------

    def _environment(self) -> _Environment | None:
        """That of this process; None where it cannot be had."""
        opened = self._opened
        if opened is not None and opened.pid == os.getpid():
            return opened
        with self._opening:
            if self._usable and (self._opened is None or self._opened.pid != os.getpid()):
                try:
                    self._opened = self._open()
                except Exception as e:  # whatever LMDB or the operating system says: the run needs no disk
                    self._give_up(e)
            return self._opened if self._usable else None

    def _open(self) -> _Environment:
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self._lock is None:
                self._lock = FileLock(self.path / "writers.lock", os.O_RDWR | os.O_CREAT, patience=1.0)
            return _acquire(self.path, self.max_bytes, self._lock)
        except OSError as e:
            if not (self.path / "data.mdb").is_file():
                raise
            self._only_read(e)
            return _acquire(self.path, self.max_bytes, None)

    def _only_read(self, why: Exception) -> None:
        if self._writable:
            self._writable = False
            log.warning("the token cache in %s is written to no more: %s", self.path, why)

    def _give_up(self, why: Exception) -> None:
        if self._usable:
            self._usable = False
            log.warning("the token cache in %s is not used any more: %s", self.path, why)

    def _failed(self, opened: _Environment, why: Exception) -> None:
        """A damaged file is put away, so that the next start begins a new one; otherwise, nothing more is written."""
        if isinstance(why, opened.damage):
            opened.put_away()
            self._give_up(why)
        elif isinstance(why, opened.crowded):  # readers that died keep their places in LMDB's table
            opened.env.reader_check()
        else:
            self._only_read(why)

    @property
    def bytes(self) -> int:
        """In pages that are in use; the file itself never shrinks."""
        if (opened := self._environment()) is None:
            return 0
        try:
            with _reading, opened.env.begin() as txn:
                return opened.used(txn)
        except opened.error:
            return 0

    # -- reading ---------------------------------------------------------------------------------------------

    def get(self, keys: Sequence[bytes]) -> list[np.ndarray | None]:
        if (opened := self._environment()) is None:
            return [None] * len(keys)
        out: list[np.ndarray | None] = []
        aged: list[Item] = []
        try:
            with _reading, opened.env.begin(opened.ids, buffers=True) as txn:
                for key in keys:
                    value = txn.get(key)
                    if value is None or (body := self._whole(key, value)) is None:
                        out.append(None)
                        continue
                    ids = np.frombuffer(body, _IDS, -1, _VALUE.size)
                    out.append(ids)
                    if _VALUE.unpack_from(body)[3] < self._aging:
                        aged.append((key, ids))
        except opened.error as e:
            self._failed(opened, e)
            return [None] * len(keys)
        if aged:  # used again, and among the next quarter to go
            self._write(opened, aged, again=True)
        return out

    def _whole(self, key: bytes, value: memoryview) -> bytes | None:
        """A copy, if it is what was put. Its own length is looked at first: of damage LMDB sees little."""
        size = len(value)
        if size >= _VALUE.size:
            checksum, form, tokens, _ = _VALUE.unpack_from(value)
            if form == FORMAT and size == _VALUE.size + 4 * tokens:
                body = bytes(value)
                if xxh3_64_intdigest(body[8:] + key) == checksum:
                    return body
        self.damaged += 1
        return None

    # -- writing ---------------------------------------------------------------------------------------------

    def put(self, items: Sequence[Item]) -> None:
        if self._writable and (opened := self._environment()) is not None:
            self._write(opened, items, again=False)

    def _write(self, opened: _Environment, items: Sequence[Item], *, again: bool) -> None:
        lock = self._lock
        if not self._writable or lock is None:
            return
        with lock.held() as got:
            if not got:
                self.skipped += len(items)
                return
            try:
                for part in self._parts(items):
                    with _writing:
                        self._write_part(opened, part, again)
            except (opened.error, OSError) as e:
                self._failed(opened, e)

    def _parts(self, items: Sequence[Item]) -> Iterator[Sequence[Item]]:
        """So large that what a transaction copies, and two before it have left, fits into the quarter that is free:
        an entry changes about four pages, and those of two transactions back cannot be used again yet."""
        part: list[Item] = []
        pages = 0
        for key, ids in items:
            if 4 * len(ids) > self.max_bytes // 32:
                continue  # larger than is kept
            part.append((key, ids))
            pages += 4 + 4 * len(ids) // _PAGE * 2
            if pages >= self.max_bytes // _PAGE // 16:
                yield part
                part, pages = [], 0
        if part:
            yield part

    def _write_part(self, opened: _Environment, part: Sequence[Item], again: bool) -> None:
        try:
            self._write_locked(opened, part, again)
        except opened.full:  # readers hold on to pages that were freed: make room in a small step, and try once more
            try:
                with opened.env.begin(write=True) as txn:
                    dropped = self._drop(opened, txn, _AT_ONCE)
                self.evictions += dropped
                self._write_locked(opened, part, again)
            except opened.full:
                self.skipped += len(part)

    def _write_locked(self, opened: _Environment, items: Sequence[Item], again: bool) -> None:
        limit = (self.max_bytes - SMALLEST // 2) // 4 * 3
        dropped = 0
        with opened.env.begin(opened.ids, write=True, buffers=True) as txn:
            seq = opened.last(txn) + 1
            for key, ids in items:
                tail = np.ascontiguousarray(ids, _IDS).tobytes()
                if (old := txn.get(key)) is not None:
                    body = self._whole(key, old)
                    if body is not None and not again and body[_VALUE.size :] == tail:
                        continue
                    if len(old) >= _VALUE.size:  # its number may be a damaged one, and another's; that one stays then
                        was = _SEQ.pack(_VALUE.unpack_from(old)[3])
                        if (named := txn.get(was, db=opened.order)) is not None and bytes(named) == key:
                            txn.delete(was, db=opened.order)
                rest = _VALUE.pack(0, FORMAT, len(ids), seq)[8:] + tail
                txn.put(key, xxh3_64_intdigest(rest + key).to_bytes(8, "little") + rest)
                txn.put(_SEQ.pack(seq), key, db=opened.order, append=True)
                seq += 1
            while opened.used(txn) > limit and (gone := self._drop(opened, txn, _AT_ONCE)):
                dropped += gone
            first, crowded = opened.first(txn), opened.used(txn) > limit // 8 * 7
        self.evictions += dropped
        self._aging = first + (seq - first) // 4 if crowded else 0

    def _drop(self, opened: _Environment, txn: lmdb.Transaction, count: int) -> int:
        """The oldest entries, so many at most; how many there were."""
        gone = 0
        with txn.cursor(opened.order) as cursor:
            while gone < count and cursor.first():
                key = bytes(cursor.value())
                cursor.delete()
                gone += txn.delete(key, db=opened.ids)
        return gone

    def room(self, entries: int, tokens: int) -> int:
        """A quarter is kept free, and pages of random keys are two thirds full. A value of half a page and more has
        pages of its own."""
        value = _VALUE.size + 4 * tokens // max(entries, 1)
        if (node := value + 26) < _PAGE // 2 - 16:
            each = _PAGE / max(1.0, (_PAGE - 16) // node * 0.66)
        else:
            each = -(-(value + 16) // _PAGE) * _PAGE + 50
        return int(entries * (each + 40) * 4 / 3) + SMALLEST

    def close(self) -> None:
        with self._opening:
            opened, self._opened, self._usable = self._opened, None, False
            if opened is not None and opened.pid == os.getpid():
                _release(opened)
            if self._lock is not None:
                self._lock.close()


class _Environment:
    """What a process has opened, once for all of its stores in that folder."""

    def __init__(self, path: Path, map_size: int, *, readonly: bool):
        import lmdb

        self.pid, self.path, self.users = os.getpid(), path, 0
        self.error, self.full = lmdb.Error, lmdb.MapFullError
        self.crowded = lmdb.ReadersFullError
        self.damage = (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.InvalidError, lmdb.PanicError)
        # Without the lock of LMDB a reader that cannot write to the folder could not read either.
        self.env = lmdb.open(
            str(path),
            map_size=map_size,
            mode=0o700,
            max_dbs=2,
            max_readers=1000,
            readonly=readonly,
            lock=not readonly,
            metasync=False,  # a crash of the machine may cost the last entries, never the rest
            readahead=False,
        )
        try:
            if not readonly:
                _complete(path / "data.mdb", (self.env.info()["last_pgno"] + 1) * self.env.stat()["psize"])
                self.env.reader_check()
            self.ids = self.env.open_db(b"ids", create=not readonly)
            self.order = self.env.open_db(b"order", create=not readonly)
            self._inode = (path / "data.mdb").stat().st_ino
            self._page = self.env.stat()["psize"]
        except BaseException:
            self.env.close()
            raise

    def put_away(self) -> None:
        """Take the files' names, unless others have begun anew already. Who has them open goes on with what it has."""
        data = self.path / "data.mdb"
        try:
            if data.stat().st_ino == self._inode:
                data.unlink()
                (self.path / "lock.mdb").unlink(missing_ok=True)
        except OSError:
            pass

    def used(self, txn: lmdb.Transaction) -> int:
        """Bytes of the pages of both trees."""
        stats = [txn.stat(db) for db in (self.ids, self.order)]
        return self._page * sum(s["branch_pages"] + s["leaf_pages"] + s["overflow_pages"] for s in stats)

    def first(self, txn: lmdb.Transaction) -> int:
        with txn.cursor(self.order) as cursor:
            return _SEQ.unpack(cursor.key())[0] if cursor.first() else 0

    def last(self, txn: lmdb.Transaction) -> int:
        with txn.cursor(self.order) as cursor:
            return _SEQ.unpack(cursor.key())[0] if cursor.last() else 0


_environments: dict[str, _Environment] = {}
_guard = ThreadLock()
_reading, _writing = Lock(), Lock()
"""Held by whoever has a transaction, so that no fork happens in the middle of one."""


def _before_fork() -> None:
    _reading.acquire()
    _writing.acquire()


def _after_fork() -> None:
    _writing.release()
    _reading.release()


def _in_child() -> None:
    """Close what the parent opened: no transaction is under way, so nothing of the parent's is given back by that."""
    _after_fork()
    for opened in _environments.values():
        opened.env.close()
    _environments.clear()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)


def _acquire(path: Path, map_size: int, lock: FileLock | None) -> _Environment:
    """Opened here or before; `lock` None: only to be read."""
    name = os.path.realpath(path)
    with _guard:
        opened = _environments.get(name)
        if opened is None:
            opened = _environments[name] = _open(path, map_size, lock) if lock else _read(path, map_size)
        opened.users += 1
        return opened


def _release(opened: _Environment) -> None:
    with _guard:
        opened.users -= 1
        if not opened.users:
            _environments.pop(os.path.realpath(opened.path), None)
            opened.env.close()


def _read(path: Path, map_size: int) -> _Environment:
    return _Environment(path, map_size, readonly=True)


def _open(path: Path, map_size: int, lock: FileLock) -> _Environment:
    import lmdb

    fd = os.open(path / "lock.mdb", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, LOCK_FILE_BYTES)
    finally:
        os.close(fd)
    try:
        return _Environment(path, map_size, readonly=False)
    except lmdb.DiskError as e:
        raise OSError(str(e)) from e
    except (lmdb.InvalidError, lmdb.VersionMismatchError, lmdb.CorruptedError, lmdb.PageNotFoundError) as e:
        with lock.held() as got:
            if not got:
                raise
            log.warning("the token cache in %s is damaged (%s), so it is begun anew", path, e)
            for name in ("data.mdb", "lock.mdb"):  # a process that still has them open goes on with what it has
                (path / name).unlink(missing_ok=True)
            return _Environment(path, map_size, readonly=False)


def _complete(file: Path, size: int) -> None:
    """Pages that are not there read as zeros, which is an error or a wrong checksum; beyond the end they are a signal.
    Only ever makes the file longer, as others may be writing to it."""
    if file.stat().st_size < size:
        log.warning("%s was cut short: what is missing will be tokenised again", file)
        fd = os.open(file, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.posix_fallocate(fd, size - 1, 1)
        finally:
            os.close(fd)


def default_path(path: str) -> Path:
    """The folder that is given, or the one in the user's cache folder."""
    return Path(path).expanduser().absolute() if path else cache_folder() / "tokens.lmdb"


def disk_problems(key: str, name: str, path: str, max_bytes: int) -> Iterable[Problem]:
    """A warning: the database may stay smaller, and a full disk costs the cache, not the run."""
    folder = default_path(path)
    if folder.exists() and not folder.is_dir():
        yield Problem(where=f"{key}.path", what=f"{folder} is not a folder")
        return
    try:
        there = (folder / "data.mdb").stat().st_size
    except OSError:
        there = 0
    if max_bytes - there > (free := free_disk(folder)):
        what = f"the database may grow to {show_bytes(max_bytes)}, and {show_bytes(free)} are free in {folder.parent}"
        hint = "lower it, make room, or choose another path: what finds no room is tokenised again"
        yield Problem(where=f"{key}.{name}", what=what, hint=hint, level="warning")
