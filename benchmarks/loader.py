"""Claim: a memory-mapped file with a line index starts at once and reads at random, at any size, in next to no memory.

    python -m benchmarks.loader tokenizer=DIR     # 12k, 120k and 1.2M prompts of about 360 bytes; < 15 minutes
    python -m benchmarks.loader rows=12000        # under a minute: fewer contenders, and no middle size

Contenders: loader=mmap (validate=off, and validate=full apart), loader=standard, lists of what json and orjson parse,
Hugging Face datasets, verl's RLHFDataset without and with its length filter. Each in a fresh process, all on one file.

cold: no index and no cache folder of the library, the file not in the page cache. paged out: index or cache of an
earlier process there, nothing in the page cache. warm: index or cache there, and all in the page cache. Times start
when the imports are done; `first batch` is from before the open to 64 shuffled rows in hand. Memory is the growth of
RssAnon since the imports, after all reads; the page cache, which any process may take back, is no part of it.
"""

from __future__ import annotations

import dataclasses
import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import measure, prompts
from benchmarks.measure import Clock, Report, evict, per_second, read_through, rss_anon_mb

BATCH = 64
SIZES = {"12k": 100, "120k": 10, "1200k": 1}
"""Names of the sizes, and what part of the largest they are: one in so many."""
SMALL = 100_000
"""Rows of the largest file below which a run is a small one."""
CONTENDERS = ("index", "mmap", "standard", "lists", "datasets", "verl", "filter", "verl_filter")
KEYS = (
    "index_gb_per_s",
    "warm_open_ms_12k",
    "warm_open_ms_1200k",
    "random_rows_per_s_mmap",
    "random_rows_per_s_hf_datasets",
    "first_batch_ms_warm_mmap",
    "first_batch_ms_cold_mmap",
    "first_batch_ms_warm_hf_datasets",
    "first_batch_ms_cold_hf_datasets",
    "first_batch_ms_standard",
    "rss_anon_mb_mmap",
    "rss_anon_mb_standard",
    "length_filter_s_second_start",
    "length_filter_s_verl_12k",
)


@dataclasses.dataclass(slots=True, kw_only=True)
class LoaderSettings:
    rows: int = measure.option(1_200_000, "rows of the largest file; the others have a tenth and a hundredth")
    scale: float = measure.option(1.0, "a factor on rows")
    repeats: int = measure.option(0, "fresh processes a number; 0: 5, 3 for smaller files, 2 for what is slow")
    seconds: float = measure.option(1.0, "how long reading is timed, each way")
    only: tuple[str, ...] = measure.option((), f"some of {','.join(CONTENDERS)}; empty: all")
    tokens: int = measure.option(200, "prompts longer than this are filtered out")
    tokenizer: str = measure.option("", "folder of the tokenizer for the length filter; default: data/tokenizer, bytes")
    folder: str = measure.option("", "where the files go, and stay; default: a temporary folder")
    out: str = measure.option("", "write the last line to this file too; `results`: into benchmarks/results")


# -- contenders: each function runs in a process of its own --------------------------------------------------------


def shuffled(rows: int, seconds: float) -> list[list[int]]:
    """Batches of random positions, made before anything is timed; enough that few rows come twice."""
    rng = random.Random(7)
    count = min(max(rows // BATCH, 1), 6000) if seconds else 1
    return [[rng.randrange(rows) for _ in range(BATCH)] for _ in range(count)]


def in_order(rows: int) -> Iterator[list[int]]:
    """Batches of the file's own order, to the end of it."""
    return (list(range(i, min(i + BATCH, rows))) for i in range(0, rows, BATCH))


def listed(path: str, rows: int, seconds: float, library: str) -> dict[str, float]:
    """Every line parsed into a list at the start: what most frameworks do."""
    loads: Callable[[bytes], Any] = __import__(library).loads
    batches, before, clock = shuffled(rows, seconds), rss_anon_mb(), Clock()
    with open(path, "rb") as file:
        data = [loads(line) for line in file]
    opened = clock.ms()
    got = [data[i] for i in batches[0]]
    first = clock.ms()
    assert len(data) == rows
    assert all(row["prompt"] for row in got)

    def batch(at: list[int]) -> int:
        return len([data[i] for i in at])

    return _read(opened, first, before, batches, rows, seconds, random_rows_per_s=batch)


def hugging_face(path: str, rows: int, seconds: float, cache: str) -> dict[str, float]:
    """`load_dataset("json")`: an Arrow file in the cache folder, mapped."""
    import datasets

    datasets.disable_progress_bars()
    batches, before, clock = shuffled(rows, seconds), rss_anon_mb(), Clock()
    data: Any = datasets.load_dataset("json", data_files=path, split="train", cache_dir=cache)
    opened = clock.ms()
    got = data[batches[0]]
    first = clock.ms()
    assert len(data) == rows
    assert all(got["prompt"])

    def one_by_one(at: list[int]) -> int:
        return len([data[i] for i in at])

    def together(at: list[int]) -> int:
        return len(data[at]["prompt"])

    def a_slice(at: list[int]) -> int:
        return len(data[at[0] : at[-1] + 1]["prompt"])

    reads = _read(opened, first, before, batches, rows, seconds, random_rows_per_s=one_by_one)
    if seconds:
        reads["random_rows_per_s_together"] = per_second(together, batches, seconds)
        reads["sequential_rows_per_s"] = per_second(a_slice, in_order(rows), seconds)
        reads["rss_anon_mb"] = max(reads["rss_anon_mb"], rss_anon_mb() - before)
    return reads


def verl(path: str, rows: int, seconds: float, tokenizer: str, tokens: int, mapped: bool = False) -> dict[str, float]:
    """RLHFDataset as verl's trainer builds it, its cache in HF_DATASETS_CACHE. `tokens` 0: without the filter.
    `mapped`: with this project's class in its place."""
    import datasets
    from omegaconf import OmegaConf
    from transformers import AutoTokenizer
    from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn

    datasets.disable_progress_bars()
    dataset: Any = RLHFDataset
    if mapped:
        from stages.loader import verl_dataset

        dataset = verl_dataset.MappedRLHFDataset
    loaded: Any = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)
    config = {"filter_overlong_prompts": bool(tokens), "max_prompt_length": tokens or rows}
    if mapped:
        config["index_dir"] = os.environ["XDG_CACHE_HOME"]
    batches, before, clock = shuffled(rows, seconds), rss_anon_mb(), Clock()
    data = dataset([path], loaded, OmegaConf.create(config))
    opened = clock.ms()
    got = collate_fn([data[i % len(data)] for i in batches[0]])
    first = clock.ms()
    assert 0 < len(data) <= rows
    assert len(got["raw_prompt"]) == BATCH

    def batch(at: list[int]) -> int:
        return len(collate_fn([data[i % len(data)] for i in at])["raw_prompt"])

    return _read(opened, first, before, batches, rows, seconds, random_rows_per_s=batch) | {"rows_kept": len(data)}


def index_build(path: str, rows: int, index: str) -> dict[str, float]:
    """The line index of a file that is in the page cache, on one core: built, written and synced; `scan`: only found.

    Validation is no part of it.
    """
    from stages.loader.index import row_starts
    from stages.loader.rows import RowParser
    from stages.loader.text import TextFile

    size, parser = Path(path).stat().st_size, RowParser(_config("mmap", path, index), "loader")
    shutil.rmtree(index, ignore_errors=True)
    clock, used = Clock(), time.process_time()
    source = TextFile.with_index(Path(path), parser, index)
    seconds, cpu = clock.ms() / 1e3, time.process_time() - used
    assert len(source) == rows
    with open(path, "rb", buffering=0) as file:
        clock = Clock()
        found = sum(len(starts) for starts in row_starts(lambda buffer, at: os.preadv(file.fileno(), [buffer], at)))
        scanned = clock.ms() / 1e3
    assert found == rows + 1
    return {"gb_per_s": size / seconds / 1e9, "cpu_s": cpu, "scan_gb_per_s": size / scanned / 1e9}


def ours(backend: str, path: str, rows: int, seconds: float, index: str, validate: str) -> dict[str, float]:
    """A loader of this project as a run opens it, but without prefetching: what is timed is the work itself. Rows are
    read as the loader reads them, 64 at a time; `steps`: as a run gets them, in its order and made into a batch."""
    loader, ctx = _loader(backend, path, index, validate=validate)
    batches, before, clock = shuffled(rows, seconds), rss_anon_mb(), Clock()
    loader.open(ctx)
    opened = clock.ms()
    got = loader.run()
    first = clock.ms()
    assert len(got) == BATCH
    [source] = loader._data.sources
    assert len(source) == rows

    def batch(at: list[int]) -> int:
        return len(source.rows(at))

    def step(_: list[int]) -> int:
        ctx.meter.drain()
        return len(loader.run())

    found = _read(opened, first, before, batches, rows, seconds, random_rows_per_s=batch)
    if seconds:
        found["steps_rows_per_s"] = per_second(step, batches, seconds)
        found["rss_anon_mb"] = max(found["rss_anon_mb"], rss_anon_mb() - before)
    loader.close()
    return found


def filtered(path: str, rows: int, tokenizer: str, tokens: int, waits: bool) -> dict[str, float]:
    """loader.max_prompt_tokens: when the first batch is ready, and when every prompt has been counted.

    The index and the counts go to the user's cache folder, which is one of this benchmark's.
    """
    index = os.environ["XDG_CACHE_HOME"]
    loader, ctx = _loader("mmap", path, index, validate="off", max_prompt_tokens=tokens, tokenizer=tokenizer)
    before, clock = rss_anon_mb(), Clock()
    loader.open(ctx)
    opened = clock.ms()
    assert len(loader.run()) == BATCH
    found = {"open_ms": opened, "first_batch_ms": clock.ms()}
    counts = next(Path(index).rglob("*.hrlen-*"))
    while waits and not _all_counted(counts, rows):
        time.sleep(0.05)
    found |= {"counted_ms": clock.ms(), "rss_anon_mb": rss_anon_mb() - before}
    found["tokenizer_loaded"] = int("tokenizers" in sys.modules)
    loader.close()
    return found


def _all_counted(file: Path, rows: int) -> bool:
    """Whether each block of counts has its hash: eight bytes after the header, 0 where there is none yet."""
    from stages.loader.length_file import BLOCK

    with file.open("rb") as opened:
        opened.seek(64)
        hashes = opened.read(8 * -(-rows // BLOCK))
    return all(any(hashes[i : i + 8]) for i in range(0, len(hashes), 8))


def _loader(backend: str, path: str, index: str, tokenizer: str = "data/tokenizer", **settings: Any) -> tuple[Any, Any]:
    """A loader of this project and the context to open it in; everything is imported that it needs."""
    from pipeline.context import Context
    from stages.model.hf import HfModel, HfModelConfig

    config = _config(backend, path, index, **settings)
    loader = _entry(backend).cls(config, HfModel(HfModelConfig(path=tokenizer)))
    return loader, Context(node="loader", run_seed=0, run_dir=Path(index), threads=len(os.sched_getaffinity(0)))


def _config(backend: str, path: str, index: str, **settings: Any) -> Any:
    config = _entry(backend).config(path=path, batch_size=BATCH, prefetch=0, index_dir=index, **settings)
    config.fields.ground_truth = "reward_model.ground_truth"
    return config


def _entry(backend: str) -> Any:
    from pipeline import registry

    registry.discover("stages.loader")
    [entry] = [e for e in registry.entries("loader") if e.name == backend]
    return entry


def _read(
    opened: float,
    first: float,
    before: float,
    batches: list[list[int]],
    rows: int,
    seconds: float,
    *,
    random_rows_per_s: Callable[[list[int]], int],
) -> dict[str, float]:
    """The numbers that all contenders have. `seconds` 0: only those of the start."""
    found = {"open_ms": opened, "first_batch_ms": first, "rss_anon_mb": rss_anon_mb() - before}
    if seconds:
        found["random_rows_per_s"] = per_second(random_rows_per_s, batches, seconds)
        found["sequential_rows_per_s"] = per_second(random_rows_per_s, in_order(rows), seconds)
        found["rss_anon_mb"] = max(found["rss_anon_mb"], rss_anon_mb() - before)
    return found


# -- the benchmark -------------------------------------------------------------------------------------------------


class Bench:
    """All contenders at one size, on one file; `slow` and `quick` repeats."""

    def __init__(self, report: Report, asked: LoaderSettings, folder: Path, size: str):
        self.report, self.asked, self.size = report, asked, size
        self.small = scaled_rows(asked) < SMALL
        self.rows = scaled_rows(asked) // SIZES[size]
        self.folder, self.file = folder / size, folder / size / "prompts.jsonl"
        self.largest = SIZES[size] == 1
        self.quick = asked.repeats or (1 if self.small else 5 if self.largest else 3)
        self.slow = min(self.quick, 2)
        self.tokenizer = prompts.tokenizer(asked.tokenizer, folder)
        self.lines: list[list[Any]] = []

    def wanted(self, contender: str) -> bool:
        return not self.asked.only or contender in self.asked.only

    def make_file(self) -> None:
        self.folder.mkdir(exist_ok=True)
        prompts.write(self.file, self.rows)
        self.report.facts |= {f"rows_{self.size}": self.rows, f"file_mb_{self.size}": self.file.stat().st_size / 1e6}

    def state(self, name: str, cache: Path) -> Callable[[], dict[str, float]]:
        """Sets the state up before each repeat; says how much of the file was in the page cache then."""

        def set_up() -> dict[str, float]:
            if name == "cold":
                shutil.rmtree(cache, ignore_errors=True)
            cache.mkdir(exist_ok=True)
            files = [self.file, *(f for f in cache.rglob("*") if f.is_file() and f.stat().st_size)]
            return {"page_cache": read_through(*files) if name == "warm" else evict(*files)}

        return set_up

    def measure(
        self,
        name: str,
        states: Sequence[str],
        repeats: int,
        function: Callable[..., Any],
        cache: str = "",
        **given: Any,
    ) -> None:
        """A contender in several states; the numbers go to the table, and to the last line by name, state and size."""
        folder = self.folder / f"cache-{name}"
        for state in states:
            seconds = self.asked.seconds if state == "warm" else 0.0
            arguments = {"path": str(self.file), "rows": self.rows, "seconds": seconds, **given}
            if cache:
                arguments[cache] = str(folder)
            env = {"HF_DATASETS_CACHE": str(folder)}
            found = self.report.run(
                f"{name}, {state}, {self.size}",
                function,
                repeats,
                before=self.state(state, folder),
                env=env,
                **arguments,
            )
            self.report.keep(found, **{f"{n}_{state}_{name}_{self.size}": n for n in ("open_ms", "first_batch_ms")})
            if state == "warm":
                self.report.keep(found, **{f"{n}_{name}_{self.size}": n for n in found if n.endswith("_per_s")})
                self.report.keep(found, **{f"rss_anon_mb_{name}_{self.size}": "rss_anon_mb"})
            rates = ("random_rows_per_s", "random_rows_per_s_together", "sequential_rows_per_s", "steps_rows_per_s")
            columns = ("page_cache", "open_ms", "first_batch_ms", *rates, "rss_anon_mb")
            self.lines.append([name, state, *(found.get(c) for c in columns)])

    def run(self) -> None:
        """Everything but the length filters."""
        self.make_file()
        twice = ("cold", "warm")
        every = ("cold", "paged out", "warm") if self.largest and not self.small else twice
        if self.wanted("index"):
            self.index()
        if self.wanted("mmap"):
            self.measure("mmap", every, self.quick, ours, "index", backend="mmap", validate="off")
            self.measure("mmap_validated", twice, self.slow, ours, "index", backend="mmap", validate="full")
        if self.wanted("standard"):
            self.measure("standard", twice, self.slow, ours, "index", backend="standard", validate="full")
        if self.wanted("lists"):
            self.measure("json_list", twice, self.slow, listed, library="json")
            self.measure("orjson_list", twice, self.slow, listed, library="orjson")
        if self.wanted("datasets"):
            self.measure("hf_datasets", every, self.quick, hugging_face, "cache")
        if self.wanted("verl") and self.largest and not self.small:
            self.measure("verl", twice, 1, verl, tokenizer=self.tokenizer, tokens=0)
        heads = ("contender", "state", "in page cache", "open, ms", "first batch of 64, ms")
        more = ("random rows/s", "64 in one call", "in order", "as batches of a run", "memory (RssAnon), MB")
        self.report.table(f"{self.rows:,} rows, {self.file.stat().st_size / 1e6:,.0f} MB", heads + more, self.lines)

    def index(self) -> None:
        given = {"path": str(self.file), "rows": self.rows, "index": str(self.folder / "cache-index")}
        found = self.report.run(f"index, {self.size}", index_build, self.quick, before=self.warm_file, **given)
        names = {"index_gb_per_s": "gb_per_s", "index_cpu_s": "cpu_s", "scan_gb_per_s": "scan_gb_per_s"}
        self.report.keep(found, **{f"{name}_{self.size}": of for name, of in names.items()})

    def length_filters(self) -> Iterator[list[Any]]:
        """First and second starts of ours, and at the smallest size of verl's; rows of a table."""
        contenders: list[tuple[str, Callable[..., Any], dict[str, Any]]] = []
        if self.wanted("filter") and (self.largest or not self.small):
            contenders.append(("mmap", filtered, {"waits": True}))
        if self.wanted("verl_filter") and self.size == "12k":
            contenders.append(("verl", verl, {"seconds": 0.0}))
            if not self.small:
                contenders.append(("verl_mapped", verl, {"seconds": 0.0, "mapped": True}))
        for name, function, more in contenders:
            cache = self.folder / f"cache-lengths-{name}"
            starts = [("first", "cold", 1), ("second", "warm", 1 if function is verl else self.slow)]
            for start, state, repeats in starts[: 1 if function is verl and self.small else 2]:
                found = self.report.run(
                    f"{name} with a length filter, {start} start, {self.size}",
                    function,
                    repeats,
                    before=self.state(state, cache),
                    env={"HF_DATASETS_CACHE": str(cache), "XDG_CACHE_HOME": str(cache)},
                    path=str(self.file),
                    rows=self.rows,
                    tokenizer=self.tokenizer,
                    tokens=self.asked.tokens,
                    **more,
                )
                found |= {n.replace("_ms", "_s"): s.scaled(1e-3) for n, s in found.items() if n.endswith("_ms")}
                key = f"length_filter_s{'' if start == 'first' else '_second_start'}_{name}_{self.size}"
                self.report.keep(found, **{key: "first_batch_s", key.replace("_s_", "_all_s_"): "counted_s"})
                ready, counted = found.get("first_batch_s"), found.get("counted_s", found.get("first_batch_s"))
                yield [f"{self.rows:,}", name, start, ready, counted, found.get("rss_anon_mb")]

    def warm_file(self) -> dict[str, float]:
        return {"page_cache": read_through(self.file)}


def scaled_rows(asked: LoaderSettings) -> int:
    """Rows of the largest file; the smallest has at least one batch."""
    return max(round(asked.rows * asked.scale), 100 * BATCH)


def bars(report: Report) -> None:
    """What was promised; `standard` stands for the best of the three that parse everything at the start."""
    parsed = ("standard", "json_list", "orjson_list")

    def least(name: str) -> float | None:
        return min((v for p in parsed if (v := report.get(name.format(p))) is not None), default=None)

    def ratio(over: float | None, under: float | None) -> float | None:
        return over / under if over is not None and under else None

    warm, cold = report.get("first_batch_ms_warm_mmap"), report.get("first_batch_ms_cold_mmap")
    bar = report.bar
    bar("index, GB/s on one core", report.get("index_gb_per_s"), least=1)
    bar("warm open of the largest, ms", report.get("warm_open_ms_1200k"), most=5)
    bar("the same over that of the smallest", report.ratio("warm_open_ms_1200k", "warm_open_ms_12k"), most=3)
    bar("first batch, warm: datasets over mmap", ratio(report.get("first_batch_ms_warm_hf_datasets"), warm), least=10)
    bar("first batch, warm: standard over mmap", ratio(least("first_batch_ms_warm_{}_1200k"), warm), least=1000)
    bar("first batch, cold: datasets over mmap", ratio(report.get("first_batch_ms_cold_hf_datasets"), cold), least=5)
    bar("first batch, cold: standard over mmap", ratio(least("first_batch_ms_cold_{}_1200k"), cold), least=10)
    bar(
        "random rows/s over those of datasets",
        report.ratio("random_rows_per_s_mmap", "random_rows_per_s_hf_datasets"),
        least=8,
    )
    bar("memory over that of standard", ratio(report.get("rss_anon_mb_mmap"), least("rss_anon_mb_{}_1200k")), most=0.03)
    bar("length filter, second start, s", report.get("length_filter_s_second_start"), most=1)


LARGEST = {
    "index_gb_per_s": "index_gb_per_s",
    "random_rows_per_s_mmap": "random_rows_per_s_mmap",
    "random_rows_per_s_hf_datasets": "random_rows_per_s_hf_datasets",
    "first_batch_ms_warm_mmap": "first_batch_ms_warm_mmap",
    "first_batch_ms_cold_mmap": "first_batch_ms_cold_mmap",
    "first_batch_ms_warm_hf_datasets": "first_batch_ms_warm_hf_datasets",
    "first_batch_ms_cold_hf_datasets": "first_batch_ms_cold_hf_datasets",
    "first_batch_ms_standard": "first_batch_ms_warm_standard",
    "rss_anon_mb_mmap": "rss_anon_mb_mmap",
    "rss_anon_mb_standard": "rss_anon_mb_standard",
    "length_filter_s_second_start": "length_filter_s_second_start_mmap",
}
"""Names in the last line without a size, and whose numbers of the largest size they are."""


def main() -> int:
    asked = measure.settings(LoaderSettings, __doc__ or "")
    measure.check_words("only", asked.only, CONTENDERS)
    with measure.work_folder(asked.folder) as folder:
        report = Report("loader", asked, folder)
        small = scaled_rows(asked) < SMALL
        filters: list[list[Any]] = []
        for bench in [Bench(report, asked, folder, size) for size in SIZES if not (small and size == "120k")]:
            bench.run()
            filters += bench.length_filters()
        heads = ("rows", "contender", "start", "first batch, s", "all counted, s", "memory (RssAnon), MB")
        report.table(f"Length filter ({asked.tokens} tokens)", heads, filters)
        report.keep(report.numbers, **{name: f"{of}_1200k" for name, of in LARGEST.items()})
        for size in ("12k", "1200k"):
            report.keep(report.numbers, **{f"warm_open_ms_{size}": f"open_ms_warm_mmap_{size}"})
        report.keep(report.numbers, length_filter_s_verl_12k="length_filter_s_verl_12k")
        bars(report)
        return report.finish(KEYS, asked.out)


if __name__ == "__main__":
    sys.exit(main())
