"""Puts the results of the full runs into docs/data.md, between the marks `<!-- loader -->` and `<!-- /loader -->`.

    python -m benchmarks.tables              # from benchmarks/results/<benchmark>-cpu.json
    python -m benchmarks.tables device=h200

So a number in the document is one that was measured, and not one that was copied by hand.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import measure
from benchmarks.measure import ROOT, number

DOCUMENT = ROOT / "docs/data.md"
Results = Mapping[str, Any]


@dataclasses.dataclass(slots=True, kw_only=True)
class TableSettings:
    device: str = measure.option("cpu", "whose results: the end of the files' names")


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def shown(results: Results, key: str, unit: str = "") -> str:
    """The median, with the lowest and the highest of the repeats if there were some; a dash if it was not measured."""
    value = results.get(key)
    if value is None:
        return "-"
    low, high = results.get(f"{key}_low"), results.get(f"{key}_high")
    spread = "" if low is None or high is None else f" ({number(low)}-{number(high)})"
    return f"{number(value)}{unit}{spread}"


def ratio(results: Results, over: str, under: str) -> str:
    a, b = results.get(over), results.get(under)
    return "-" if a is None or not b else f"{number(a / b)}x"


def loader(results: Results) -> Iterator[str]:
    contenders = {
        "mmap": "`loader=mmap`, `validate=off`",
        "mmap_validated": "`loader=mmap`, `validate=full`",
        "standard": "`loader=standard`",
        "json_list": "list of `json.loads`",
        "orjson_list": "list of `orjson.loads`",
        "hf_datasets": "Hugging Face `datasets`",
        "verl": "verl `RLHFDataset`, no filter",
    }
    yield f"{results['rows_1200k']:,} prompts, {results['file_mb_1200k']:,.0f} MB:"
    heads = ("", "first batch cold, ms", "warm, ms", "warm, over mmap", "random rows/s", "memory, MB")
    yield markdown(
        heads,
        (
            (
                name,
                shown(results, f"first_batch_ms_cold_{c}_1200k"),
                shown(results, f"first_batch_ms_warm_{c}_1200k"),
                ratio(results, f"first_batch_ms_warm_{c}_1200k", "first_batch_ms_warm_mmap_1200k"),
                shown(results, f"random_rows_per_s_{c}_1200k"),
                shown(results, f"rss_anon_mb_{c}_1200k"),
            )
            for c, name in contenders.items()
        ),
    )
    yield "`loader=mmap` by size:"
    sizes = ("12k", "120k", "1200k")
    rows = {
        "index built, GB/s": "index_gb_per_s",
        "open, warm, ms": "open_ms_warm_mmap",
        "first batch, cold, ms": "first_batch_ms_cold_mmap",
        "first batch, warm, ms": "first_batch_ms_warm_mmap",
        "first batch, warm, `datasets`, ms": "first_batch_ms_warm_hf_datasets",
        "random rows/s": "random_rows_per_s_mmap",
        "batches of a run, rows/s": "steps_rows_per_s_mmap",
        "memory, MB": "rss_anon_mb_mmap",
        "length filter, first start: first batch, s": "length_filter_s_mmap",
        "length filter, first start: all counted, s": "length_filter_all_s_mmap",
        "length filter, second start: first batch, s": "length_filter_s_second_start_mmap",
        "verl's length filter, first start, s": "length_filter_s_verl",
        "verl's length filter, second start, s": "length_filter_s_second_start_verl",
        "the same with this project's dataset, first start, s": "length_filter_s_verl_mapped",
        "the same with this project's dataset, second start, s": "length_filter_s_second_start_verl_mapped",
    }
    heads = ("", *(f"{results.get(f'rows_{s}', 0):,} rows" for s in sizes))
    yield markdown(heads, ([name, *(shown(results, f"{key}_{s}") for s in sizes)] for name, key in rows.items()))


def token_cache(results: Results) -> Iterator[str]:
    cases = {
        "memory": "in process",
        "shared": "from another process",
        "shared_while_written": "the same, while a third one writes",
        "disk": "from disk, after a restart",
        "disk_paged_out": "the same, not in the page cache",
        "lmdb": "raw LMDB",
        "diskcache": "diskcache",
    }
    yield f"Microseconds a hit, one prompt a call: p50 / p99 (vocabulary of {results['vocabulary']:,}):"
    columns = [(tokens, size) for tokens in (60, 256) for size in ("4k", "1m")]
    heads = ("", *(f"{tokens} tokens, {size} entries" for tokens, size in columns), "in batches of 64", "over a hit")

    def row(case: str) -> Iterator[str]:
        yield cases[case]
        for tokens, size in columns:
            key = f"{tokens}_{size}"
            p50, p99 = (shown(results, f"hit_us_{case}_{p}_{key}").split(" ")[0] for p in ("p50", "p99"))
            yield "-" if p50 == "-" else f"{p50} / {p99}"
        yield shown(results, f"hit_us_{case}_batch_256_1m")
        yield ratio(results, "retokenize_us_256", f"hit_us_{case}_p50_256_1m")

    yield markdown(heads, (list(row(case)) for case in cases))
    yield "The last column is the time to tokenise 256 tokens again, one prompt a call, over that of a hit."
    rows = [(f"tokenise {t} tokens again, one a call", f"retokenize_us_{t}") for t in (60, 256)]
    rows += [(f"tokenise {t} tokens again, 64 a call", f"retokenize_batched_us_{t}") for t in (60, 256)]
    rows += [(f"tokenise {t} tokens again, with the chat template", f"retokenize_chat_us_{t}") for t in (60, 256)]
    rows += [
        ("hit in process, 2,000 entries", "hit_us_memory_2k"),
        ("hit in process, 2 million entries", "hit_us_memory_2m"),
        ("put in process with eviction, 2 million entries", "put_us_memory_2m"),
    ]
    yield markdown(("", "us"), [(name, shown(results, key)) for name, key in rows])
    if "stress_operations" not in results:
        return
    yield (
        f"{results['stress_operations']:,} gets and puts by 4 processes, kill -9 {results['stress_kills']} times "
        f"on the way: {results['wrong_values']} wrong values, {results['torn_values']} torn ones, "
        f"{results['leaked_segments']} segments left."
    )


def data_path(results: Results) -> Iterator[str]:
    names = {
        "digits_standard": "default run, `standard` + `none`",
        "digits_mmap": "default run, `mmap` + `shared`",
        "digits_large_standard": "1.2 million rows, `standard` + `none`",
        "digits_large_mmap": "1.2 million rows, `mmap` + `shared`",
        "digits_large_mmap_first_start": "the same, index and validation made",
        "smollm2_standard": "SmolLM2, `standard` + `none`",
        "smollm2_mmap": "SmolLM2, `mmap` + `shared`",
    }
    columns = {
        "first step, s": "first_step_s",
        "data wait a step, ms": "data_wait_ms",
        "its deviation, ms": "data_wait_sd_ms",
        "whole step, ms": "step_ms",
        "hit ratio": "hit_ratio",
    }
    rows = ([name, *(shown(results, f"{key}_{run}") for key in columns.values())] for run, name in names.items())
    yield markdown(("", *columns), rows)


def facts(results: Results) -> str:
    names = ("cpu", "cpus", "memory_gb", "filesystem", "kernel", "python", "commit", "date")
    versions = (f"{n.removeprefix('version_')} {v}" for n, v in results.items() if n.startswith("version_"))
    return f"({', '.join([*(f'{n} {results[n]}' for n in names), *versions])})"


PARTS: Mapping[str, Callable[[Results], Iterator[str]]] = {
    "loader": loader,
    "token_cache": token_cache,
    "data_path": data_path,
}


def filled(document: str, device: str, folder: Path = ROOT / "benchmarks/results") -> str:
    """The document with what stands between the marks made from the results that are there."""
    for name, part in PARTS.items():
        file = folder / f"{name}-{device}.json"
        if file.exists():
            results = json.loads(file.read_text())
            text = "\n\n".join([f"<!-- {name} -->", *part(results), facts(results), f"<!-- /{name} -->"])
            document, found = re.subn(
                f"<!-- {name} -->.*<!-- /{name} -->", lambda _, text=text: text, document, flags=re.DOTALL
            )
            if not found:
                raise ValueError(f"the document has no marks for '{name}'")
    return document


def main() -> int:
    asked = measure.settings(TableSettings, __doc__ or "")
    DOCUMENT.write_text(filled(DOCUMENT.read_text(), asked.device))
    return 0


if __name__ == "__main__":
    sys.exit(main())
