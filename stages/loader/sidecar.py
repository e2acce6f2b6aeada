"""What is kept of a data file between runs, in one file beside it: where its rows begin, and what validation found.

    load(path, stamp, index_dir)             what is kept and still true, or None
    build(path, stamp, index_dir, scan)      keep what `scan()` finds: it yields row starts, and returns the counts
    sidecar.verdict(key, rows)               what validation found before, under the settings that `key` names
    sidecar.with_verdict(key, verdict)       the same, with one more kept
    only_one(fd)                             one process builds while others wait

The file is `<data file>.hridx`, or lies in the user's cache folder where the folder of the data cannot be written
to. Little-endian, no pickle:

    header    one page: magic, version, size, mtime_ns and inode of the data, hash of its sampled blocks, rows, lines,
              number of offsets, where verdicts begin, size of all, xxh3 of what stands before
    offsets   int64 [rows + 1]: where each row begins, and the end of the data; none for formats that have positions
              of their own
    verdicts  each: key, rows looked at, number of bad rows, xxh3 of these and of the positions, int64 positions

It is written to a temporary name and renamed, so it is there whole or not at all. One that is damaged, of another
version, or of other content is left unread and made anew.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import struct
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import xxhash

from stages.loader.stamp import Stamp

log = logging.getLogger("headrace")

SUFFIX = ".hridx"
_MAGIC, _VERSION, _PAGE = b"\x89HRIDX\r\n", 1, 4096
_HEADER = struct.Struct("<8sIIqqQ16sqqqqq")  # then xxh3_64 of these bytes
_SUM = struct.Struct("<Q")
_VERDICT = struct.Struct("<16sqqQ")

WAIT_S = 600.0
"""How long one process waits for another that builds; then it builds for itself."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The rows that cannot be used, int64 positions in order, among the first `checked` rows."""

    checked: int
    bad: np.ndarray


class Counts(NamedTuple):
    """Rows of a file, and its physical lines, blank ones too."""

    rows: int
    lines: int


Scan = Callable[[], Generator[np.ndarray, None, Counts]]
"""Begins to read the data: yields offsets, int64, in order, and returns what it counted."""


@dataclass(frozen=True, slots=True)
class Sidecar:
    """`offsets` int64 [rows + 1], or empty; mapped if `file` says where it is kept, else in memory."""

    path: Path
    stamp: Stamp
    index_dir: str
    counts: Counts
    offsets: np.ndarray
    verdicts: Mapping[bytes, Verdict]
    file: Path | None = None

    def verdict(self, key: bytes, rows: int) -> Verdict | None:
        """What is known of at least the first `rows` rows, under the settings that `key` names."""
        found = self.verdicts.get(key)
        return found if found and found.checked >= rows else None

    def with_verdict(self, key: bytes, verdict: Verdict) -> Sidecar:
        """The same with this verdict, kept for the next run."""
        if self.file is None:
            return replace(self, verdicts={**self.verdicts, key: verdict})
        others = (load(self.path, self.stamp, self.index_dir) or self).verdicts  # another process may have added one

        def again() -> Generator[np.ndarray, None, Counts]:
            yield self.offsets
            return self.counts

        return build(self.path, self.stamp, self.index_dir, again, {**others, key: verdict})


def load(path: Path, stamp: Stamp, index_dir: str) -> Sidecar | None:
    """What is kept of the data of this stamp; None if nothing is. Reads a page, maps the rest."""
    for file in places(path, index_dir):
        try:
            return _read(path, stamp, index_dir, file)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError) as e:
            log.info("%s is not used, and made anew: %s", file, e)
    return None


def build(
    path: Path, stamp: Stamp, index_dir: str, scan: Scan, verdicts: Mapping[bytes, Verdict] | None = None
) -> Sidecar:
    """Write it where it can be written, else hold it in memory and say so."""
    verdicts, failures = verdicts or {}, list[str]()
    for file in places(path, index_dir):
        try:
            _write(stamp, file, scan, verdicts)
            return _read(path, stamp, index_dir, file)
        except OSError as e:
            failures.append(f"{file}: {os.strerror(e.errno or 0)}")
    log.warning("the index of %s is not kept, and made again by the next run (%s)", path, "; ".join(failures))
    chunks: list[np.ndarray] = []
    counts = _drain(scan(), chunks.append)
    offsets = np.concatenate(chunks) if chunks else np.empty(0, np.int64)
    return Sidecar(path, stamp, index_dir, counts, offsets, verdicts)


@contextlib.contextmanager
def only_one(fd: int, wait_s: float = WAIT_S) -> Iterator[None]:
    """Hold the lock of a data file. Where there are no locks, or one is held for too long, go on without: what is
    written is whole either way, and only work is done twice.
    """
    give_up = time.monotonic() + wait_s
    held = False
    while not held and time.monotonic() < give_up:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = True
        except BlockingIOError:
            time.sleep(0.02)
        except OSError:
            break
    try:
        yield
    finally:
        if held:
            fcntl.flock(fd, fcntl.LOCK_UN)


def cache_folder() -> Path:
    """Where this user's programs keep what they can make again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace"


def places(path: Path, index_dir: str, suffix: str = SUFFIX) -> list[Path]:
    """Where what is kept of a file may lie, best first. Away from the data a name says which file it belongs to, by
    its whole path."""
    whole = path.absolute()
    name = f"{whole.name}-{xxhash.xxh3_64_hexdigest(os.fsencode(whole))}{suffix}"
    if index_dir:
        return [Path(index_dir).expanduser().absolute() / name]
    return [whole.with_name(whole.name + suffix), cache_folder() / name]


# -- the file ------------------------------------------------------------------------------------------------


def _read(path: Path, stamp: Stamp, index_dir: str, file: Path) -> Sidecar:
    """ValueError says why it cannot be used."""
    with open(file, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as opened:
        header = opened.read(_HEADER.size + _SUM.size)
        if len(header) < _HEADER.size + _SUM.size or not header.startswith(_MAGIC):
            raise ValueError("it is no index")
        fields = _HEADER.unpack_from(header)
        _, version, page, size, mtime_ns, inode, sample, rows, lines, count, verdicts_at, end = fields
        if (version, page) != (_VERSION, _PAGE):
            raise ValueError(f"it is of version {version}, and this is {_VERSION}")
        if _SUM.unpack_from(header, _HEADER.size)[0] != xxhash.xxh3_64_intdigest(header[: _HEADER.size]):
            raise ValueError("it is damaged")
        if Stamp(size, mtime_ns, inode, sample) != stamp:
            raise ValueError("the data was changed since it was made")
        if os.fstat(opened.fileno()).st_size != end or verdicts_at != _PAGE + 8 * count or count not in (0, rows + 1):
            raise ValueError("it is cut short")
        offsets = _map(opened, count)
        if count and not (0 <= offsets[0] <= offsets[-1] == size):
            raise ValueError("it is damaged")
        opened.seek(verdicts_at)
        verdicts = _verdicts(opened.read(end - verdicts_at))
    return Sidecar(path, stamp, index_dir, Counts(rows, lines), offsets, verdicts, file)


def _map(opened: BinaryIO, count: int) -> np.ndarray:
    if not count:
        return np.empty(0, np.int64)
    whole = mmap.mmap(opened.fileno(), _PAGE + 8 * count, prot=mmap.PROT_READ)
    return np.frombuffer(whole, "<i8", count, _PAGE)


def _verdicts(data: bytes) -> dict[bytes, Verdict]:
    """ValueError if one is damaged."""
    out: dict[bytes, Verdict] = {}
    at = 0
    while at < len(data):
        if at + _VERDICT.size > len(data):
            raise ValueError("it is cut short")
        key, checked, count, checksum = _VERDICT.unpack_from(data, at)
        bad = data[at + _VERDICT.size : at + _VERDICT.size + 8 * count]
        if len(bad) != 8 * count or _sum_of(key, checked, bad) != checksum:
            raise ValueError("it is damaged")
        out[key] = Verdict(checked, np.frombuffer(bad, "<i8"))
        at += _VERDICT.size + len(bad)
    return out


def _sum_of(key: bytes, checked: int, bad: bytes) -> int:
    return xxhash.xxh3_64_intdigest(key + checked.to_bytes(8, "little") + bad)


def _write(stamp: Stamp, file: Path, scan: Scan, verdicts: Mapping[bytes, Verdict]) -> None:
    """Under another name first. OSError if it cannot be done."""
    file.parent.mkdir(parents=True, exist_ok=True)
    _sweep(file)
    temporary = file.with_name(f".{file.name}.{os.getpid()}-{time.monotonic_ns()}.tmp")
    try:
        with temporary.open("xb", buffering=1 << 20) as out:
            _fill(out, stamp, scan, verdicts)
            out.flush()
            os.fsync(out.fileno())
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


def _fill(out: BinaryIO, stamp: Stamp, scan: Scan, verdicts: Mapping[bytes, Verdict]) -> None:
    out.write(bytes(_PAGE))
    counts = _drain(scan(), lambda chunk: out.write(chunk.astype("<i8", copy=False).data))
    verdicts_at = out.tell()
    for key, verdict in verdicts.items():
        bad = verdict.bad.astype("<i8").tobytes()
        out.write(_VERDICT.pack(key, verdict.checked, len(verdict.bad), _sum_of(key, verdict.checked, bad)) + bad)
    end = out.tell()
    data = (stamp.size, stamp.mtime_ns, stamp.inode, stamp.sample)
    counted = (*counts, (verdicts_at - _PAGE) // 8, verdicts_at, end)
    header = _HEADER.pack(_MAGIC, _VERSION, _PAGE, *data, *counted)
    out.seek(0)
    out.write(header + _SUM.pack(xxhash.xxh3_64_intdigest(header)))


def _drain(scan: Generator[np.ndarray, None, Counts], take: Callable[[np.ndarray], object]) -> Counts:
    """Everything it yields, and what it returns."""
    while True:
        try:
            take(next(scan))
        except StopIteration as end:
            return end.value


def _sweep(file: Path, age_s: float = 86400.0) -> None:
    """Remove what a process that was killed has left behind, if it is a day old."""
    for left in file.parent.glob(f".{file.name}.*.tmp"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > age_s:
                left.unlink()
