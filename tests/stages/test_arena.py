"""An arena may forget; what it gives is what was put, whoever is killed, stopped, forked or damages it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import random
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.cache_stress import stress
from pipeline.process import Child, started
from stages.arena import HANDLE, SMALLEST, Arena, BadRing, Handle, NoRoom, entry_bytes
from stages.ring import HEADER, Ring, format_ring
from tests.processes import shm_left, shm_names, wait_gone


def key(i: int) -> bytes:
    """All in a few buckets, so that these run full."""
    return (i % 3).to_bytes(8, "little") + i.to_bytes(8, "little")


def spread(i: int) -> bytes:
    return random.Random(i).randbytes(16)


def ids(i: int, length: int = 60) -> np.ndarray:
    return np.arange(i, i + length, dtype=np.int32)


def plain(found: list[np.ndarray | None]) -> list[list[int] | None]:
    return [None if f is None else f.tolist() for f in found]


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena.create(2**20)
    yield made
    made.close()


class Remote:
    """In another process: the run's arena as that process sees it."""

    def __init__(self, run_dir: Path, write: bool = False):
        found = Arena.of_run(run_dir, write)
        assert found is not None
        self.arena, self.run_dir, self.write = found, run_dir, write

    def get(self, keys: list[bytes]) -> list[np.ndarray | None]:
        return self.arena.get_many(keys)

    def put(self, items: list[tuple[bytes, np.ndarray]]) -> None:
        self.arena.put_many(items)

    def finds_it(self) -> bool:
        return Arena.of_run(self.run_dir, self.write) is not None

    def hold_lock_and_fork(self) -> int:
        """Ends with the lock held, leaving a forked child that lives on."""
        assert self.arena._lock is not None
        self.arena._lock.held().__enter__()
        child = os.fork()
        if not child:
            time.sleep(60)
            os._exit(0)
        return child

    def hold_lock(self) -> None:
        assert self.arena._lock is not None
        self._held = self.arena._lock.held()
        assert self._held.__enter__()


# -- what it keeps -------------------------------------------------------------------------------------------

steps = st.lists(
    st.tuples(st.sampled_from("pppgg"), st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(0, 900)),
    max_size=60,
)


@settings(max_examples=60, deadline=None)
@given(steps, st.booleans())
def test_it_may_forget_but_never_lies(steps: list[tuple[str, list[int], int]], crowded: bool) -> None:
    name = key if crowded else spread
    made, model = Arena.create(SMALLEST), dict[bytes, np.ndarray]()
    try:
        for version, (what, some, length) in enumerate(steps):
            if what == "p":
                items = [(name(i), ids(1000 * version + i, length)) for i in some]
                made.put_many(items)
                model |= dict(items)
            keys = [name(i) for i in some]
            for k, found in zip(keys, made.get_many(keys), strict=True):
                if found is not None:
                    assert np.array_equal(found, model[k])
            known = [name(i) for i in range(41)]
            assert made.entries == sum(made.has_many(known)) == sum(f is not None for f in made.get_many(known))
            assert made.bytes <= made.size
        last = made.get_many([name(i) for i in steps[-1][1]]) if steps and steps[-1][0] == "p" else []
        assert crowded or all(f is not None for f in last)  # a batch that fits is there when it was just put
    finally:
        made.close()


def test_what_was_put_again_is_what_is_given(arena: Arena) -> None:
    arena.put_many([(spread(1), ids(1)), (spread(1), ids(2))])
    arena.put_many([(spread(2), ids(3, 5))])
    arena.put_many([(spread(2), ids(4, 7))])
    assert plain(arena.get_many([spread(1), spread(2), spread(3)])) == [ids(2).tolist(), ids(4, 7).tolist(), None]
    assert arena.entries == 2


def test_equal_ids_are_not_written_again(arena: Arena) -> None:
    arena.put_many([(spread(1), ids(1))])
    before = arena.bytes
    arena.put_many([(spread(1), ids(1))] * 5)
    assert arena.bytes == before == entry_bytes(60)


def test_the_oldest_go_when_the_ring_comes_round_and_are_counted(arena: Arena) -> None:
    count = 4 * arena.size // entry_bytes(60)
    for i in range(count):
        arena.put_many([(spread(i), ids(i))])
    there = arena.has_many([spread(i) for i in range(count)])
    first = count - arena.entries * 101 // 100
    assert sum(there[:first]) == 0
    assert arena.entries > 0.8 * arena.size / entry_bytes(60)
    assert sum(there) == arena.entries == count - arena.evictions


def test_what_is_used_outlives_what_is_not(arena: Arena) -> None:
    count, used = 3 * arena.size // entry_bytes(60), [spread(10**6 + i) for i in range(10)]
    arena.put_many([(k, ids(7)) for k in used])
    for i in range(count):
        arena.put_many([(spread(i), ids(i))])
        assert all(f is not None for f in arena.get_many(used))
    assert not any(arena.has_many([spread(i) for i in range(20)]))


def test_readers_do_not_keep_entries_alive_or_write(arena: Arena, tmp_path: Path) -> None:
    arena.publish(tmp_path)
    child = Child(Remote, tmp_path, name="reader")
    try:
        child.wait_ready()
        with pytest.raises(PermissionError):
            child.call("put", [(spread(1), ids(1))])
    finally:
        child.kill()


def test_odd_sizes(arena: Arena) -> None:
    arena.put_many([(spread(1), ids(0, 0)), (spread(2), ids(5, 1))])
    arena.put_many([(spread(3), ids(0, arena.size))])  # larger than all of it
    assert plain(arena.get_many([spread(1), spread(2), spread(3)])) == [[], [5], None]
    with pytest.raises(ValueError, match="16 bytes"):
        arena.put_many([(b"short", ids(1))])
    arena.put_many([(spread(4), ids(9))])  # and it goes on
    assert plain(arena.get_many([spread(4)])) == [ids(9).tolist()]


def test_what_is_given_is_int32_read_only_and_stays(arena: Arena) -> None:
    arena.put_many([(spread(0), np.arange(60, dtype=np.int64))])
    [found] = arena.get_many([spread(0)])
    assert found is not None
    assert found.dtype == np.int32
    with pytest.raises(ValueError, match="read-only"):
        found[0] = 1
    with pytest.raises(ValueError, match="cannot set WRITEABLE"):
        found.flags.writeable = True
    for i in range(1, 3 * arena.size // entry_bytes(60)):  # its place is written over meanwhile
        arena.put_many([(spread(i), ids(i))])
    assert found.tolist() == list(range(60))


def test_after_close_everything_is_a_miss(arena: Arena, tmp_path: Path) -> None:
    arena.publish(tmp_path)
    arena.put_many([(spread(1), ids(1))])
    arena.close()
    arena.close()
    arena.put_many([(spread(2), ids(2))])
    assert arena.get_many([spread(1), spread(2)]) == [None, None]
    assert (arena.bytes, arena.entries) == (0, 0)
    assert Arena.of_run(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_threads_read_and_write_at_the_same_time(arena: Arena) -> None:
    wrong: list[Any] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(150):
                some = [rng.randrange(400) for _ in range(8)]
                arena.put_many([(spread(i), ids(i, i + 1)) for i in some])
                for i, found in zip(some, arena.get_many([spread(i) for i in some]), strict=True):
                    if found is not None and found.tolist() != ids(i, i + 1).tolist():
                        wrong.append(i)
        except Exception as e:
            wrong.append(e)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []


# -- killed in the middle of a write ---------------------------------------------------------------------------


class Killed(BaseException):
    pass


class Dying(mmap.mmap):
    """Memory in which the process ends at a chosen store, of which only a part is done."""

    left = -1
    rng = random.Random(0)

    def store(self, at: slice, data: bytes) -> None:
        if self.left == 0:
            done = self.rng.randrange(len(data))
            super().__setitem__(slice(at.start, at.start + done), data[:done])
            raise Killed
        self.left -= 1
        super().__setitem__(at, data)

    def __setitem__(self, at: Any, data: Any) -> None:
        self.store(at, data)


class DyingWords:
    """The same for words, which are written whole or not at all."""

    def __init__(self, memory: Dying):
        self.memory, self.words = memory, memoryview(memory).cast("Q")

    def __getitem__(self, at: int) -> int:
        return self.words[at]

    def __setitem__(self, at: int, word: int) -> None:
        if self.memory.left == 0:
            raise Killed
        self.memory.left -= 1
        self.words[at] = word


class _Free:
    def __enter__(self) -> bool:
        return True

    def __exit__(self, *_: object) -> None:
        pass


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.lists(st.integers(0, 120), min_size=1, max_size=6))
def test_a_writer_may_end_at_any_instruction(seed: int, ends: list[int]) -> None:
    """After each end another writer goes on: entries are whole or not there, and the counters are right again."""
    rng = random.Random(seed)
    memory = Dying(-1, SMALLEST)
    memory.rng = rng
    format_ring(memory, bytes(16))
    model: dict[bytes, set[tuple[int, ...]]] = {}

    def batch() -> list[tuple[bytes, np.ndarray]]:
        items = [(spread(i), ids(rng.randrange(9), rng.randrange(300))) for i in rng.sample(range(300), 20)]
        for k, value in items:
            model.setdefault(k, set()).add(tuple(value.tolist()))
        return items

    def check(ring: Ring) -> int:
        found = {k: f for k, f in zip(model, ring.get(list(model)), strict=True) if f is not None}
        assert all(tuple(f.tolist()) in model[k] for k, f in found.items())
        return len(found)

    for end in ends:
        ring = Ring(memory, _Free, None)
        for _ in range(rng.randrange(20)):
            ring.put(batch())
        ring._words = DyingWords(memory)  # pyright: ignore[reportAttributeAccessIssue]
        memory.left = end
        with contextlib.suppress(Killed):
            ring.put(batch())
        memory.left = -1
        check(Ring(memory, None, None))
        after = Ring(memory, _Free, None)
        last = batch()
        after.put(last)
        assert all(f is not None for f in after.get([k for k, _ in last]))
        assert after.state().entries == check(after)
        assert after.state().writing == 0


def test_killed_processes_leave_nothing_wrong() -> None:
    """The full size is a benchmark: python -m benchmarks.cache_stress."""
    outcome = stress("arena", operations=6000, processes=2, kills=2, max_bytes=2**19)
    assert (outcome.wrong, outcome.torn, outcome.leaked, outcome.errors) == (0, 0, 0, [])
    assert outcome.operations >= 12000
    assert min(outcome.hits, outcome.kills, outcome.evictions) > 0


# -- damage and strangers --------------------------------------------------------------------------------------


def test_a_flipped_bit_anywhere_is_a_miss_at_most() -> None:
    rng = random.Random(5)
    memory = mmap.mmap(-1, SMALLEST)
    format_ring(memory, bytes(16))
    ring = Ring(memory, _Free, None)
    for round_ in range(150):
        ring.put([(spread(i), ids(i, i % 90)) for i in rng.sample(range(250), 12)])
        for _ in range(4):
            at = rng.randrange(64, SMALLEST) if round_ % 2 else rng.randrange(64, HEADER + 9000)
            memory[at] ^= 1 << rng.randrange(8)
        for i, found in enumerate(ring.get([spread(i) for i in range(250)])):
            assert found is None or found.tolist() == ids(i, i % 90).tolist()
    ring.put([(spread(i), ids(i)) for i in range(5)])
    assert all(f is not None for f in ring.get([spread(i) for i in range(5)]))


def test_a_ring_of_another_version_or_with_a_damaged_header_is_refused() -> None:
    memory = mmap.mmap(-1, SMALLEST)
    with pytest.raises(BadRing):
        Ring(memory, None, None)
    format_ring(memory, b"j" * 16)
    with pytest.raises(BadRing, match="another job"):
        Ring(memory, None, b"k" * 16)
    Ring(memory, None, b"j" * 16)
    for at in range(56):
        memory[at] ^= 4
        with pytest.raises(BadRing):
            Ring(memory, None, b"j" * 16)
        memory[at] ^= 4


def write_handle(run_dir: Path, **changed: Any) -> None:
    handle = asdict(Handle(os.getpid(), started(os.getpid()) or 0, 0, bytes(16).hex())) | changed
    (run_dir / HANDLE).write_text(json.dumps(handle))


def test_what_is_not_ours_is_not_read(tmp_path: Path) -> None:
    """A foreign file or segment under the very name (mosaicml/streaming issue 332) is never decoded."""
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], stdin=subprocess.PIPE)
    assert other.stdin is not None
    try:
        for content in ("", "{}", "[]", "nonsense", '{"pid": "1", "started": 1, "fd": 1, "job": "00"}'):
            (tmp_path / HANDLE).write_text(content)
            assert Arena.of_run(tmp_path) is None
        write_handle(tmp_path, pid=other.pid, started=started(other.pid))  # its descriptor 0 is a pipe
        assert Arena.of_run(tmp_path) is None
        write_handle(tmp_path, pid=other.pid, started=1)  # another process had that number
        assert Arena.of_run(tmp_path) is None
    finally:
        other.kill()
        other.wait()


@pytest.mark.parametrize("fault", ["file", "unsealed", "open to others", "other magic", "other job", "short"])
def test_memory_that_is_not_an_arena_is_refused(fault: str, tmp_path: Path) -> None:
    memory = mmap.mmap(-1, SMALLEST)
    format_ring(memory, bytes(16))
    content = bytearray(memory[:])
    if fault == "other magic":
        content[:8] = b"STRANGER"
    if fault == "short":
        content = content[:100]
    if fault == "file":
        fd = os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT, 0o600)
    else:
        fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
        os.fchmod(fd, 0o644 if fault == "open to others" else 0o600)
    os.write(fd, content)
    if fault not in ("file", "unsealed"):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    with pytest.raises(BadRing):
        Arena(fd, write=False, job=b"x" * 16 if fault == "other job" else bytes(16))


def test_its_memory_is_there_sealed_and_private(arena: Arena) -> None:
    """So neither a read nor a write can end in SIGBUS (mosaicml/streaming issue 493)."""
    info = os.fstat(arena._fd)
    assert info.st_blocks * 512 >= info.st_size == arena.size
    assert stat.S_IMODE(info.st_mode) == 0o600
    for size in (0, 2 * arena.size):
        with pytest.raises(PermissionError):
            os.ftruncate(arena._fd, size)


def test_it_has_no_name_in_shared_memory() -> None:
    before = shm_names()
    made = Arena.create(2**20)
    assert shm_left(before) == set()
    made.close()


def test_memory_that_is_not_there_is_refused_with_need_and_free() -> None:
    with pytest.raises(NoRoom, match=r"needs 8 TiB, and .* of memory are free"):
        Arena.create(2**43)


# -- several processes -----------------------------------------------------------------------------------------


def test_other_processes_read_and_write_it(arena: Arena, tmp_path: Path) -> None:
    arena.publish(tmp_path)
    arena.put_many([(spread(1), ids(1))])
    assert Arena.of_run(tmp_path) is arena
    reader, writer = Child(Remote, tmp_path, name="reader"), Child(Remote, tmp_path, True, name="writer")
    try:
        reader.wait_ready()
        writer.wait_ready()
        writer.call("put", [(spread(2), ids(2))])
        want = [ids(1).tolist(), ids(2).tolist(), None]
        keys = [spread(1), spread(2), spread(3)]
        assert plain(reader.call("get", keys)) == plain(arena.get_many(keys)) == want
        reader.close("finds_it", 5.0)  # a reader that exits takes nothing with it (CPython's resource tracker would)
        assert plain(writer.call("get", keys)) == want
    finally:
        reader.kill()
        writer.kill()
    assert Arena.of_run(tmp_path) is arena


def test_jobs_and_their_processes_start_at_once(tmp_path: Path) -> None:
    """Processes of one run share, runs do not, and nothing collides (mosaicml/streaming issue 717)."""
    folders = [tmp_path / str(i) for i in range(4)]
    arenas = [Arena.create(2**20) for _ in folders]
    children: list[tuple[int, Child]] = []
    try:
        for i, (folder, made) in enumerate(zip(folders, arenas, strict=True)):
            folder.mkdir()
            made.publish(folder)
            made.put_many([(spread(1), ids(i))])
        children = [(i % 4, Child(Remote, folders[i % 4], name=f"{i}")) for i in range(8)]
        for i, child in children:
            child.wait_ready()
            assert plain(child.call("get", [spread(1)])) == [ids(i).tolist()]
    finally:
        for _, child in children:
            child.kill()
        for made in arenas:
            made.close()


OWNER = """
import sys, time
from pathlib import Path
import numpy as np
from stages.arena import Arena
arena = Arena.create(2**20)
arena.put_many([(bytes(16), np.arange(5, dtype=np.int32))])
arena.publish(Path(sys.argv[1]))
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture
def owner(tmp_path: Path, root: Path) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    made: list[subprocess.Popen[str]] = []

    def start() -> subprocess.Popen[str]:
        command = [sys.executable, "-c", OWNER, str(tmp_path)]
        process = subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True)
        made.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in made:
        process.kill()
        process.wait()


def test_an_owner_that_is_killed_takes_the_memory_with_it(owner: Any, tmp_path: Path) -> None:
    first = owner()
    seen = Arena.of_run(tmp_path)
    assert seen is not None
    assert seen is Arena.of_run(tmp_path)
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert plain(seen.get_many([bytes(16)])) == [[0, 1, 2, 3, 4]]  # who has it mapped may go on
    assert Arena.of_run(tmp_path) is None  # though its handle is still there
    assert (tmp_path / HANDLE).exists()
    assert plain(seen.get_many([bytes(16)])) == [None]  # closed: a reader of many runs keeps no dead one's memory
    owner()
    again = Arena.of_run(tmp_path)  # the next run in that folder
    assert again is not None
    assert again is not seen
    assert plain(again.get_many([bytes(16)])) == [[0, 1, 2, 3, 4]]
    again.close()


def test_a_stopped_writer_does_not_hang_the_others(arena: Arena, tmp_path: Path) -> None:
    arena.publish(tmp_path)
    arena.put_many([(spread(1), ids(1))])
    writer = Child(Remote, tmp_path, True, name="writer")
    try:
        writer.wait_ready()
        writer.call("hold_lock")
        os.kill(writer.pid, signal.SIGSTOP)
        begun = time.monotonic()
        for _ in range(50):
            arena.put_many([(spread(2), ids(2))])
        assert time.monotonic() - begun < 2
        assert arena.skipped == 50
        assert plain(arena.get_many([spread(1), spread(2)])) == [ids(1).tolist(), None]
    finally:
        writer.kill()
    arena.put_many([(spread(2), ids(2))])
    assert plain(arena.get_many([spread(2)])) == [ids(2).tolist()]


def test_a_killed_writer_leaves_the_lock_free_also_if_it_had_forked(arena: Arena, tmp_path: Path) -> None:
    arena.publish(tmp_path)
    writer = Child(Remote, tmp_path, True, name="writer")
    writer.wait_ready()
    grandchild = writer.call("hold_lock_and_fork")
    os.kill(writer.pid, signal.SIGKILL)
    assert wait_gone([writer.pid], 5) == []
    begun = time.monotonic()
    arena.put_many([(spread(2), ids(2))])
    assert time.monotonic() - begun < 0.2
    assert (arena.skipped, arena.entries) == (0, 1)
    writer.kill()  # its group, and so the grandchild
    assert wait_gone([grandchild], 5) == []


def test_a_forked_child_reads_and_writes(arena: Arena) -> None:
    """Also while a thread of the parent holds the locks; and its end leaves the parent's arena alone."""
    arena.put_many([(spread(1), ids(1))])
    assert arena._lock is not None
    with arena._lock.held() as got:
        assert got
        child = os.fork()
        if not child:
            right = plain(arena.get_many([spread(1)])) == [ids(1).tolist()]
            arena.put_many([(spread(2), ids(2))])  # the parent has it: given up, not waited for
            os._exit(0 if right and arena.skipped == 1 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    child = os.fork()
    if not child:
        arena.put_many([(spread(3), ids(3))])
        arena.close()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert plain(arena.get_many([spread(1), spread(2), spread(3)])) == [ids(1).tolist(), None, ids(3).tolist()]


def test_a_forked_child_does_not_take_the_handle_away(arena: Arena, tmp_path: Path) -> None:
    arena.publish(tmp_path)
    child = os.fork()
    if not child:
        arena.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert Arena.of_run(tmp_path) is arena
