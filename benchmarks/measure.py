"""What every benchmark does: settings as `name=value`, fresh processes, medians, the machine, the last line.

A contender is a function that runs in a Python process of its own and returns a flat dict of numbers. It is run
several times; what is reported is the median with the lowest and the highest. One that fails is reported, the others
go on, and the exit status is 1 at the end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib
import json
import math
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from pipeline.errors import near
from pipeline.process import die_with_parent

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (
    "numpy",
    "orjson",
    "pyarrow",
    "datasets",
    "verl",
    "transformers",
    "tokenizers",
    "lmdb",
    "diskcache",
    "xxhash",
)
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "DO_NOT_TRACK": "1", "TRANSFORMERS_VERBOSITY": "error"}
LIMIT_S = 1800.0
"""For one process of one contender."""

S = TypeVar("S")
Number = float | int


class Failure(RuntimeError):
    """A contender did not end well; the message is the last lines of what it printed."""


# -- settings ----------------------------------------------------------------------------------------------------


def option(default: Any, doc: str) -> Any:
    """A field of a benchmark's settings; `doc` is its line in the help."""
    return dataclasses.field(default=default, metadata={"doc": doc})


def settings(cls: type[S], doc: str, words: Sequence[str] | None = None) -> S:
    """An instance of a settings dataclass from `name=value` words. Leaves the program for `--help` and mistakes."""
    words = sys.argv[1:] if words is None else words
    fields = {f.name: f for f in dataclasses.fields(cls)}  # pyright: ignore[reportArgumentType]
    if any(w in ("-h", "--help", "help") for w in words):
        print(doc.strip(), "\n\nsettings, as name=value:")
        for name, field in fields.items():
            print(f"  {name + '=' + _written(field.default):<28} {field.metadata['doc']}")
        raise SystemExit(0)
    given: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or name not in fields:
            print(f"'{word}': settings are name=value; {near(name, fields)}", file=sys.stderr)
            raise SystemExit(2)
        try:
            given[name] = _read(value, fields[name].default)
        except ValueError as e:
            print(f"'{word}': {e}", file=sys.stderr)
            raise SystemExit(2) from None
    return cls(**given)


def check_words(name: str, given: Sequence[str], allowed: Sequence[str]) -> None:
    """Leave the program if a setting that is a list of words has another word."""
    for word in given:
        if word not in allowed:
            print(f"'{name}={word}': {near(word, allowed)}", file=sys.stderr)
            raise SystemExit(2)


def _written(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _read(value: str, like: Any) -> Any:
    """Text as the type of the default. A tuple is written with commas."""
    if isinstance(like, tuple):
        return tuple(_read(v, like[0] if like else "") for v in value.split(",") if v)
    if isinstance(like, int | float):
        number = type(like)(value)
        if not math.isfinite(number) or number < 0:
            raise ValueError("a number that is not negative is needed")
        return number
    return value


# -- a process of its own ----------------------------------------------------------------------------------------


def alone(
    function: Callable[..., Mapping[str, Any]], /, env: Mapping[str, str] | None = None, **arguments: Any
) -> dict:
    """What `function(**arguments)` returns in a fresh process; the arguments and the result go as JSON.

    Failure if it raises, dies, or takes longer than LIMIT_S.
    """
    where = f"{_module(function)}:{function.__qualname__}"
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        result, log = Path(folder, "result.json"), Path(folder, "log.txt")
        command = [
            sys.executable,
            "-m",
            "benchmarks.measure",
            where,
            json.dumps(arguments),
            str(result),
            str(os.getpid()),
        ]
        with log.open("wb") as out:
            process = start(command, out, env)
            try:
                code = process.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                raise Failure(f"took longer than {LIMIT_S:g} s") from None
            finally:
                end(process)
        if code or not result.exists():
            raise Failure(last_lines(log) or f"ended with exit code {code}")
        return json.loads(result.read_text())


@contextlib.contextmanager
def beside(function: Callable[..., Iterator[Mapping[str, Any]]], /, **arguments: Any) -> Iterator[dict]:
    """`function(**arguments)`, a generator, in a fresh process that lives as long as the block.

    It yields once when it is ready, which is what the block is given; then it goes on until it is killed.
    """
    where = f"{_module(function)}:{function.__qualname__}"
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        ready, log = Path(folder, "ready.json"), Path(folder, "log.txt")
        command = [
            sys.executable,
            "-m",
            "benchmarks.measure",
            where,
            json.dumps(arguments),
            str(ready),
            str(os.getpid()),
        ]
        with log.open("wb") as out:
            process = start(command, out)
        try:
            deadline = time.monotonic() + LIMIT_S
            while not ready.exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise Failure(last_lines(log) or "never became ready")
                time.sleep(0.02)
            yield json.loads(ready.read_text())
            if process.poll() is not None:
                raise Failure(last_lines(log) or f"ended early with exit code {process.returncode}")
        finally:
            end(process)


def start(command: Sequence[str], out: Any, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """A program at the root of the checkout, offline, at the head of a process group; what it prints goes to `out`."""
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | OFFLINE | dict(env or {}),
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=out,
        start_new_session=True,
    )


def end(process: subprocess.Popen[Any]) -> None:
    """The process and all of its group (it leads one), dead and reaped."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, 9)
    process.wait()


def _module(function: Callable[..., Any]) -> str:
    """A benchmark that was started by `-m` is `__main__` here, and goes by its name there."""
    if function.__module__ != "__main__":
        return function.__module__
    spec = sys.modules["__main__"].__spec__
    assert spec is not None, "start a benchmark by `python -m benchmarks.<name>`"
    return spec.name


def last_lines(log: Path, count: int = 3) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " / ".join(lines[-count:])[-600:]


def _serve(where: str, arguments: str, result: str, parent: str) -> None:
    die_with_parent(int(parent))
    module, _, name = where.partition(":")
    found = getattr(importlib.import_module(module), name)(**json.loads(arguments))
    goes_on = isinstance(found, Iterator)
    partial = Path(result + ".partial")
    partial.write_text(json.dumps(dict(next(found) if goes_on else found)))
    partial.rename(result)
    if goes_on:
        for _ in found:
            pass


# -- what a contender uses ---------------------------------------------------------------------------------------


def rss_anon_mb() -> float:
    """Anonymous resident memory of this process in MB (proc(5), RssAnon): what the file's page cache is no part of."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise OSError("/proc/self/status has no RssAnon")


class Clock:
    """Milliseconds since it was made."""

    def __init__(self) -> None:
        self._started = time.perf_counter()

    def ms(self) -> float:
        return (time.perf_counter() - self._started) * 1e3


def per_second(work: Callable[[Any], int], pieces: Iterable[Any], seconds: float) -> float:
    """Units of work a second: `work(piece)` says how many it did. Stops after `seconds` or the last piece."""
    done, started = 0, time.perf_counter()
    for piece in pieces:
        done += work(piece)
        if time.perf_counter() - started >= seconds:
            break
    return done / (time.perf_counter() - started)


def evict(*files: Path) -> float:
    """Drop files from the page cache (fsync, then posix_fadvise DONTNEED); the share that is still there, 0 to 1.

    It reaches this machine's cache alone: a disk, or the host of a virtual machine, may have a cache of its own.
    """
    for file in files:
        with file.open("rb") as f:
            os.fsync(f.fileno())
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return max(map(cached, files), default=0.0)


def read_through(*files: Path) -> float:
    """Read files into the page cache; the share that is there then."""
    for file in files:
        with file.open("rb", buffering=0) as f:
            buffer = bytearray(1 << 20)
            while f.readinto(buffer):
                pass
    return min(map(cached, files), default=1.0)


def cached(file: Path, pages: int = 256) -> float:
    """Share of evenly spread pages of a file that the page cache holds: preadv2(2) with RWF_NOWAIT reads no others."""
    size, found, buffer = file.stat().st_size, 0, bytearray(1)
    with file.open("rb") as f:
        for i in range(pages):
            with contextlib.suppress(BlockingIOError):
                found += os.preadv(f.fileno(), [buffer], size * i // pages, os.RWF_NOWAIT)
    return found / pages


@contextlib.contextmanager
def work_folder(folder: str) -> Iterator[Path]:
    """The folder that was asked for, which is kept, or a temporary one, which goes also if SIGTERM ends the program."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if folder:
        path = Path(folder).expanduser().resolve()
        path.mkdir(parents=True, exist_ok=True)
        yield path
    else:
        with tempfile.TemporaryDirectory(prefix="headrace-bench-") as temporary:
            yield Path(temporary)


# -- the report --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Spread:
    """Of the repeats of one number."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values), len(values))

    def scaled(self, factor: float) -> Spread:
        """In another unit."""
        return Spread(self.median * factor, self.low * factor, self.high * factor, self.count)

    def __str__(self) -> str:
        text = number(self.median)
        return text if self.count == 1 else f"{text} ({number(self.low)}-{number(self.high)})"


def number(value: float) -> str:
    """Three digits that matter, thousands apart."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}" if abs(value) >= 1e-3 else f"{value:.2g}"


class Report:
    """Collects what contenders measured, and ends with a table, the machine, and one flat JSON line."""

    def __init__(self, benchmark: str, asked: Any, folder: Path):
        """`folder`: where the files lie that are measured; what kind of file system it is on is a fact."""
        self.benchmark, self.asked = benchmark, asked
        self.numbers: dict[str, Spread] = {}
        self.failed: dict[str, str] = {}
        self.tables: list[str] = []
        self._bars: list[tuple[str, bool]] = []
        self.facts = machine(folder) | {"load_before": os.getloadavg()[0]}
        self._started = time.monotonic()

    def run(
        self,
        name: str,
        function: Callable[..., Mapping[str, Any]],
        repeats: int,
        /,
        before: Callable[[], Mapping[str, float]] | None = None,
        env: Mapping[str, str] | None = None,
        **arguments: Any,
    ) -> dict[str, Spread]:
        """A contender, `repeats` times, each in a fresh process; by name what it returned. {} if one failed.

        `before` runs in this process ahead of each repeat: it sets up what cold and warm mean, and may return numbers.
        """

        def once() -> dict[str, Any]:
            return dict(before() if before else {}) | alone(function, env=env, **arguments)

        return self.in_turn({name: once}, repeats)[name]

    def in_turn(
        self, contenders: Mapping[str, Callable[[], Mapping[str, Any]]], repeats: int
    ) -> dict[str, dict[str, Spread]]:
        """Several contenders one after the other, `repeats` times: what else the machine does meets all of them."""
        seen: dict[str, dict[str, list[float]]] = {name: {} for name in contenders}
        for i in range(repeats):
            for name, once in contenders.items():
                if name in self.failed:
                    continue
                now = time.monotonic() - self._started
                print(f"[{now:6.1f} s] {name} ({i + 1}/{repeats})", file=sys.stderr, flush=True)
                try:
                    for key, value in once().items():
                        seen[name].setdefault(key, []).append(value)
                except (Failure, OSError) as e:
                    self.fail(name, e)
        whole = {name: found for name, found in seen.items() if name not in self.failed}
        return {name: {k: Spread.of(v) for k, v in whole.get(name, {}).items()} for name in seen}

    def fail(self, name: str, why: Exception) -> None:
        """The others go on; the exit status will be 1."""
        self.failed[name] = str(why)
        print(f"    FAILED: {name}: {why}", file=sys.stderr, flush=True)

    def keep(self, found: Mapping[str, Spread], **names: str) -> None:
        """`keep(found, warm_open_ms="open_ms")`: numbers for the last line, under names of their own."""
        self.numbers |= {name: found[key] for name, key in names.items() if key in found}

    def get(self, name: str) -> float | None:
        return self.numbers[name].median if name in self.numbers else None

    def bar(self, what: str, value: float | None, *, least: float | None = None, most: float | None = None) -> None:
        """A number that was promised; None (not measured) does not meet it."""
        bound = f"at least {number(least)}" if least is not None else f"at most {number(most or 0)}"
        met = value is not None and (least is None or value >= least) and (most is None or value <= most)
        self._bars.append((f"{what}: {bound}, is {'not measured' if value is None else number(value)}", met))

    def ratio(self, over: str, under: str) -> float | None:
        a, b = self.get(over), self.get(under)
        return None if a is None or not b else a / b

    def table(self, title: str, heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """Keep a Markdown table; None is a dash."""
        lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
        lines += [f"| {' | '.join('-' if v is None else _cell(v) for v in row)} |" for row in rows]
        self.tables.append("\n".join([f"{title}\n", *lines]))

    def finish(self, keys: Iterable[str], out: str) -> int:
        """Print everything and write `out`; the exit status. `keys` are in the last line, null if not measured."""
        flat: dict[str, Any] = {"benchmark": self.benchmark, **dict.fromkeys(keys)}
        for name, spread in self.numbers.items():
            flat[name] = _rounded(spread.median)
            if spread.count > 1:
                flat |= {f"{name}_low": _rounded(spread.low), f"{name}_high": _rounded(spread.high)}
        asked = {k: _written(v) for k, v in dataclasses.asdict(self.asked).items() if k not in ("out", "folder")}
        missed = [text for text, met in self._bars if not met]
        flat |= {
            "settings": " ".join(f"{k}={Path(v).name if '/' in v else v}" for k, v in asked.items()),
            "failed": "; ".join(f"{name}: {why}" for name, why in self.failed.items()),
            "bars": len(self._bars),
            "bars_missed": "; ".join(missed),
            "seconds": round(time.monotonic() - self._started, 1),
            **self.facts,
            "load_after": os.getloadavg()[0],
        }
        self._print(flat)
        if out:
            file = (
                ROOT / f"benchmarks/results/{self.benchmark}-{flat['device']}.json" if out == "results" else Path(out)
            )
            file.write_text(json.dumps(flat, indent=1) + "\n")
        print(json.dumps(flat), flush=True)
        return 1 if self.failed else 0

    def _print(self, flat: Mapping[str, Any]) -> None:
        for table in self.tables:
            print(f"\n{table}")
        if self._bars:
            print("\nBars (they are meant for the full size):")
        for text, met in self._bars:
            print(f"  {'met   ' if met else 'MISSED'} {text}")
        for name, why in self.failed.items():
            print(f"FAILED {name}: {why}")
        facts = (
            "device",
            "cpu",
            "cpus",
            "memory_gb",
            "filesystem",
            "kernel",
            "python",
            "commit",
            "date",
            "load_before",
        )
        print("\n" + ", ".join(f"{k} {flat[k]}" for k in facts))


def _cell(value: Any) -> str:
    return number(value) if isinstance(value, float) else str(value)


def _rounded(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.4g}") if abs(value) < 1e6 else float(round(value))


def machine(folder: Path) -> dict[str, Any]:
    """What a reader needs to know of where this ran, as flat JSON."""
    memory = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal:"))
    return {
        "device": _device(),
        "cpu": _cpu(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gb": round(int(memory.split()[1]) * 1024 / 1e9, 1),
        "filesystem": filesystem(folder),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        **{f"version_{name}": _version(name) for name in PACKAGES},
    }


def filesystem(folder: Path) -> str:
    """Type of the file system that a folder is on: the longest mount point above it."""
    folder, best = folder.resolve(), ("", "unknown")
    for line in Path("/proc/self/mounts").read_text().splitlines():
        point, kind = line.split()[1:3]
        if folder.is_relative_to(point) and len(point) >= len(best[0]):
            best = point, kind
    return best[1]


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _device() -> str:
    """`cpu`, or the name of the first GPU in one word: `h200`."""
    with contextlib.suppress(OSError):
        asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        found = subprocess.run(asked, capture_output=True, text=True)
        if not found.returncode and found.stdout.strip():
            return found.stdout.splitlines()[0].lower().removeprefix("nvidia ").replace(" ", "-")
    return "cpu"


def _commit() -> str:
    with contextlib.suppress(OSError):
        asked = ["git", "describe", "--always", "--dirty"]
        found = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True)
        if not found.returncode:
            return found.stdout.strip()
    return "unknown"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


if __name__ == "__main__":
    _serve(*sys.argv[1:])
