"""Claim: looking up the ids of a prompt costs microseconds, wherever they are kept; tokenising it again costs hundreds.

    python -m benchmarks.token_cache tokenizer=DIR prompts=FILE    # the full size; < 15 minutes, 8 GB of memory
    python -m benchmarks.token_cache scale=0.001                   # under a minute: the longer prompts alone

`tokenizer` is a folder with a tokenizer.json, `prompts` GSM8K's train.jsonl. Prompts are of 60 and of 256 tokens. A hit
is what a batch pays for a row: the key (xxh3 of the prompt's JSON) and the look-up, up to an int32 array that cannot be
changed from elsewhere. `one`: one prompt a call, of which p50 and p99; `batch`: 64 prompts a call, for each. Each
contender is a fresh process, also those that read what another process put there. Entry numbers are those of the full
size; `scale` is a factor on them, down to 512.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from benchmarks import measure, prompts
from benchmarks.measure import Report, Spread, evict, read_through

BATCH = 64
LENGTHS = (60, 256)
POOL = 4096
"""Prompts that are tokenised for real; entries beyond them are these with a number of their own."""
CONTENDERS = ("tokenizer", "memory", "shared", "disk", "lmdb", "diskcache", "stress")
FINGERPRINT = bytes(range(16))
KEYS = (
    "hit_us_memory_2k",
    "hit_us_memory_2m",
    "put_us_memory_2m",
    "hit_us_shared_p50",
    "hit_us_shared_p99",
    "hit_us_disk_p50",
    "retokenize_us_256",
    "retokenize_batched_us_256",
    "diskcache_us",
    "lmdb_us",
    "wrong_values",
    "torn_values",
    "leaked_segments",
)


@dataclasses.dataclass(slots=True, kw_only=True)
class TokenCacheSettings:
    scale: float = measure.option(1.0, "a factor on every number of entries and operations")
    repeats: int = measure.option(0, "fresh processes a number; 0: 3, or 1 where scale is below 0.1")
    only: tuple[str, ...] = measure.option((), f"some of {','.join(CONTENDERS)}; empty: all")
    samples: int = measure.option(20_000, "look-ups a number")
    tokenizer: str = measure.option("", "folder with a tokenizer.json; default: data/tokenizer")
    prompts: str = measure.option("", "GSM8K's train.jsonl; default: beside the checkout if it is there, else made up")
    folder: str = measure.option("", "where the files go, and stay; default: a temporary folder")
    out: str = measure.option("", "write the last line to this file too; `results`: into benchmarks/results")


# -- entries -----------------------------------------------------------------------------------------------------


class Entries:
    """Entry i of any number of them: the JSON of a chat, and ids whose first is i, so that a wrong one shows."""

    def __init__(self, folder: str, tokens: int):
        texts = json.loads(Path(folder, f"texts-{tokens}.json").read_text())
        self._json = [orjson.dumps([{"role": "user", "content": f"{t} (000000000)"}]) for t in texts]
        self._ids = np.load(Path(folder, f"ids-{tokens}.npy"))

    def prompt(self, i: int) -> bytes:
        return self._json[i % len(self._json)].replace(b"(000000000)", b"(%09d)" % i)

    def ids(self, i: int) -> np.ndarray:
        ids = self._ids[i % len(self._ids)].copy()
        ids[0] = i
        ids.flags.writeable = False
        return ids

    def items(self, places: Iterable[int], key: Callable[[bytes, bytes], bytes]) -> Iterator[tuple[bytes, np.ndarray]]:
        for i in places:
            yield key(FINGERPRINT, self.prompt(i)), self.ids(i)


def make_entries(folder: str, tokenizer: str, file: str) -> dict[str, float]:
    """Texts of each length and their ids."""
    from tokenizers import Tokenizer

    rust = Tokenizer.from_file(str(Path(tokenizer, "tokenizer.json")))
    pool = prompts.questions(Path(file)) if file else list(prompts.texts(POOL))
    found: dict[str, float] = {"vocabulary": rust.get_vocab_size()}
    for tokens in LENGTHS:
        texts = prompts.of_length(rust, pool, tokens, POOL)
        ids = [e.ids[:tokens] for e in rust.encode_batch(texts, add_special_tokens=False)]
        short = min(map(len, ids))  # a text that is cut at a token may have one less
        np.save(Path(folder, f"ids-{tokens}.npy"), np.array([row[:short] for row in ids], np.int32))
        Path(folder, f"texts-{tokens}.json").write_text(json.dumps(texts))
        found[f"tokens_{tokens}"] = short
    return found


# -- timing ------------------------------------------------------------------------------------------------------


def us_each(once: Callable[[Any], Any], given: Sequence[Any]) -> dict[str, float]:
    """Microseconds a call of `once(x)`, each x once. `us`: of the first half, the median over blocks of up to 64 calls,
    without what the clock takes; `p50`, `p99`: of the second half, single calls, with it (some 0.1 us)."""
    clock, half = time.perf_counter_ns, max(len(given) // 2, 1)
    blocks: list[float] = []
    for block in in_groups(given[:half], BATCH):
        started = clock()
        for x in block:
            once(x)
        blocks.append((clock() - started) / len(block))
    times: list[float] = []
    for x in given[half:] or given:
        started = clock()
        once(x)
        times.append(clock() - started)
    p50, p99 = np.quantile(times, [0.5, 0.99]) / 1e3
    return {"us": float(np.median(blocks)) / 1e3, "p50": float(p50), "p99": float(p99)}


def look_up(entries: Entries, get: Callable[[Sequence[bytes]], Sequence[Any]], count: int, samples: int) -> dict:
    """Hits and misses of a store that holds entries 0 to count - 1, one by one and in batches; checks what comes."""
    from stages.tokenizer_cache.keys import key

    rng = random.Random(11)
    places = [rng.randrange(count) for _ in range(samples)]
    known = [entries.prompt(i) for i in places]
    strange = [entries.prompt(i + count) for i in places]

    def one(prompt: bytes) -> Any:
        return get([key(FINGERPRINT, prompt)])[0]

    def batch(some: Sequence[bytes]) -> Any:
        return get([key(FINGERPRINT, prompt) for prompt in some])

    hits = us_each(one, known)
    batches = us_each(batch, [known[i : i + BATCH] for i in range(0, samples - BATCH + 1, BATCH)])
    misses = us_each(one, strange)
    for i, ids in zip(places, batch(known), strict=True):
        if ids is None or not np.array_equal(ids, entries.ids(i)):
            raise AssertionError(f"entry {i} of {count} was {'not found' if ids is None else 'wrong'}")
    if any(ids is not None for ids in batch(strange[:1000])):
        raise AssertionError("a prompt that was never put was found")
    return {**hits, "batch_us": batches["p50"] / BATCH, "miss_us": misses["us"]}


def in_groups(items: Iterable[Any], size: int = 1024) -> Iterator[list[Any]]:
    group: list[Any] = []
    for item in items:
        group.append(item)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group


# -- contenders: each function runs in a process of its own --------------------------------------------------------


def in_process(folder: str, tokens: int, entries: int, samples: int) -> dict[str, float]:
    """The layer of `tokenizer_cache=memory`; it is full, so that each put drives the oldest entry out."""
    from stages.tokenizer_cache.keys import key
    from stages.tokenizer_cache.lru import LeastRecentlyUsed

    made = Entries(folder, tokens)
    one_entry = LeastRecentlyUsed(2**30)
    one_entry.put(list(made.items([0], key)))
    store = LeastRecentlyUsed(one_entry.bytes * entries)
    for group in in_groups(made.items(range(entries), key)):
        store.put(group)
    found = look_up(made, store.get, entries, samples)
    fresh = [[item] for item in made.items(range(2 * entries, 2 * entries + samples), key)]
    before = store.evictions
    puts = us_each(store.put, fresh)
    if store.evictions - before != samples:
        raise AssertionError(f"{samples} puts into a full store drove {store.evictions - before} entries out")
    return {**found, "put_us": puts["us"], "rss_anon_mb": measure.rss_anon_mb()}


def arena_owner(folder: str, tokens: int, entries: int, room: int) -> Iterator[dict[str, float]]:
    """An arena with `entries` entries and room for more, published in `folder`, as `tokenizer_cache=shared` does it."""
    from stages.arena import Arena
    from stages.tokenizer_cache.keys import key

    made = Entries(folder, tokens)
    size = (entries + room) * (4 * tokens + 64) * 5 // 4 + 2**20
    arena = Arena.create(size)
    started = time.perf_counter()
    for group in in_groups(made.items(range(entries), key)):
        arena.put_many(group)
    seconds = time.perf_counter() - started
    arena.publish(Path(folder))
    yield {"fill_us": seconds / entries * 1e6, "arena_mb": size / 1e6}
    while True:
        time.sleep(60)


def arena_writer(folder: str, tokens: int, entries: int, room: int) -> Iterator[dict[str, float]]:
    """Puts batches of new entries, up to about 30,000 a second, until the room is used up; then it puts them again."""
    from stages.arena import Arena
    from stages.tokenizer_cache.keys import key

    made, arena = Entries(folder, tokens), Arena.of_run(Path(folder), write=True)
    assert arena is not None, "no arena is published"
    first, room = 4 * max(entries, 1), room * 3 // 4
    for done in range(0, 2**62, BATCH):
        arena.put_many(list(made.items((first + (done + i) % room for i in range(BATCH)), key)))
        if not done:
            yield {}
        time.sleep(1e-3)


def other_process(folder: str, tokens: int, entries: int, samples: int) -> dict[str, float]:
    """Reads what another process put into the arena, as a reward or a rollout in a process of its own does."""
    from stages.arena import Arena

    arena = Arena.of_run(Path(folder))
    assert arena is not None, "no arena is published"
    return look_up(Entries(folder, tokens), arena.get_many, entries, samples)


def disk_fill(folder: str, tokens: int, entries: int, store: str) -> dict[str, float]:
    """Entries into an LMDB by `tokenizer_cache=disk`'s layer, by lmdb alone, or into a diskcache."""
    from stages.tokenizer_cache.keys import key

    made, started = Entries(folder, tokens), time.perf_counter()
    with STORES[store](folder, tokens, entries, True) as (_, put):
        for group in in_groups(made.items(range(entries), key)):
            put(group)
    return {"fill_us": (time.perf_counter() - started) / entries * 1e6}


def disk_read(folder: str, tokens: int, entries: int, store: str, samples: int) -> dict[str, float]:
    """Hits after a restart."""
    started = time.perf_counter()
    with STORES[store](folder, tokens, entries, False) as (get, _):
        opened = time.perf_counter() - started
        return {"open_ms": opened * 1e3, **look_up(Entries(folder, tokens), get, entries, samples)}


Store = tuple[Callable[[Sequence[bytes]], Sequence[Any]], Callable[[Sequence[tuple[bytes, np.ndarray]]], None]]


@contextlib.contextmanager
def our_disk(folder: str, tokens: int, entries: int, fill: bool) -> Iterator[Store]:
    from stages.tokenizer_cache.lmdb_store import LmdbStore

    store = LmdbStore(Path(folder, "ours"), _map_size(tokens, entries))
    yield store.get, store.put
    store.close()


@contextlib.contextmanager
def raw_lmdb(folder: str, tokens: int, entries: int, fill: bool) -> Iterator[Store]:
    """The ids' bytes under the key, one transaction a call, nothing checked: the least that LMDB can take."""
    import lmdb

    env = lmdb.open(str(Path(folder, "lmdb")), map_size=_map_size(tokens, entries), readonly=not fill)

    def get(keys: Sequence[bytes]) -> list[np.ndarray | None]:
        with env.begin() as txn:
            return [None if (v := txn.get(k)) is None else np.frombuffer(v, np.int32) for k in keys]

    def put(items: Sequence[tuple[bytes, np.ndarray]]) -> None:
        with env.begin(write=True) as txn:
            for k, ids in items:
                txn.put(k, ids.tobytes())

    yield get, put
    env.close()


@contextlib.contextmanager
def disk_cache(folder: str, tokens: int, entries: int, fill: bool) -> Iterator[Store]:
    """diskcache (SQLite) with its default settings but for the size limit."""
    import diskcache

    cache: Any = diskcache.Cache(str(Path(folder, "diskcache")), size_limit=_map_size(tokens, entries))

    def get(keys: Sequence[bytes]) -> list[np.ndarray | None]:
        return [None if (v := cache.get(k)) is None else np.frombuffer(v, np.int32) for k in keys]

    def put(items: Sequence[tuple[bytes, np.ndarray]]) -> None:
        with cache.transact():
            for k, ids in items:
                cache.set(k, ids.tobytes())

    yield get, put
    cache.close()


STORES: Mapping[str, Callable[..., contextlib.AbstractContextManager[Store]]] = {
    "disk": our_disk,
    "lmdb": raw_lmdb,
    "diskcache": disk_cache,
}
DATA_FILES = {"disk": "ours/data.mdb", "lmdb": "lmdb/data.mdb", "diskcache": "diskcache/cache.db"}


def _map_size(tokens: int, entries: int) -> int:
    """Bytes; a store that keeps within a limit does not come near it."""
    return entries * (4 * tokens + 512) * 3 + 64 * 2**20


def retokenize(folder: str, tokenizer: str, samples: int) -> dict[str, float]:
    """What a hit saves, for each length: the Rust tokenizer alone, one prompt a call and 64 a call; and with the chat
    template, as verl and others call it for each row."""
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    rust = Tokenizer.from_file(str(Path(tokenizer, "tokenizer.json")))
    full: Any = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)

    def chat(text: str) -> Any:
        return full.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True, tokenize=True)

    found: dict[str, float] = {}
    for tokens in LENGTHS:
        texts = json.loads(Path(folder, f"texts-{tokens}.json").read_text())[:samples]
        groups = [texts[i : i + BATCH] for i in range(0, len(texts), BATCH)]
        found[f"one_{tokens}"] = us_each(lambda text: rust.encode(text).ids, texts)["p50"]
        batches = us_each(lambda some: [e.ids for e in rust.encode_batch(some)], groups)
        found[f"batched_{tokens}"] = batches["p50"] / BATCH
        if full.chat_template:
            found[f"chat_{tokens}"] = us_each(chat, texts)["p50"]
    return found


def under_fire(operations: int, kills: int) -> dict[str, float]:
    """Four processes that get and put at the same time, each killed (SIGKILL) at random and replaced."""
    from benchmarks.cache_stress import stress

    found = stress("arena", operations=operations, processes=4, kills=kills)
    if found.errors:
        raise RuntimeError("; ".join(found.errors))
    return {
        "wrong_values": found.wrong,
        "torn_values": found.torn,
        "leaked_segments": found.leaked,
        "stress_operations": found.operations,
        "stress_kills": found.kills,
        "stress_evictions": found.evictions,
    }


# -- the benchmark -------------------------------------------------------------------------------------------------

ENTRIES = {"4k": 4_000, "1m": 1_000_000}
IN_PROCESS = {"2k": 2_000, **ENTRIES, "2m": 2_000_000}
ROOM = 200_000
"""Entries that a writer may add to an arena before the first of it are overwritten."""


class Bench:
    def __init__(self, report: Report, asked: TokenCacheSettings, folder: Path):
        self.report, self.asked, self.folder = report, asked, folder
        self.tokenizer = prompts.tokenizer(asked.tokenizer, folder)
        small = asked.scale < 0.1
        self.repeats = asked.repeats or (1 if small else 3)
        self.lengths = LENGTHS[-1:] if small else LENGTHS
        self.lines: list[list[Any]] = []

    def run(self) -> None:
        file = self.asked.prompts or str(
            next(iter(sorted(measure.ROOT.parent.glob("shared/data/gsm8k/train.jsonl"))), "")
        )
        made = self.report.run("prompts", make_entries, 1, folder=str(self.folder), tokenizer=self.tokenizer, file=file)
        self.report.facts |= {name: int(spread.median) for name, spread in made.items()}
        if not made:
            return  # nothing can be measured without
        if self.wanted("tokenizer"):
            self.tokenizing()
        for tokens in self.lengths if self.wanted("memory") else ():
            for name, entries in (IN_PROCESS if tokens == LENGTHS[-1] else ENTRIES).items():
                found = self.contender("memory", tokens, name, in_process, self.repeats, entries=self.scaled(entries))
                self.report.keep(found, **{f"put_us_memory_{tokens}_{name}": "put_us"})
        for tokens in self.lengths if self.wanted("shared") else ():
            for name, entries in ENTRIES.items():
                self.shared(tokens, name, self.scaled(entries))
        for tokens in self.lengths:
            for name, entries in ENTRIES.items():
                for store in ("disk", "lmdb"):
                    if self.wanted(store):
                        self.on_disk(store, tokens, name, self.scaled(entries))
            if self.wanted("diskcache"):
                self.on_disk("diskcache", tokens, "4k", self.scaled(ENTRIES["4k"]))
        if self.wanted("stress"):
            self.stress()

    def wanted(self, contender: str) -> bool:
        return not self.asked.only or contender in self.asked.only

    def stress(self) -> None:
        operations = max(round(1_000_000 * self.asked.scale), 4096)
        kills = 20 if operations > 10_000 else 2
        found = self.report.run("stress", under_fire, 1, operations=operations, kills=kills)
        self.report.keep(found, **dict(zip(found, found, strict=True)))

    def scaled(self, entries: int) -> int:
        return max(min(entries, 512), round(entries * self.asked.scale))

    def contender(
        self, name: str, tokens: int, size: str, function: Callable[..., Any], repeats: int, **given: Any
    ) -> dict[str, Spread]:
        """Reads of a store: a line of the table, and numbers by name, tokens and size."""
        arguments = {"folder": str(self.folder), "tokens": tokens, "samples": self.asked.samples, **given}
        found = self.report.run(f"{name}, {tokens} tokens, {size} entries", function, repeats, **arguments)
        key = name.replace(", ", "_").replace(" ", "_")
        names = {"us": "one", "p50": "p50", "p99": "p99", "batch_us": "batch", "miss_us": "miss"}
        self.report.keep(found, **{f"hit_us_{key}_{n}_{tokens}_{size}": of for of, n in names.items()})
        columns = ("us", "p50", "p99", "batch_us", "miss_us", "put_us", "fill_us")
        self.lines.append([name, tokens, size, *(found.get(c) for c in columns)])
        return found

    def tokenizing(self) -> None:
        samples = min(self.asked.samples, 2048)
        given = {"folder": str(self.folder), "tokenizer": self.tokenizer, "samples": samples}
        found = self.report.run("tokenizer", retokenize, self.repeats, **given)
        for tokens in LENGTHS:
            names = {"one": "retokenize_us", "batched": "retokenize_batched_us", "chat": "retokenize_chat_us"}
            self.report.keep(found, **{f"{name}_{tokens}": f"{of}_{tokens}" for of, name in names.items()})
            one, batched, chat = (found.get(f"{of}_{tokens}") for of in names)
            self.lines.append(["tokenise again", tokens, None, one, None, None, batched, None, None, None])
            self.lines.append(["the same with the chat template", tokens, None, chat, *[None] * 6])

    def shared(self, tokens: int, size: str, entries: int) -> None:
        """Readers in other processes than the arena's; then again while a third process writes."""
        given = {"folder": str(self.folder), "tokens": tokens, "entries": entries, "room": ROOM}
        try:
            with measure.beside(arena_owner, **given) as filled:
                self.report.numbers[f"put_us_shared_{tokens}_{size}"] = Spread.of([filled["fill_us"]])
                self.contender("shared", tokens, size, other_process, self.repeats, entries=entries)
                with measure.beside(arena_writer, **given):
                    self.contender("shared, while written", tokens, size, other_process, self.repeats, entries=entries)
        except measure.Failure as e:
            self.report.fail(f"arena, {tokens} tokens, {size} entries", e)

    def on_disk(self, store: str, tokens: int, size: str, entries: int) -> None:
        """Filled by one process; read by others after it has ended, once from the page cache and once from the disk."""
        folder = self.folder / f"{store}-{tokens}-{size}"
        folder.mkdir()
        for name in (f"texts-{tokens}.json", f"ids-{tokens}.npy"):
            (folder / name).symlink_to(self.folder / name)
        arguments = {"folder": str(folder), "tokens": tokens, "entries": entries, "store": store}
        filled = self.report.run(f"{store}, filled, {tokens} tokens, {size} entries", disk_fill, 1, **arguments)
        self.report.keep(filled, **{f"put_us_{store}_{tokens}_{size}": "fill_us"})
        if filled:
            given = {"folder": str(folder), "entries": entries, "store": store}
            read_through(folder / DATA_FILES[store])
            self.contender(store, tokens, size, disk_read, self.repeats, **given)
            if self.asked.scale >= 0.1:
                evict(folder / DATA_FILES[store])
                self.contender(f"{store}, paged out", tokens, size, disk_read, 1, **given)
        shutil.rmtree(folder)


HEADLINES = {
    "hit_us_memory_2k": "hit_us_memory_one_256_2k",
    "hit_us_memory_2m": "hit_us_memory_one_256_2m",
    "put_us_memory_2m": "put_us_memory_256_2m",
    "hit_us_shared_p50": "hit_us_shared_p50_256_1m",
    "hit_us_shared_p99": "hit_us_shared_p99_256_1m",
    "hit_us_disk_p50": "hit_us_disk_p50_256_1m",
    "diskcache_us": "hit_us_diskcache_p50_256_4k",
    "lmdb_us": "hit_us_lmdb_p50_256_1m",
}
"""Names in the last line that stand for one of the cases: 256 tokens, and the hardest number of entries."""


def bars(report: Report) -> None:
    get, bar = report.get, report.bar
    bar("hit in process, 2k entries, us", get("hit_us_memory_2k"), most=2)
    bar("hit in process, 2M entries, us", get("hit_us_memory_2m"), most=6)
    bar("put with eviction, 2M entries, us", get("put_us_memory_2m"), most=5)
    bar("hit from another process, p50, us", get("hit_us_shared_p50"), most=10)
    bar("hit from another process, p99, us", get("hit_us_shared_p99"), most=30)
    bar("the same while another writes, p99, us", get("hit_us_shared_while_written_p99_256_1m"), most=30)
    bar("tokenising 256 again, over that hit", report.ratio("retokenize_us_256", "hit_us_shared_p50"), least=60)
    bar("tokenising 60 again, over that hit", report.ratio("retokenize_us_60", "hit_us_shared_p50_60_1m"), least=30)
    bar("hit from disk after a restart, p50, us", get("hit_us_disk_p50"), most=10)
    bar("diskcache over disk, 4k entries", report.ratio("diskcache_us", "hit_us_disk_p50_256_4k"), least=4)
    bar("wrong values under kill -9", get("wrong_values"), most=0)
    bar("torn values under kill -9", get("torn_values"), most=0)
    bar("leaked segments", get("leaked_segments"), most=0)


def main() -> int:
    asked = measure.settings(TokenCacheSettings, __doc__ or "")
    measure.check_words("only", asked.only, CONTENDERS)
    with measure.work_folder(asked.folder) as folder:
        report = Report("token_cache", asked, folder)
        bench = Bench(report, asked, folder)
        bench.run()
        heads = (
            "where",
            "tokens",
            "entries",
            "one: us",
            "p50",
            "p99",
            "batch: us a row",
            "miss, us",
            "put, us",
            "fill, us",
        )
        report.table("Ids of one prompt", heads, bench.lines)
        report.keep(report.numbers, **HEADLINES)
        bars(report)
        return report.finish(KEYS, asked.out)


if __name__ == "__main__":
    sys.exit(main())
