"""Nodes of one step at the same time: rows flow on as soon as they are finished.

Each forward node has a thread. A producer's parts go to a queue for each consumer's port; a consumer joins
its ports by `row_id`, waits until it has its grain (`row`: any rows, `group`: whole groups, `batch`: all),
works, and passes its own part on. At the end of the step parts are put back in the producer's order, so the
records are those of `sync`.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.program import Program
from pipeline.records import Record, Rows
from pipeline.registry import backend
from pipeline.runner import Runner

_END = object()


@dataclass(slots=True, kw_only=True)
class OverlapRunnerConfig:
    """Nothing to set."""


@backend("runner", "overlap")
class OverlapRunner(Runner):
    """Streams rows between the nodes of a step. Learning waits for all of them: no row is ever stale."""

    def __init__(self, cfg: OverlapRunnerConfig):
        self.cfg = cfg

    def forward(self, program: Program, step: int) -> dict[str, Record]:
        return _Step(program, step).run()


class _Step:
    """The threads and queues of one step."""

    def __init__(self, program: Program, step: int):
        self.program, self.step, self.feeds = program, step, program.graph.forward
        self.queues: dict[tuple[str, str], queue.SimpleQueue[Any]] = {(n, p): queue.SimpleQueue() for n, feeds in self.feeds.items() for p in feeds}
        self.records: dict[str, Record] = {}
        self.error: BaseException | None = None
        self.failed = threading.Event()

    def run(self) -> dict[str, Record]:
        threads = [threading.Thread(target=self._work, args=(n,), name=f"node-{n}") for n in self.feeds]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        if self.error:
            raise self.error
        return {n: self.records[n] for n in self.feeds}

    def _work(self, node: str) -> None:
        parts: list[Record] = []
        try:
            for part in self._parts(node):
                if self.failed.is_set():
                    return
                parts.append(part)
                self._send(node, part)
            self.records[node] = parts[0] if len(parts) == 1 else self._in_order(node, parts)
        except BaseException as e:  # handed to the runner's own thread, which raises it
            if not self.failed.is_set():
                self.error = e
            self.failed.set()
        finally:
            self._send(node, _END)

    def _send(self, node: str, item: Any) -> None:
        for consumer, feeds in self.feeds.items():
            for port, producer in feeds.items():
                if producer == node:
                    self.queues[consumer, port].put(item)

    def _parts(self, node: str) -> Iterator[Record]:
        stage = self.program.stages[node]
        streams = "streaming" in self.program.plan.nodes[node].cls.provides
        grain = self.program.plan.nodes[node].cls.grain
        joined = _Join(list(self.feeds[node]), grain)
        del stage
        if not self.feeds[node]:
            yield self.program.forward(node, self.step)
            return
        waiting = set(self.feeds[node])
        for port, item in self._arrivals(node):
            if item is _END:
                waiting.discard(port)
            else:
                joined.add(port, item)
            if self.failed.is_set():
                return
            ready = joined.ready(complete=not waiting)
            if ready and streams:
                yield from self.program.stream(node, self.step, **ready)
            elif ready:
                yield self.program.forward(node, self.step, **ready)

    def _arrivals(self, node: str) -> Iterator[tuple[str, Any]]:
        """What comes in on the node's ports, until all have ended; ports are polled in turn."""
        open_ports = {p: self.queues[node, p] for p in self.feeds[node]}
        while open_ports:
            for port, q in list(open_ports.items()):
                try:
                    item = q.get(timeout=0.002 if len(open_ports) > 1 else None)
                except queue.Empty:
                    continue
                if item is _END:
                    del open_ports[port]
                yield port, item

    def _in_order(self, node: str, parts: list[Any]) -> Rows:
        whole = type(parts[0]).concat(parts)
        return whole.align(np.sort(whole.row_id))


class _Join:
    """Parts by port, given out when every port has the rows of a grain."""

    def __init__(self, ports: list[str], grain: str):
        self.grain = grain
        self.parts: dict[str, list[Any]] = {p: [] for p in ports}

    def add(self, port: str, part: Any) -> None:
        self.parts[port].append(part)

    def ready(self, complete: bool) -> dict[str, Any] | None:
        if not all(self.parts.values()):
            return None
        if self.grain == "batch" and not complete:
            return None
        have = {p: type(parts[0]).concat(parts) for p, parts in self.parts.items()}
        common = np.sort(np.array(sorted(set.intersection(*(set(r.row_id.tolist()) for r in have.values()))), np.int64))
        if self.grain == "group" and not complete:
            raise TypeError("grain 'group' needs the size of groups")
        if not len(common):
            return None
        out = {p: r.align(common) for p, r in have.items()}
        for p, r in have.items():
            rest = np.flatnonzero(~np.isin(r.row_id, common))
            self.parts[p] = [r.take(rest)] if len(rest) else []
        return out
