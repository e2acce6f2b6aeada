"""The store on disk may forget; what it gives is what was put, and it never costs the run."""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import resource
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.cache_stress import stress
from pipeline.process import Child
from stages.tokenizer_cache import lmdb_store
from stages.tokenizer_cache.lmdb_store import FORMAT, SMALLEST, LmdbStore, default_path, disk_problems

Open = Callable[..., LmdbStore]


def key(i: int) -> bytes:
    return random.Random(i).randbytes(16)


def ids(i: int, length: int = 60) -> np.ndarray:
    return np.arange(i, i + length, dtype=np.int32)


def plain(found: list[np.ndarray | None]) -> list[list[int] | None]:
    return [None if f is None else f.tolist() for f in found]


def right(store: LmdbStore, count: int, length: int = 60) -> int:
    """How many of the first entries are there; what is there must be what was put."""
    found = store.get([key(i) for i in range(count)])
    assert all(f is None or f.tolist() == ids(i, length).tolist() for i, f in enumerate(found))
    return sum(f is not None for f in found)


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[Open]:
    opened: list[LmdbStore] = []

    def open_(max_bytes: int = 8 * SMALLEST, name: str = "db") -> LmdbStore:
        opened.append(LmdbStore(tmp_path / name, max_bytes))
        return opened[-1]

    yield open_
    for store in opened:
        store.close()
        store.close()


# -- what it keeps -------------------------------------------------------------------------------------------

steps = st.lists(
    st.tuples(st.sampled_from("ppgr"), st.lists(st.integers(0, 30), min_size=1, max_size=8), st.integers(0, 2000)),
    max_size=25,
)


@settings(max_examples=15, deadline=None)
@given(steps)
def test_it_remembers_what_was_put_last_also_after_a_restart(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, list[int], int]]
) -> None:
    folder, model = tmp_path_factory.mktemp("db"), dict[bytes, list[int]]()
    store = LmdbStore(folder, 32 * SMALLEST)
    for version, (what, some, length) in enumerate(steps):
        if what == "p":
            items = [(key(i), ids(1000 * version + i, length)) for i in some]
            store.put(items)
            model |= {k: v.tolist() for k, v in items}
        elif what == "r":
            store.close()
            store = LmdbStore(folder, 32 * SMALLEST)
        keys = [key(i) for i in some]
        assert plain(store.get(keys)) == [model.get(k) for k in keys]
    store.close()


def test_it_stays_within_its_bytes_and_the_oldest_go_first(open_store: Open, tmp_path: Path) -> None:
    store = open_store(SMALLEST)
    for i in range(0, 2000, 100):
        store.put([(key(j), ids(j)) for j in range(i, i + 100)])
        assert store.bytes <= store.max_bytes
    assert (tmp_path / "db" / "data.mdb").stat().st_size <= store.max_bytes
    gone = store.evictions + store.skipped
    there = [f is not None for f in store.get([key(i) for i in range(2000)])]
    assert sum(there) == 2000 - gone > 500
    assert sum(there[-500:]) > 480
    assert not any(there[:1000])


def test_what_is_used_outlives_what_is_not(open_store: Open) -> None:
    store = open_store(SMALLEST)
    store.put([(key(i), ids(i)) for i in range(20)])
    for i in range(20, 2000, 60):
        store.put([(key(j), ids(j)) for j in range(i, i + 60)])
        assert right(store, 10) == 10
    assert right(store, 20) == 10


def test_the_room_that_is_advised_is_enough(open_store: Open) -> None:
    for length in (60, 256, 700):
        store = open_store(name=f"db{length}")
        room, name = store.room(1500, 1500 * length), f"of{length}"
        store = open_store(room, name)
        for i in range(0, 1500, 150):
            store.put([(key(j), ids(j, length)) for j in range(i, i + 150)])
        assert (right(store, 1500, length), store.evictions) == (1500, 0), length


def test_odd_sizes(open_store: Open) -> None:
    store = open_store()
    store.put([(key(1), ids(0, 0)), (key(2), ids(5, 1)), (key(3), ids(0, store.max_bytes))])
    assert plain(store.get([key(1), key(2), key(3)])) == [[], [5], None]


def test_what_is_given_is_int32_read_only_and_stays(open_store: Open) -> None:
    store = open_store(SMALLEST)
    store.put([(key(0), np.arange(60, dtype=np.int64))])
    [found] = store.get([key(0)])
    assert found is not None
    assert found.dtype == np.int32
    with pytest.raises(ValueError, match="cannot set WRITEABLE"):
        found.flags.writeable = True
    for i in range(1, 1401, 200):
        store.put([(key(j), ids(j)) for j in range(i, i + 200)])
    assert store.get([key(0)]) == [None]
    store.close()
    assert found.tolist() == list(range(60))


def test_after_close_everything_is_a_miss(open_store: Open) -> None:
    store = open_store()
    store.put([(key(1), ids(1))])
    store.close()
    store.put([(key(2), ids(2))])
    assert (store.get([key(1)]), store.bytes) == ([None], 0)
    assert plain(open_store().get([key(1), key(2)])) == [ids(1).tolist(), None]


def test_the_folder_is_private(open_store: Open, tmp_path: Path) -> None:
    open_store(name="a/b")
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700
    assert all(not f.stat().st_mode & 0o077 for f in (tmp_path / "a" / "b").iterdir())


# -- damage (allenai/open-instruct PR 1509) --------------------------------------------------------------------


def change(folder: Path, how: Callable[[bytes], bytes], only: bytes | None = None) -> None:
    """Write over values, as an older program or a bad disk would."""
    with lmdb.open(str(folder), max_dbs=2, map_size=62 * SMALLEST) as env:
        db = env.open_db(b"ids")
        with env.begin(db, write=True) as txn:
            for k, v in list(txn.cursor()):
                if only in (None, k):
                    txn.put(k, how(v))


def flipped(value: bytes) -> bytes:
    at = random.Random(value).randrange(len(value))
    return value[:at] + bytes([value[at] ^ 16]) + value[at + 1 :]


def older(value: bytes) -> bytes:
    return value[:8] + (FORMAT - 1).to_bytes(4, "little") + value[12:]


@pytest.mark.parametrize(
    "how", [flipped, older, lambda v: v[:-4], lambda v: v[:10], lambda v: b"", lambda v: v + bytes(4)]
)
def test_a_bad_value_is_a_miss_is_counted_and_written_anew(
    how: Callable[[bytes], bytes], open_store: Open, tmp_path: Path
) -> None:
    store = open_store(SMALLEST)
    store.put([(key(i), ids(i)) for i in range(50)])
    store.close()
    change(tmp_path / "db", how)
    store = open_store(SMALLEST)
    assert right(store, 50) == 0
    assert store.damaged == 50
    store.put([(key(i), ids(i)) for i in range(50)])
    assert right(store, 50) == 50
    for i in range(50, 1500, 200):  # what was written anew goes in its turn
        store.put([(key(j), ids(j)) for j in range(i, i + 200)])
    assert store.evictions > 0
    assert right(store, 50) == 0


def test_a_value_under_another_key_is_a_miss(open_store: Open, tmp_path: Path) -> None:
    store = open_store()
    store.put([(key(1), ids(1)), (key(2), ids(2))])
    store.close()
    values: dict[bytes, bytes] = {}
    change(tmp_path / "db", lambda v: values.setdefault(b"first", v))
    assert sum(f is not None for f in open_store().get([key(1), key(2)])) == 1


READ = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from tests.stages.tokenizer_cache.test_lmdb_store import LmdbStore, SMALLEST, ids, key, right
for folder in sorted(Path(sys.argv[1]).glob("trial*")):
    for start in range(3):
        store = LmdbStore(folder, 8 * SMALLEST)
        found = right(store, 300)
        store.put([(key(i), ids(i)) for i in range(250, 350)])
        right(store, 350)
        store.close()
    print(folder.name, found, flush=True)
"""


def test_a_damaged_file_costs_entries_and_never_the_process(open_store: Open, tmp_path: Path, root: Path) -> None:
    """A flipped bit anywhere, or a file that was cut short: no signal, no wrong ids, and the next start is fine."""
    store = open_store()
    store.put([(key(i), ids(i)) for i in range(300)])
    store.close()
    rng, source = random.Random(3), tmp_path / "db"
    whole = (source / "data.mdb").read_bytes()
    for trial in range(26):
        folder, content = tmp_path / f"trial{trial:02}", bytearray(whole)
        shutil.copytree(source, folder)
        if trial < 6:
            del content[[0, 100, 4096, 8192, len(whole) // 2, len(whole) - 100][trial] :]
        for _ in range(trial >= 6):
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        (folder / "data.mdb").write_bytes(content)
    run = subprocess.run([sys.executable, "-c", READ, str(tmp_path), str(root)], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr[-1500:]
    found = [int(line.split()[1]) for line in run.stdout.splitlines()]
    assert len(found) == 26
    assert min(found[:6]) >= 50  # what was put after the damage


def test_what_is_no_database_is_begun_anew_with_one_warning(
    tmp_path: Path, open_store: Open, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "db").mkdir()
    (tmp_path / "db" / "data.mdb").write_bytes(b"something else" * 5000)
    store = open_store()
    store.put([(key(1), ids(1))])
    assert right(store, 2) == 1
    assert [r.levelno for r in caplog.records] == [logging.WARNING]


def test_a_folder_that_cannot_be_made_costs_one_warning(
    tmp_path: Path, open_store: Open, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "db").write_text("a file")
    store = open_store()
    for _ in range(3):
        store.put([(key(1), ids(1))])
        assert store.get([key(1)]) == [None]
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    assert "db" in caplog.text


# -- full ------------------------------------------------------------------------------------------------------

FILL = """
import logging, os, resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
logging.basicConfig(format="%(levelname)s %(message)s", stream=sys.stdout)
from tests.stages.tokenizer_cache.test_lmdb_store import LmdbStore, SMALLEST, ids, key, right
if sys.argv[3] != "0":
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]),) * 2)
store = LmdbStore(Path(sys.argv[1]) / "db", 62 * SMALLEST)
for i in range(0, 6000, 100):
    store.put([(key(j), ids(j)) for j in range(i, i + 300)])
    right(store, i + 300)
print("kept", right(store, 6000))
store.close()
again = LmdbStore(Path(sys.argv[1]) / "db", 62 * SMALLEST)
print("after a restart", right(again, 6000))
"""


def fill(root: Path, folder: Path, limit: int, *before: str) -> list[str]:
    command = [*before, sys.executable, "-c", FILL, str(folder), str(root), str(limit)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout.splitlines()


@pytest.mark.parametrize("limit", [400_000, 1_000_000])
def test_a_disk_that_is_full_costs_one_warning_and_what_was_kept_stays(tmp_path: Path, root: Path, limit: int) -> None:
    warning, kept, after = fill(root, tmp_path, limit)
    assert warning.startswith("WARNING the token cache in")
    assert "is written to no more" in warning
    assert int(kept.split()[-1]) == int(after.split()[-1]) > 100


@pytest.mark.parametrize("size", ["20k", "100k", "1m"])
def test_a_tmpfs_that_is_full_never_ends_the_process(tmp_path: Path, root: Path, size: str) -> None:
    """PowerDNS/lmdb-go issue 40: the lock file is mapped and written to, and ended processes by SIGBUS."""
    script = f'mount -t tmpfs -o size={size} none "{tmp_path}" && exec "$@"'
    inside = ["unshare", "--mount", "--map-root-user", "sh", "-c", script, "sh"]
    if shutil.which("unshare") is None or subprocess.run([*inside, "true"], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here; the same is tested with a limit on the size of files")
    lines = fill(root, tmp_path, 0, *inside)
    assert len([line for line in lines if line.startswith("WARNING")]) <= 2  # one for each of the two stores
    assert lines[0].startswith("WARNING")


class Remote:
    """A store in another process."""

    def __init__(self, folder: Path, max_bytes: int):
        self.store = LmdbStore(folder, max_bytes)

    def fill(self, first: int, count: int, length: int) -> int:
        for i in range(first, first + count, 50):
            self.store.put([(key(j), ids(j, length)) for j in range(i, i + 50)])
        return self.store.skipped

    def check(self, count: int, length: int) -> int:
        return right(self.store, count, length)

    def hold_lock(self) -> None:
        assert self.store._lock is not None
        self._held = self.store._lock.held()
        assert self._held.__enter__()

    def close(self) -> None:
        self.store.close()


def test_two_writers_that_fill_it_three_times_over(tmp_path: Path, open_store: Open) -> None:
    """jnwatson/py-lmdb issue 269: both find it full, both resize it, and it is corrupted."""
    children = [Child(Remote, tmp_path / "db", 2 * SMALLEST, name=f"{i}") for i in range(2)]
    try:
        for i, c in enumerate(children):
            c.wait_ready()
            c.post("fill", i * 4000, 4000, 250)
        for c in children:
            assert c.take(120)[0] == "done"
        for c in children:
            assert c.call("check", 8000, 250) > 300
    finally:
        for c in children:
            c.kill()
    store = open_store(2 * SMALLEST)
    assert right(store, 8000, 250) > 300
    assert store.damaged == 0
    assert (tmp_path / "db" / "data.mdb").stat().st_size <= 2 * SMALLEST


def test_a_map_that_is_full_costs_the_put_and_not_the_run(open_store: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that holds on to old pages lets nothing be used again."""
    store = open_store(SMALLEST)
    store.put([(key(i), ids(i)) for i in range(100)])
    shared = store._environment()
    assert shared is not None
    with shared.env.begin():
        for i in range(0, 30_000, 100):
            store.put([(key(j), ids(j)) for j in range(i, i + 100)])
        assert store.skipped > 0
        right(store, 30_000)
    before = store.skipped
    store.put([(key(50_000), ids(1))])
    assert plain(store.get([key(50_000)])) == [ids(1).tolist()]
    assert store.skipped == before


# -- several processes and threads -------------------------------------------------------------------------------


def test_killed_writers_leave_nothing_wrong() -> None:
    outcome = stress("disk", operations=3000, processes=2, kills=2, max_bytes=2 * SMALLEST)
    assert (outcome.wrong, outcome.torn, outcome.errors) == (0, 0, [])
    assert outcome.operations >= 6000
    assert min(outcome.hits, outcome.kills) > 0


def test_a_stopped_writer_does_not_hang_the_others(open_store: Open, tmp_path: Path) -> None:
    store = open_store()
    store.put([(key(1), ids(1))])
    writer = Child(Remote, tmp_path / "db", 8 * SMALLEST, name="writer")
    try:
        writer.wait_ready()
        writer.call("hold_lock")
        os.kill(writer.pid, signal.SIGSTOP)
        begun = time.monotonic()
        for _ in range(30):
            store.put([(key(2), ids(2))])
        assert time.monotonic() - begun < 5
        assert plain(store.get([key(1), key(2)])) == [ids(1).tolist(), None]
    finally:
        writer.kill()
    store.put([(key(2), ids(2))])
    assert right(store, 3) == 2


def test_a_folder_is_opened_once_in_a_process(open_store: Open) -> None:
    one, two = open_store(), open_store()
    one.put([(key(1), ids(1))])
    two.put([(key(2), ids(2))])
    one.close()
    assert right(two, 3) == 2


def test_threads_read_and_write_at_the_same_time(open_store: Open) -> None:
    store, wrong = open_store(), list[Any]()

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(6):
                store.put([(key(i), ids(i)) for i in rng.sample(range(200), 8)])
                for _ in range(10):
                    right(store, 200)
        except BaseException as e:
            wrong.append(e)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []


def use(folder: Path, store: LmdbStore | None, rounds: int) -> None:
    """In a worker: with the store of the parent, as a forked one has it, or with one of its own."""
    mine = store or LmdbStore(folder, 8 * SMALLEST)
    for i in range(rounds):
        if right(mine, 10) != 10:
            os._exit(3)
        mine.put([(key(1000 + i), ids(i))])
    if store is None:
        mine.close()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_may_be_forked_or_spawned(method: str, open_store: Open, tmp_path: Path) -> None:
    """Environments that were opened before a fork crash their children, and their readers fill LMDB's table
    (zhuyu-cs/MeanFlow PR 43, py-lmdb issues 289 and 340, sophos/SOREL-20M issue 14)."""
    store = open_store()
    store.put([(key(i), ids(i)) for i in range(10)])
    context: Any = multiprocessing.get_context(method)
    for _ in range(3 if method == "fork" else 1):
        inherited = store if method == "fork" else None
        workers = [context.Process(target=use, args=(tmp_path / "db", inherited, 20)) for _ in range(4)]
        for w in workers:
            w.start()
        for w in workers:
            w.join()
        assert [w.exitcode for w in workers] == [0] * 4
    assert right(store, 10) == 10
    assert plain(store.get([key(1019)])) == [ids(19).tolist()]
    shared = store._environment()
    assert shared is not None
    shared.env.reader_check()
    assert len(shared.env.readers().splitlines()) <= 3


# -- the plan --------------------------------------------------------------------------------------------------


def test_the_default_folder_is_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_path("") == tmp_path / "headrace" / "tokens.lmdb"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_path("") == tmp_path / "home" / ".cache" / "headrace" / "tokens.lmdb"
    assert default_path("~/x") == tmp_path / "home" / "x"


def test_a_disk_that_is_too_small_is_told_with_need_and_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def problems(max_bytes: int) -> list[tuple[str, str, str]]:
        found = disk_problems("tokenizer_cache", "max_bytes", str(tmp_path / "db"), max_bytes)
        return [(p.where, p.what, p.level) for p in found]

    monkeypatch.setattr(lmdb_store, "free_disk", lambda folder: 3 * 2**20)
    assert problems(2 * 2**20) == []
    [(where, what, level)] = problems(5 * 2**20)
    assert (where, level) == ("tokenizer_cache.max_bytes", "warning")
    assert "5 MiB" in what
    assert "3 MiB" in what
    (tmp_path / "db").mkdir()
    (tmp_path / "db" / "data.mdb").write_bytes(bytes(3 * 2**20))  # this much it has already
    assert problems(5 * 2**20) == []
    shutil.rmtree(tmp_path / "db")
    (tmp_path / "db").write_text("a file")
    [(where, _, level)] = problems(2**20)
    assert (where, level) == ("tokenizer_cache.path", "error")


def test_limits_are_those_of_the_process() -> None:
    """The test with a limit on the size of files would prove nothing if this process had one."""
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
