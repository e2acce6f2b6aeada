"""Claim: whatever writers do and however they die, a reader of a token store never gets a value that was not put.

    python -m benchmarks.cache_stress store=arena operations=1000000      # 4 processes, about 2 minutes
    python -m benchmarks.cache_stress store=disk operations=20000

Processes get and put at the same time, each key with changing values, into a store that is too small for all of them,
while random ones are killed (SIGKILL) or stopped for a moment. Every value says its key and version, and all its ids
follow from these: `wrong` is a value of another key or of a version that was never put, `torn` any other difference,
`leaked` what is left of shared memory when all is closed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from xxhash import xxh3_128_digest

from pipeline.process import Child, ChildDied
from stages.arena import Arena, NoRoom
from stages.tokenizer_cache.lmdb_store import LmdbStore

KEYS, VERSIONS, LONGEST = 4096, 64, 400
CHUNK = 512
"""Operations between two reports of a process; a killed one repeats those since its last."""
POOL = np.random.default_rng(0).integers(0, 2**31 - 1, 2**16 + LONGEST, dtype=np.int32)


@dataclass(slots=True)
class Outcome:
    """Sums over all processes, and what they were made to suffer."""

    operations: int = 0
    gets: int = 0
    hits: int = 0
    wrong: int = 0
    torn: int = 0
    leaked: int = 0
    kills: int = 0
    stops: int = 0
    evictions: int = 0
    errors: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, part: dict[str, int]) -> None:
        for name, value in part.items():
            setattr(self, name, getattr(self, name) + value)


def key_of(i: int) -> bytes:
    return xxh3_128_digest(b"stress %d" % i)


def value_of(i: int, version: int) -> np.ndarray:
    """Its key, its version, then as many ids as these two say, from a place that they say."""
    start = (i * 2654435761 + version * 40503) % 2**16
    length = (i * 31 + version * 17) % (LONGEST - 2)
    return np.concatenate([np.array([i, version], np.int32), POOL[start : start + length]])


def judge(i: int, ids: np.ndarray) -> str:
    """`right`, `wrong` or `torn`."""
    if len(ids) < 2 or ids[0] != i or not 0 <= ids[1] < VERSIONS:
        return "wrong"
    return "right" if np.array_equal(ids, value_of(i, int(ids[1]))) else "torn"


class Worker:
    """In a process of its own."""

    def __init__(self, store: str, folder: Path, max_bytes: int, seed: int):
        if store == "arena":
            arena = Arena.of_run(folder, write=True)
            assert arena is not None, "no arena is published"
            self._get, self._put = arena.get_many, arena.put_many
        else:
            disk = LmdbStore(folder / "db", max_bytes)
            self._get, self._put = disk.get, disk.put
        self._rng = random.Random(seed)

    def work(self, operations: int) -> Iterator[dict[str, int]]:
        rng, done = self._rng, 0
        while done < operations:
            counts: dict[str, int] = dict.fromkeys(("operations", "gets", "hits", "wrong", "torn"), 0)
            while counts["operations"] < CHUNK:
                # Some keys come more often than others, so that there are hits as well as evictions.
                some = [int(KEYS * rng.random() ** 2) for _ in range(rng.randint(1, 32))]
                if rng.random() < 0.5:
                    self._put([(key_of(i), value_of(i, rng.randrange(VERSIONS))) for i in some])
                else:
                    self._check(some, counts)
                counts["operations"] += len(some)
            done += counts["operations"]
            yield counts

    def _check(self, some: list[int], counts: dict[str, int]) -> None:
        for i, ids in zip(some, self._get([key_of(i) for i in some]), strict=True):
            counts["gets"] += 1
            if ids is not None:
                verdict = judge(i, ids)
                counts["hits"] += 1
                if verdict != "right":
                    counts[verdict] += 1


class _Crew:
    """Keeps one worker going until its share is done, with a new process whenever it was killed."""

    def __init__(self, number: int, share: int, kills: int, outcome: Outcome, lock: threading.Lock, make: Any):
        self._number, self._share, self._outcome, self._lock, self._make = number, share, outcome, lock, make
        self._rng = random.Random(number)
        self._kill_at = sorted(self._rng.uniform(0, share * 0.9) for _ in range(kills))
        self.thread = threading.Thread(target=self._keep_going)
        self.thread.start()

    def _keep_going(self) -> None:
        done = lives = 0
        while done < self._share:
            lives += 1
            killed = False
            child: Child = self._make(self._number + 1000 * lives)
            try:
                child.wait_ready()
                for counts in child.stream("work", self._share - done):
                    done += counts["operations"]
                    with self._lock:
                        self._outcome.add(counts)
                    if self._kill_at and done >= self._kill_at[0]:
                        del self._kill_at[0]
                        killed = self._torment(child) or killed
            except Exception as e:
                if not (killed and isinstance(e, ChildDied)):
                    with self._lock:
                        self._outcome.errors.append(repr(e))
                    return
            finally:
                child.kill()

    def _torment(self, child: Child) -> bool:
        """At some instruction of its next operations: stop it for a moment, then kill it or let it go on."""
        time.sleep(self._rng.uniform(0, 0.004))
        if stop := self._rng.random() < 0.3:
            os.kill(child.pid, signal.SIGSTOP)
            time.sleep(self._rng.uniform(0, 0.4))
        if kill := self._rng.random() < 0.8 or not stop:
            os.kill(child.pid, signal.SIGKILL)
        else:
            os.kill(child.pid, signal.SIGCONT)
        with self._lock:
            self._outcome.kills += kill
            self._outcome.stops += stop
        return kill


def stress(
    store: str = "arena",
    *,
    operations: int = 1_000_000,
    processes: int = 4,
    kills: int = 20,
    max_bytes: int = 2**20,
    seed: int = 0,
    folder: Path | None = None,
) -> Outcome:
    """`operations` and `kills` are for each process; a killed one is replaced.

    `store`: arena (stages/arena.py) or disk (LmdbStore).
    """
    outcome, lock, started = Outcome(), threading.Lock(), time.perf_counter()
    before = set(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory() as made:
        place = folder or Path(made)
        arena = Arena.create(max_bytes) if store == "arena" else None
        if arena:
            arena.publish(place)

        def make(number: int) -> Child:
            return Child(Worker, store, place, max_bytes, number + 7919 * seed, name=f"stress-{number}")

        for crew in [_Crew(i, operations, kills, outcome, lock, make) for i in range(processes)]:
            crew.thread.join()
        if arena:
            outcome.evictions = arena.total_evictions
            arena.close()
            outcome.leaked = len(_held(arena.job)) + len(list(place.glob("*.arena.json")))
    outcome.leaked += len(set(os.listdir("/dev/shm")) - before)
    outcome.seconds = time.perf_counter() - started
    return outcome


def _held(job: bytes) -> list[str]:
    """Descriptors of any process that still hold memory of this job."""
    name = f"/memfd:headrace-tokens-{job.hex()}"
    found = []
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(link).startswith(name):
                found.append(str(link))
        except OSError:
            continue
    return found


def main(arguments: list[str]) -> int:
    given: dict[str, Any] = dict(a.split("=", 1) for a in arguments)
    store = given.pop("store", "arena")
    for name, text in given.items():
        given[name] = int(text)
    try:
        outcome = stress(store, **given)
    except NoRoom as e:
        print(e, file=sys.stderr)
        return 2
    print(json.dumps({"store": store, **asdict(outcome)}))
    return 1 if outcome.wrong or outcome.torn or outcome.leaked or outcome.errors else 0


if __name__ == "__main__":
    from benchmarks import cache_stress  # under its own name, by which other processes find `Worker`

    sys.exit(cache_stress.main(sys.argv[1:]))
