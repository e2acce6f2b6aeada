"""Nodes of one step at the same time: rows flow on as soon as they are finished.

Each forward node has a thread and an inbox. What a producer makes goes to the inbox of each consumer, part by
part; a consumer joins its ports by `row_id`, waits until it has its grain (`row`: any rows, `group`: whole
groups, `batch`: all), works, and passes its own part on. At the end of the step the parts of a node are put
together in ascending `row_id`, so the records are those of `sync`.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from queue import SimpleQueue
from typing import TYPE_CHECKING

import numpy as np

from pipeline.records import Rows
from pipeline.registry import backend
from pipeline.runner import Runner
from pipeline.stage import Grain

if TYPE_CHECKING:
    from pipeline.program import Program


LINGER_S = 5.0
"""Seconds that other nodes may work on after one has failed, before their stages are closed."""


@dataclass(slots=True, kw_only=True)
class OverlapRunnerConfig:
    """Nothing to set."""


@backend("runner", "overlap")
class OverlapRunner(Runner):
    """Streams rows between the nodes of a step. Learning waits for all of them: no row is ever stale."""

    def __init__(self, cfg: OverlapRunnerConfig):
        self.cfg = cfg

    def forward(self, program: Program, step: int) -> dict[str, Rows]:
        return _Step(program, step).run()


class _Step:
    """The threads and inboxes of one step. An inbox gets (port, part), and (port, None) after the last part."""

    def __init__(self, program: Program, step: int):
        self.program, self.step, self.feeds = program, step, program.graph.forward
        self.inbox: dict[str, SimpleQueue[tuple[str, Rows | None]]] = {n: SimpleQueue() for n in self.feeds}
        self.made: dict[str, Rows] = {}
        self.errors: list[BaseException] = []
        self.stop = threading.Event()

    def run(self) -> dict[str, Rows]:
        # Daemons: if this thread is interrupted, the program can end although a stage is still at work.
        threads = [threading.Thread(target=self._work, args=(n,), name=f"node-{n}", daemon=True) for n in self.feeds]
        try:
            for t in threads:
                t.start()
            self._wait_for(threads)
        finally:
            self.stop.set()
        if self.errors:
            raise self.errors[0]
        return {n: self.made[n] for n in self.feeds}

    def _wait_for(self, threads: list[threading.Thread]) -> None:
        """Until all have ended; after an error only a little longer: a stage in a long call does not hold it up."""
        deadline = math.inf
        while alive := [t for t in threads if t.is_alive()]:
            if self.stop.is_set():
                deadline = min(deadline, time.monotonic() + LINGER_S)
            if time.monotonic() > deadline:
                return
            alive[0].join(0.1)

    def _work(self, node: str) -> None:
        """One node's thread. After an error anywhere, every node stops before it takes or passes on more rows."""
        parts: list[Rows] = []
        try:
            with self.program.blame(node, self.step):
                for part in self._parts(node):
                    if self.stop.is_set():
                        return
                    parts.append(part)
                    self._pass_on(node, part)
                self.made[node] = Rows.concat(parts).in_order()
        except BaseException as e:  # for the thread that runs the step, which raises it
            self.errors.append(e)
            self.stop.set()
        finally:
            self._pass_on(node, None)

    def _pass_on(self, node: str, part: Rows | None) -> None:
        for consumer, feeds in self.feeds.items():
            for port, producer in feeds.items():
                if producer == node:
                    self.inbox[consumer].put((port, part))

    def _parts(self, node: str) -> Iterator[Rows]:
        """What the node makes, as it becomes possible."""
        cls = self.program.plan.nodes[node].cls
        for inputs in self._inputs(node, cls.grain):
            if "streaming" in cls.provides:
                yield from self.program.stream(node, self.step, **inputs)
            else:
                yield self.program.forward(node, self.step, **inputs)

    def _inputs(self, node: str, grain: Grain) -> Iterator[dict[str, Rows]]:
        """The inputs of each call, until all producers have ended."""
        if not self.feeds[node]:
            yield {}
        join = Join(list(self.feeds[node]), grain)
        while join.open:
            started = time.monotonic()
            port, part = self.inbox[node].get()
            self.program.meter.add("time/wait_s", time.monotonic() - started, "sum")
            if self.stop.is_set():
                return
            if ready := join.add(port, part):
                yield ready


class Join:
    """Gathers parts by port, and gives out the rows that have come on every port."""

    def __init__(self, ports: list[str], grain: Grain):
        self.grain, self.open, self.given = grain, set(ports), False
        self._waiting: dict[str, list[Rows]] = {p: [] for p in ports}

    def add(self, port: str, part: Rows | None) -> dict[str, Rows] | None:
        """Take a part, or the end (None) of a port. What is now ready comes in ascending `row_id` on all ports.

        ValueError, at the end, if rows came on one port and not on another.
        """
        if part is None:
            self.open.discard(port)
        else:
            self._waiting[port].append(part)
        if self.open and (self.grain == "batch" or not all(self._waiting.values())):
            return None
        have = {p: Rows.concat(parts) for p, parts in self._waiting.items() if parts}
        if not have:
            return None  # all was given out before the end came
        ready = self._ready(have)
        if not self.open:
            self._all_joined(have, ready)
        if not len(ready) and (self.open or self.given):
            return None
        self.given = True
        self._waiting = {p: _without(have[p], ready) if p in have else [] for p in self._waiting}
        return {p: r.align(ready) for p, r in have.items()}

    def _ready(self, have: dict[str, Rows]) -> np.ndarray:
        """Ids of rows that are on every port, and, for grain `group`, of whole groups only."""
        if len(have) < len(self._waiting):
            return np.empty(0, np.int64)
        one, *others = have.values()
        joined = reduce(np.intersect1d, (r.row_id for r in others), np.sort(one.row_id))
        if self.grain != "group" or not self.open:
            return joined
        group, size = one.align(joined).group_id, max(r.group_size for r in have.values())
        ids, counts = np.unique(group, return_counts=True)
        return joined[np.isin(group, ids[counts == size])]

    def _all_joined(self, have: dict[str, Rows], ready: np.ndarray) -> None:
        for port, rows in have.items():
            if len(lost := np.setdiff1d(rows.row_id, ready)):
                others = ", ".join(f"'{p}'" for p in self._waiting if p != port)
                raise ValueError(f"rows {lost[:8].tolist()} came on port '{port}' but not on {others}")


def _without(rows: Rows, ids: np.ndarray) -> list[Rows]:
    rest = np.flatnonzero(~np.isin(rows.row_id, ids))
    return [rows.take(rest)] if len(rest) else []
