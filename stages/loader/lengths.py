"""Which rows have prompts within a number of tokens: known at once for rows that are asked for, counted for the rest
by processes of low priority while training runs, and kept beside the file for the next start."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import xxhash

from pipeline.process import Child
from pipeline.progress import alive
from stages.loader import sidecar
from stages.loader.files import LENGTHS
from stages.loader.joined import Joined
from stages.loader.length_file import BAD, BLOCK, REFUSED, LengthFile
from stages.loader.rows import BadRow, DataError
from stages.loader.source import Source
from stages.loader.stamp import Stamp
from stages.model import Model

log = logging.getLogger("headrace")

_MANY = 16
"""Blocks from which on other processes are worth their start to somebody who waits."""


class Counter(ABC):
    """Tokens of prompts, by row. Lives in one process; a callable that makes one travels to others."""

    @abstractmethod
    def count(self, rows: Sequence[int]) -> np.ndarray:
        """int32, one a row: its tokens, or BAD, or REFUSED."""

    @abstractmethod
    def why(self, row: int) -> str:
        """What is wrong with a row whose count is REFUSED, with its place."""


class PromptCounter(Counter):
    """Of the prompts as the policy will see them: system prompt, chat template and special tokens are in the count."""

    def __init__(self, source: Source, model: Model):
        self._source, self._model = source, model

    def count(self, rows: Sequence[int]) -> np.ndarray:
        found = self._source.rows(rows)
        out = np.full(len(rows), BAD, np.int32)
        usable = [i for i, row in enumerate(found) if not isinstance(row, BadRow)]
        prompts = [orjson.loads(row.prompt) for row in found if not isinstance(row, BadRow)]
        out[usable] = self._lengths(prompts)
        return out

    def _lengths(self, prompts: list[Any]) -> list[int]:
        try:
            return [len(ids) for ids in self._model.render(self._model.tokenizer(), prompts)]
        except ValueError:
            if len(prompts) == 1:
                return [REFUSED]
            half = len(prompts) // 2  # which of them it was
            return self._lengths(prompts[:half]) + self._lengths(prompts[half:])

    def why(self, row: int) -> str:
        [found] = self._source.rows([row])
        [place] = self._source.places([row])
        try:
            assert not isinstance(found, BadRow)
            self._model.render(self._model.tokenizer(), [orjson.loads(found.prompt)])
        except ValueError as e:
            return f"{place}: {e}"
        return f"{place}: the prompt could not be rendered"


def prompt_counter(recipe: Callable[[], Source], model: Model) -> Counter:
    """In another process."""
    return PromptCounter(recipe(), model)


class FileLengths:
    """`fits` answers for rows of one file.

    `here` makes the counter of this process; `elsewhere`, pickled, those of the processes that count in the background
    (None: there can be none, and all is counted at the start). `rows` are all that will be asked for; `where` names
    the limit in messages. Rows that cannot be used fit: what is wrong with them is told where they are used. DataError,
    with its place, for a prompt that the chat template refuses. Not for several threads at once.
    """

    def __init__(
        self,
        file: LengthFile,
        here: Callable[[], Counter],
        elsewhere: Callable[[], Counter] | None,
        rows: range,
        limit: int,
        where: str,
    ):
        self._file, self._here, self._elsewhere = file, cache(here), elsewhere
        self._rows, self._limit, self._where = rows, limit, where
        self._extra: dict[int, int] = {}
        self._workers: dict[Child, str] = {}
        self._told = False

    def start(self, name: str, logs: Path, cores: int) -> None:
        """Have missing counts made in the background, by as many threads as there are cores. Few are counted here and
        now, in less time than a process takes to start."""
        missing = self._file.unknown(self._rows)
        if len(missing) == 1 or not self._elsewhere:
            count_missing(self._here(), self._file, self._rows)
        elif missing:
            processes = max(1, min(cores // 4, 4, len(missing)))
            self._work(name, logs, processes, max(1, cores // processes))
            log.info("%s: counting the tokens of %d rows in the background", name, len(self._rows))
        self._tell_if_complete()

    def _work(self, name: str, logs: Path | None, processes: int, threads: int) -> None:
        for i in range(processes):
            log_file = logs / f"{name}-lengths-{i}.log" if logs else None
            args = self._elsewhere, self._file, self._rows, threads
            worker = Child(Worker, *args, name=f"{name} lengths {i}", log=log_file)
            self._workers[worker] = "starting"
            worker.post("run")

    def finish(self, name: str, processes: int) -> None:
        """Make all missing counts now, with this process and others if there is much to do."""
        if self._elsewhere and len(self._file.unknown(self._rows)) > _MANY:
            self._work(name, None, processes - 1, 1)
        count_missing(self._here(), self._file, self._rows)

    def fits(self, rows: np.ndarray) -> np.ndarray:
        """bool, one a row; int64 positions in the file. What is not known yet is counted now."""
        counts = self.counts(rows)
        if np.any(counts == REFUSED):
            raise DataError(self._here().why(int(rows[counts == REFUSED][0])))
        return counts <= self._limit

    def counts(self, rows: np.ndarray) -> np.ndarray:
        """int32 tokens, one a row; BAD where a row cannot be used, REFUSED where its prompt has no length."""
        if self._workers:
            self._look_after_workers()
        known = self._known(rows // BLOCK)
        out = self._file.counts[rows]
        if not known.all():
            out[~known] = self._count_now(rows[~known].tolist())
        return out

    def complete(self) -> bool:
        """Whether all rows that will be asked for are counted."""
        return not self._file.unknown(self._rows)

    def some_fit(self) -> bool:
        """Whether any row does. Counts all that are missing."""
        counts = self._every()
        return bool(np.any((counts >= 0) & (counts <= self._limit)))

    def _every(self) -> np.ndarray:
        return self.counts(np.arange(self._rows.start, self._rows.stop))

    def shortest(self) -> int | None:
        """Tokens of the shortest prompt; None if no row can be used. Counts all that are missing."""
        counts = self._every()
        return int(counts[counts >= 0].min()) if np.any(counts >= 0) else None

    def _known(self, blocks: np.ndarray) -> np.ndarray:
        found = {b: self._file.known(b) for b in np.unique(blocks).tolist()}
        return np.array([found[b] for b in blocks.tolist()], bool)

    def _count_now(self, rows: list[int]) -> list[int]:
        new = [r for r in dict.fromkeys(rows) if r not in self._extra]
        for part in (new[i : i + BLOCK] for i in range(0, len(new), BLOCK)):
            self._extra.update(zip(part, self._here().count(part).tolist(), strict=True))
            alive()
        return [self._extra[r] for r in rows]

    def _look_after_workers(self) -> None:
        """Take note of those that have ended; that one failed is no reason to stop."""
        for worker in list(self._workers):
            try:
                worker.take(0)
                if self._workers[worker] == "starting":
                    self._workers[worker] = "counting"
                    continue
            except TimeoutError:
                continue
            except Exception as e:
                log.warning("%s: token counts are made only as they are needed from now on (%s)", worker.name, e)
            worker.kill()
            del self._workers[worker]
        self._tell_if_complete()

    def _tell_if_complete(self) -> None:
        if self._told or not self.complete():
            return
        self._told, self._extra = True, {}
        counts = self._file.counts[self._rows.start : self._rows.stop]
        long = int(np.count_nonzero(counts > self._limit))
        log.info("%s is %d: %d of %d prompts are longer and left out", self._where, self._limit, long, len(counts))

    def close(self) -> None:
        """Safe to call twice. What is counted stays."""
        for worker in self._workers:
            worker.kill()
        self._workers = {}
        self._file.close()


class Worker:
    """In a process of its own, of low priority."""

    def __init__(self, make: Callable[[], Counter], file: LengthFile, rows: range, threads: int):
        os.setpriority(os.PRIO_PROCESS, 0, 19)
        os.environ["RAYON_NUM_THREADS"] = str(threads)
        os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
        self._make, self._file, self._rows = make, file, rows

    def run(self) -> None:
        count_missing(self._make(), self._file, self._rows)


def count_missing(counter: Counter, file: LengthFile, rows: range) -> None:
    """Count the blocks that nobody else is counting, in the order of the file, until every count is there. What another
    process has claimed and then left is counted in a later round."""
    while missing := file.unknown(rows):
        busy = [b for b in missing if not _count_block(counter, file, b)]
        if len(busy) == len(missing):
            time.sleep(0.2)


def _count_block(counter: Counter, file: LengthFile, block: int) -> bool:
    """False if another process is at it."""
    with file.claimed(block) as ours:
        if ours and not file.known(block):
            span = file.span(block)
            file.put(block, counter.count(range(span.start, span.stop)))
            alive()
        return ours


class Lengths:
    """The length filter of a loader: `fits` answers for rows of all its files, as `joined` counts them.

    `rows`: no others are asked for. `settings`: what decides the content of a row, 16 bytes. Counts are
    kept where the files' indexes are, or could be (`index_dir`). Close it before the files.
    """

    def __init__(
        self, joined: Joined, model: Model, settings: bytes, limit: int, *, rows: range, index_dir: str, where: str
    ):
        self._joined, self._limit, self._where = joined, limit, where
        key = xxhash.xxh3_128_digest(model.fingerprint() + settings)
        self._files: list[FileLengths] = []
        spans = zip(joined.sources, joined.spans(rows.stop), joined.starts(), strict=True)
        for source, span, start in spans:
            span = range(min(max(rows.start - start, 0), span.stop), span.stop)
            names = sidecar.places(source.path, index_dir, LENGTHS)
            file = open_file(names, stamp_key(source.stamp), key, span, len(source))
            here, recipe = partial(PromptCounter, source, model), source.recipe()
            elsewhere = partial(prompt_counter, recipe, model) if recipe else None
            self._files.append(FileLengths(file, here, elsewhere, span, limit, where))

    def start(self, name: str, logs: Path, cores: int) -> None:
        """Have missing counts made in the background. DataError if all are there, and none is small enough."""
        for i, file in enumerate(self._files):
            file.start(f"{name}-{i}" if i else name, logs, cores)
        if all(f.complete() for f in self._files) and not self.some_fit():
            raise self.nothing_fits()

    def fits(self, rows: np.ndarray) -> np.ndarray:
        """bool, one a row; int64 [n]. What is not known yet is counted now."""
        out = np.empty(len(rows), bool)
        for file, which, positions in self._joined.locate(rows):
            out[which] = self._files[file].fits(positions)
        return out

    def some_fit(self) -> bool:
        """Whether any row does. Counts all that are missing."""
        return any(f.some_fit() for f in self._files)

    def nothing_fits(self) -> DataError:
        """What to raise when no row does. Counts all that are missing, to tell the shortest."""
        shortest = min((s for f in self._files if (s := f.shortest())), default=None)
        told = f"the shortest has {shortest}" if shortest else "no row can be used"
        return DataError(f"{self._where} is {self._limit}, and every prompt has more tokens; {told}")

    def close(self) -> None:
        """Safe to call twice. What is counted stays."""
        for file in self._files:
            file.close()


def stamp_key(stamp: Stamp) -> bytes:
    """16 bytes: another content, or the same written again."""
    parts = (stamp.size, stamp.mtime_ns, stamp.inode)
    return xxhash.xxh3_128_digest(stamp.sample + b"".join(p.to_bytes(8, "little") for p in parts))


def open_file(places: Sequence[Path], stamp: bytes, settings: bytes, rows: range, of: int) -> LengthFile:
    """The first of these names where counts can be kept, or are kept already; in memory if there is none."""
    for name in places:
        with contextlib.suppress(OSError):
            file = LengthFile.beside(name, stamp, settings, of)
            if file.writable or not file.unknown(rows):
                return file
            file.close()
    log.warning("token counts can be kept nowhere (%s): the next run counts again", ", ".join(map(str, places)))
    return LengthFile.in_memory(stamp, settings, of)
