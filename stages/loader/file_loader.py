"""What loaders of files share: everything but how a file becomes rows.

A backend gives `open_source(path, parser, first)` and says in `reads` which kinds of content it reads.
"""

from __future__ import annotations

import logging
import os
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
import xxhash

from pipeline.context import Context
from pipeline.errors import Problem
from pipeline.plan import Facts
from pipeline.records import Ragged, offsets_of
from stages.loader import Loader, LoaderConfig, bad_rows, checks
from stages.loader.bad_rows import LIST, SHOWN, Complaint
from stages.loader.files import TEXT, allow_open, find, is_empty, refusal
from stages.loader.joined import Joined
from stages.loader.order import Order
from stages.loader.prefetch import Prefetch
from stages.loader.rows import BadRow, DataError, Row, RowParser
from stages.loader.sidecar import Verdict
from stages.loader.source import Source
from stages.loader.validation import judge
from stages.loader.walk import Walk
from stages.model import Model
from stages.records import PromptBatch, Sampling

if TYPE_CHECKING:
    from stages.loader.lengths import Lengths

log = logging.getLogger("headrace")


@dataclass(frozen=True, slots=True)
class _At:
    """Where a loader stands: calls made, and the position in the order at which the next one begins."""

    calls: int = 0
    position: int = 0


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A batch, the rows it was made of, where the loader stands after it, the seconds it took, and how many rows on
    the way to it were too long."""

    batch: PromptBatch
    rows: np.ndarray
    after: _At
    seconds: float
    too_long: int


class FileLoader(Loader):
    """`model` is asked for only by the length filter: its tokenizer counts."""

    reads: ClassVar[frozenset[str]] = frozenset({TEXT})
    """Kinds of content (stages/loader/files.py)."""

    def __init__(self, cfg: LoaderConfig, model: Model):
        self.cfg, self._model = cfg, model
        self._now = self._ahead = _At()
        self._data = Joined(())
        self._lengths: Lengths | None = None
        self._left_out: set[int] = set()
        self._prefetch: Prefetch[_Prepared] | None = None

    @abstractmethod
    def open_source(self, path: Path, parser: RowParser, first: int) -> Source:
        """The rows of a file. `first`: no rows after the first so many will be asked for; 0: all may be."""

    # -- at plan time ------------------------------------------------------------------------------------------

    def facts(self) -> Mapping[str, Any]:
        cfg = self.cfg
        known: dict[str, Any] = {"prompts_per_step": cfg.batch_size} if cfg.batch_size else {}
        known |= {"chat_prompts": True} if cfg.chat or cfg.system_prompt else {}
        limit = cfg.max_prompt_tokens  # under a name of its own too: a token cache may have another
        return known | ({"max_prompt_tokens": limit, "loader_max_prompt_tokens": limit} if limit else {})

    def check(self, facts: Facts) -> Iterable[Problem]:
        yield from checks.of_files(facts.key, self.cfg, self.reads)
        yield from checks.of_settings(facts.key, self.cfg)
        yield from checks.of_use(facts.key, self.cfg, facts.evaluates)
        if facts.evaluates:
            others = {n: p.cfg for n, p in facts.nodes.items() if n != facts.key and isinstance(p, FileLoader)}
            yield from checks.of_held_out_rows(facts.key, self.cfg, others)
            yield from checks.of_room(facts.key, self.cfg, facts.values.get("context_length") or 0)

    # -- opening -----------------------------------------------------------------------------------------------

    def open(self, ctx: Context) -> None:
        super().open(ctx)
        cfg, parser = self.cfg, RowParser(self.cfg, ctx.node)
        end = cfg.skip + cfg.limit if cfg.limit else None
        self._open_sources(parser, end)
        found = min(len(self._data), end or len(self._data))
        bad = self._validate(parser, found)
        self._rows = self._rows_of(found)
        usable = self._usable(parser, bad, found)
        self._walk = Walk(self._order(), usable, self._too_few)
        self._batch = cfg.batch_size or self._whole_batch(usable)
        self._all_known = cfg.on_bad_row == "stop" or cfg.validate == "full"
        self._restart(_At())

    def _open_sources(self, parser: RowParser, end: int | None) -> None:
        """As many files as the first `end` rows lie in."""
        sources, rows = list[Source](), 0
        files = self._files()
        allow_open(len(files))
        try:
            for path in files:
                if end and rows >= end:
                    break
                sources.append(self.open_source(path, parser, end - rows if end else 0))
                rows += len(sources[-1])
                if not len(sources[-1]):
                    log.warning("%s has no rows, only blank lines", path)
        finally:
            self._data = Joined(sources)

    def _files(self) -> Sequence[Path]:
        """DataError if there are none, or one cannot be read."""
        found = find(self.cfg.path)
        if found.hidden:
            log.info("%s.path leaves out: %s", self.ctx.node, ", ".join(map(str, found.hidden)))
        empty = [f for f in found.files if is_empty(f)]
        files = [f for f in found.files if f not in empty] or found.files
        problems = [f"{self.ctx.node}.path {p}" for p in found.problems]
        problems += [why for f in files if (why := refusal(f, self.reads))]
        if problems:
            raise DataError("\n".join(problems))
        for path in empty:
            log.warning("%s is empty", path)
        return files

    def _rows_of(self, found: int) -> int:
        """Rows that the loader walks over, of those that were found. DataError if they do not make a batch."""
        cfg, node, names = self.cfg, self.ctx.node, self._names()
        if not found:
            raise DataError(f"{names} has no rows, only blank lines")
        rows = found - cfg.skip
        if rows <= 0:
            raise DataError(f"{node}.skip is {cfg.skip}, but {names} has {found} rows; it may be at most {found - 1}")
        if cfg.batch_size * cfg.shards > rows:
            shards = f" with {node}.shards {cfg.shards}" if cfg.shards > 1 else ""
            raise DataError(
                f"{node}.batch_size is {cfg.batch_size}{shards}, but {names} gives {rows} rows"
                f" ({node}.skip {cfg.skip}, limit {cfg.limit}); it may be at most that"
            )
        return rows

    def _names(self) -> str:
        sources = self._data.sources
        return str(sources[0].path) if len(sources) == 1 else f"{sources[0].path} and {len(sources) - 1} more"

    def _validate(self, parser: RowParser, found: int) -> np.ndarray:
        """The bad rows among all that were found, int64 in order, if they are to be left out; else DataError."""
        cfg, key = self.cfg, parser.verdict_key()
        spans = self._data.spans(found)
        verdicts = [
            judge(source, len(span), key, cfg.validate, cores(), self.ctx.node)
            for source, span in zip(self._data.sources, spans, strict=True)
        ]
        starts = self._data.starts()
        verdicts = [replace(v, bad=v.bad[v.bad + s >= cfg.skip]) for v, s in zip(verdicts, starts, strict=True)]
        bad = sum(len(v.bad) for v in verdicts)
        if bad and cfg.on_bad_row == "stop":
            of = f"{sum(v.checked for v in verdicts)} rows of {self._names()}"
            raise bad_rows.refused(self._complaints(verdicts, SHOWN), bad, of)
        if bad:
            log.warning("%d rows are left out: see %s", bad, self.ctx.run_dir / LIST)
            self._note(self._complaints(verdicts, bad))
        if cfg.validate == "full":
            for source in self._data.sources:
                source.trust()
        return np.concatenate([v.bad + start for v, start in zip(verdicts, starts, strict=True)])

    def _complaints(self, verdicts: Sequence[Verdict], most: int) -> list[Complaint]:
        """Of the first `most` bad rows."""
        out: list[Complaint] = []
        for source, verdict in zip(self._data.sources, verdicts, strict=True):
            out += bad_rows.complaints(source, verdict.bad[: most - len(out)].tolist())
        return out

    def _order(self) -> Order:
        node, seed = self.ctx.node, self.ctx.seed
        return Order(self._rows, (lambda epoch: int(seed(node, epoch, 0))) if self.cfg.shuffle else None)

    def _usable(self, parser: RowParser, bad: np.ndarray, found: int) -> Callable[[np.ndarray], np.ndarray] | None:
        """Which rows, of those that the loader walks over, can be used; None: all. DataError if too few are."""
        cfg = self.cfg
        bad = bad[bad >= cfg.skip]
        if len(bad) and self._rows - len(bad) < max(cfg.batch_size * cfg.shards, 1):
            raise self._too_few(cfg.batch_size * cfg.shards)
        if cfg.max_prompt_tokens:
            self._lengths = self._count_tokens(parser, found)
        if not len(bad) and self._lengths is None:
            return None
        return lambda rows: self._is_usable(rows + cfg.skip, bad)

    def _count_tokens(self, parser: RowParser, found: int) -> Lengths:
        from stages.loader.lengths import Lengths  # brings in what knows tokenizers

        cfg, where = self.cfg, f"{self.ctx.node}.max_prompt_tokens"
        of = self._data, self._model, parser.columns_key(), cfg.max_prompt_tokens
        lengths = Lengths(*of, rows=range(cfg.skip, found), index_dir=cfg.index_dir, where=where)
        try:
            lengths.start(self.ctx.node, self.ctx.run_dir, cores())
        except BaseException:
            lengths.close()
            raise
        return lengths

    def _too_few(self, wanted: int) -> DataError:
        """That an epoch has no batch of rows that can be used."""
        if self._lengths is not None and not self._lengths.some_fit():
            return self._lengths.nothing_fits()
        node, cfg = self.ctx.node, self.cfg
        why = f"{node}.on_bad_row is {cfg.on_bad_row}: see {self.ctx.run_dir / LIST}"
        why += f", {node}.max_prompt_tokens is {cfg.max_prompt_tokens}" if cfg.max_prompt_tokens else ""
        what = f"of {self._rows} rows of {self._names()} fewer can be used than a batch has, {max(wanted, 1)}"
        return DataError(f"{what} ({why})")

    def _is_usable(self, rows: np.ndarray, bad: np.ndarray) -> np.ndarray:
        good = np.searchsorted(bad, rows, "left") == np.searchsorted(bad, rows, "right")  # `bad` is in order
        if self._lengths is not None and np.any(good):
            good[good] = self._lengths.fits(rows[good])
        return good

    def _whole_batch(self, usable: Callable[[np.ndarray], np.ndarray] | None) -> int:
        """Rows of a batch that is to hold all."""
        count = self._rows if usable is None else int(np.count_nonzero(usable(np.arange(self._rows))))
        if not count:
            raise self._too_few(1)
        return count

    # -- batches -----------------------------------------------------------------------------------------------

    def run(self) -> PromptBatch:
        started = time.perf_counter()
        prepared = self._prefetch.take() if self._prefetch else self._prepare()
        waited = time.perf_counter() - started
        self._data.check(prepared.rows)  # after they were read, so that nothing of a changed file goes on
        self._now = prepared.after
        if self.cfg.purpose == "train":
            self.ctx.meter.add("loader/rows_per_s", (len(prepared.batch), prepared.seconds), "ratio")
            self.ctx.meter.add("loader/wait_s", waited, "sum")
            if self._lengths is not None:
                self.ctx.meter.add("loader/too_long", prepared.too_long, "sum")
        return prepared.batch

    def _prepare(self) -> _Prepared:
        """The next batch. In the thread that prefetches, if there is one."""
        started = time.perf_counter()
        calls, of_all = self._ahead.calls, self._batch * self.cfg.shards
        rows, columns, position = self._gather(self._ahead.position, of_all)
        first = calls * of_all + self.cfg.shard * self._batch
        row_id = np.arange(first, first + self._batch, dtype=np.int64)
        prompt, ground_truth, data_source, extra = (_column(c) for c in zip(*columns, strict=True))
        batch = PromptBatch(
            step=calls + 1,
            row_id=row_id,
            group_id=row_id,
            purpose="eval" if self.cfg.purpose == "eval" else "train",
            group_size=1,
            sampling=Sampling(**asdict(self.cfg.sampling)),
            prompt=prompt,
            ground_truth=ground_truth,
            data_source=data_source,
            extra=extra,
        )
        too_long = self._too_long(self._ahead.position, position)
        self._ahead = _At(calls + 1, position)
        return _Prepared(batch, rows, self._ahead, time.perf_counter() - started, too_long)

    def _too_long(self, start: int, end: int) -> int:
        """Rows at these positions that were passed over for their length."""
        if self._lengths is None:
            return 0
        rows = self._walk.order.at(np.arange(start, end, dtype=np.int64)) + self.cfg.skip
        return int(np.count_nonzero(~self._lengths.fits(rows)))

    def _gather(self, start: int, count: int) -> tuple[np.ndarray, list[Row], int]:
        """This shard's part of the next `count` usable rows: numbers, columns, and the position after them all."""
        mine = slice(self.cfg.shard * self._batch, (self.cfg.shard + 1) * self._batch)
        if not self._all_known:
            return self._try_rows(start, count, mine)
        rows, positions = self._walk.take(start, count)
        rows = rows[mine] + self.cfg.skip
        columns = self._data.rows(rows)
        for row, found in zip(rows, columns, strict=True):
            if isinstance(found, BadRow):
                self._data.check(rows)  # if the file was changed, that is the reason to tell
                raise DataError(str(Complaint(self._data.place(int(row)), str(found))))
        return rows, cast("list[Row]", columns), int(positions[-1]) + 1

    def _try_rows(self, start: int, count: int, mine: slice) -> tuple[np.ndarray, list[Row], int]:
        """Bad rows are found out by reading: the next one takes the turn of each."""
        found: list[tuple[int, Row]] = []
        at = start
        while len(found) < count:
            rows, positions = self._walk.take(at, count - len(found))
            if positions[-1] >= self._walk.end(start):
                raise self._too_few(count)
            rows, at = rows + self.cfg.skip, int(positions[-1]) + 1
            for row, columns in zip(rows.tolist(), self._data.rows(rows), strict=True):
                if isinstance(columns, BadRow):
                    self._leave_out(row, columns)
                else:
                    found.append((row, columns))
        numbers, columns = zip(*found[mine], strict=True)
        return np.array(numbers), list(columns), at

    def _leave_out(self, row: int, why: BadRow) -> None:
        self._data.check(np.array([row]))
        if row not in self._left_out:
            self._left_out.add(row)
            self._note([Complaint(self._data.place(row), str(why))])

    def _note(self, found: Sequence[Complaint]) -> None:
        if self.cfg.shard == 0:  # of shards that find the same, one tells
            bad_rows.note(self.ctx.run_dir, self.ctx.node, found)

    # -- state -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self._now.calls, "position": self._now.position, **self._counted_in()}

    def _counted_in(self) -> dict[str, Any]:
        """What a position means: the same row only if all of this is the same."""
        content = b"".join(s.stamp.digest for s in self._data.sources)
        order = f"seed {self.ctx.seed(self.ctx.node, 0, 0)}" if self.cfg.shuffle else "that of the file"
        return {
            "rows": self._rows,
            "batch_size": self._batch,
            "shards": self.cfg.shards,
            "skip": self.cfg.skip,
            "max_prompt_tokens": self.cfg.max_prompt_tokens,
            "order": order,
            "content": xxhash.xxh3_128_hexdigest(content),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """ValueError if positions would mean other prompts now."""
        for name, now in self._counted_in().items():
            if state.get(name) != now:
                raise ValueError(f"cannot go on: {self.ctx.node} had {name} = {state.get(name)} and has {now} now")
        self._restart(_At(state["calls"], state["position"]))

    def _restart(self, at: _At) -> None:
        self._stop()
        self._now = self._ahead = at
        if self.cfg.prefetch and self.cfg.purpose == "train":
            self._prefetch = Prefetch(self._prepare, self.cfg.prefetch, f"{self.ctx.node} prefetch")

    def _stop(self) -> None:
        prefetch, self._prefetch = self._prefetch, None
        if prefetch:
            prefetch.close()

    def close(self) -> None:
        self._stop()
        lengths, self._lengths = self._lengths, None
        if lengths:
            lengths.close()
        data, self._data = self._data, Joined(())
        data.close()


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0))


def _column(rows: Iterable[bytes]) -> Ragged:
    rows = list(rows)
    return Ragged(np.frombuffer(b"".join(rows), np.uint8), offsets_of([len(r) for r in rows]))
