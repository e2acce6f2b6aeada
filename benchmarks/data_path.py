"""Claim: with the mapped file and the shared token cache, training starts sooner and a step waits less for its data.

    python -m benchmarks.data_path model=DIR prompts=FILE             # all three jobs; < 15 minutes on two cores
    python -m benchmarks.data_path jobs=digits scale=0.1 repeats=1    # under a minute

Whole runs of run.py, each a fresh process, `loader=standard tokenizer_cache=none` against `loader=mmap
tokenizer_cache=shared` in turn:

    digits        the default run
    digits_large  the same with its training file copied out to 1.2 million rows: what a start costs at that size
    smollm2       experiment=gsm8k on a real model (`model`, a Hugging Face folder) and real prompts (`prompts`, GSM8K's
                  train.jsonl), over a part of the file that comes round every other step

Time to first step: from the command to the first training step done, start-up and first evaluation included. The
index file and the verdict of its validation are of an earlier run, except in `first start`, which makes them. Data wait
of a step: what it spends in the loader and the tokenizer cache, from metrics.jsonl; its standard deviation is over the
steps of a run.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import measure
from benchmarks.measure import ROOT, Failure, Report, Spread

WAYS = {
    "standard": ("loader=standard", "tokenizer_cache=none"),
    "mmap": ("loader=mmap", "tokenizer_cache=shared"),
}
SHOWN = ("first_step_s", "data_wait_ms", "data_wait_sd_ms", "data_wait_max_ms", "step_ms", "hit_ratio")
JOBS = ("digits", "digits_large", "smollm2")
KEYS = tuple(
    f"{what}_{job}_{way}"
    for job in JOBS
    for way in WAYS
    for what in ("first_step_s", "data_wait_ms", "data_wait_sd_ms")
)


@dataclasses.dataclass(slots=True, kw_only=True)
class DataPathSettings:
    model: str = measure.option("", "folder of SmolLM2-135M-Instruct or another chat model; empty: no smollm2 job")
    prompts: str = measure.option("", "GSM8K's train.jsonl; default: beside the checkout")
    jobs: tuple[str, ...] = measure.option(JOBS, "which of them to run")
    rows: int = measure.option(1_200_000, "rows of digits_large")
    scale: float = measure.option(1.0, "a factor on rows and, down to 2, on the steps of a run")
    steps: int = measure.option(20, "steps of the digits runs; a quarter for digits_large")
    model_steps: int = measure.option(4, "steps of the smollm2 runs")
    batch_size: int = measure.option(2, "prompts a step of the smollm2 runs; two steps are an epoch")
    new_tokens: int = measure.option(4, "tokens a response of the smollm2 runs")
    repeats: int = measure.option(3, "runs of each way; one less, but at least one, for smollm2")
    extra: str = measure.option("", "further overrides for every run, with spaces between: 'rollout=vllm_async ...'")
    folder: str = measure.option("", "where the files go, and stay; default: a temporary folder")
    out: str = measure.option("", "write the last line to this file too; `results`: into benchmarks/results")


def one_run(folder: Path, overrides: Sequence[str]) -> dict[str, float]:
    """Seconds to the first step and to the end, and the data wait, of a run in a new run directory. Failure."""
    run_dir = folder / f"run-{time.monotonic_ns()}"
    command = [sys.executable, str(ROOT / "run.py"), *overrides, f"hydra.run.dir={run_dir}"]
    with (folder / "run.txt").open("wb") as out:
        started = time.monotonic()
        process = measure.start(command, out)
        try:
            first = _until_first_step(process, run_dir / "metrics.jsonl") - started
            process.wait(measure.LIMIT_S)
            seconds = time.monotonic() - started
        except subprocess.TimeoutExpired:
            raise Failure(f"took longer than {measure.LIMIT_S:g} s") from None
        finally:
            measure.end(process)
    if process.returncode:
        raise Failure(measure.last_lines(folder / "run.txt") or f"ended with exit code {process.returncode}")
    steps = [m for m in _metrics(run_dir / "metrics.jsonl") if m["step"]]
    waits = [(m["time/loader_s"] + m["time/tokenizer_cache_s"]) * 1e3 for m in steps]
    return {
        "first_step_s": first,
        "run_s": seconds,
        "data_wait_ms": statistics.fmean(waits),
        "data_wait_sd_ms": statistics.pstdev(waits),
        "data_wait_max_ms": max(waits),
        "loader_wait_ms": statistics.fmean(m.get("loader/wait_s", 0.0) * 1e3 for m in steps),
        "step_ms": statistics.fmean(m["time/step_s"] * 1e3 for m in steps),
        "hit_ratio": statistics.fmean(m["tokenizer_cache/hit_ratio"] for m in steps),
    }


def _until_first_step(process: subprocess.Popen[bytes], metrics: Path) -> float:
    """When the line of step 1 was there; the time of the end, if none came."""
    deadline = time.monotonic() + measure.LIMIT_S
    while process.poll() is None and time.monotonic() < deadline:
        if metrics.exists() and metrics.read_bytes().count(b"\n") > 1:  # the first line is of step 0
            break
        time.sleep(0.02)
    return time.monotonic()


def _metrics(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def jobs(asked: DataPathSettings, folder: Path) -> dict[str, list[str]]:
    """The overrides of each job."""
    file = folder / "digits.jsonl"
    prompts = Path(asked.prompts) if asked.prompts else ROOT.parent / "shared/data/gsm8k/train.jsonl"
    digits = [f"run.steps={_scaled(asked.steps, asked.scale, 2)}"]
    every = {
        "digits": digits,
        "digits_large": [f"run.steps={_scaled(asked.steps, asked.scale / 4, 2)}", f"loader.path={file}"],
        "smollm2": [
            "experiment=gsm8k",
            f"model.path={Path(asked.model).resolve()}",
            f"loader.path={prompts.resolve()}",
            f"run.steps={_scaled(asked.model_steps, asked.scale, 2)}",
            f"loader.batch_size={asked.batch_size}",
            f"loader.limit={2 * asked.batch_size}",
            "eval_loader.limit=2",
            "eval.every=0",
            "rollout.n=2",
            f"rollout.max_new_tokens={asked.new_tokens}",
        ],
    }
    if "digits_large" in asked.jobs:
        copy_out(ROOT / "data/digits/train.jsonl", file, _scaled(asked.rows, asked.scale, 64))
    return {job: words for job, words in every.items() if job in asked.jobs and (asked.model or job != "smollm2")}


def copy_out(source: Path, file: Path, rows: int) -> None:
    """The lines of a file again and again, up to a number of rows."""
    lines = source.read_bytes().splitlines(keepends=True)
    with file.open("wb") as out:
        for done in range(0, rows, len(lines)):
            out.writelines(lines[: rows - done])


def _scaled(count: int, scale: float, least: int) -> int:
    return max(min(count, least), round(count * scale))


def main() -> int:
    asked = measure.settings(DataPathSettings, __doc__ or "")
    measure.check_words("jobs", asked.jobs, JOBS)
    with measure.work_folder(asked.folder) as folder:
        report = Report("data_path", asked, folder)
        rows: list[list[Any]] = []
        for job, overrides in jobs(asked, folder).items():
            index = f"loader.index_dir={folder / job}"
            runs = {way: [*overrides, *words, index, *asked.extra.split()] for way, words in WAYS.items()}
            repeats = max(asked.repeats - (job == "smollm2"), 1)
            first: dict[str, dict[str, Spread]] = {}
            if job == "digits_large":
                first = report.in_turn({f"{job} mmap, first start": partial(one_run, folder, runs["mmap"])}, 1)
            later = report.in_turn({f"{job} {way}": partial(one_run, folder, runs[way]) for way in WAYS}, repeats)
            for name, found in (*later.items(), *first.items()):
                key = name.replace(", ", "_").replace(" ", "_")
                report.keep(found, **{f"{number}_{key}": number for number in found})
                rows.append([name, *(found.get(number) for number in SHOWN)])
        heads = (
            "job, data path",
            "first step, s",
            "data wait a step, ms",
            "its deviation",
            "largest",
            "step, ms",
            "hits",
        )
        report.table("Whole runs", heads, rows)
        return report.finish(KEYS, asked.out)


if __name__ == "__main__":
    sys.exit(main())
