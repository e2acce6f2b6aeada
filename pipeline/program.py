"""A plan that is open and running: calls its nodes, times them, moves weights, evaluates, writes the metrics."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.context import Context
from pipeline.errors import StageError
from pipeline.metrics import JsonLines, Meter, summarise
from pipeline.placement import place
from pipeline.plan import Plan, has_cuda
from pipeline.records import Record, Rows, Snapshot
from pipeline.runner import Runner
from pipeline.stage import Stage
from pipeline.tracker import Tracker

log = logging.getLogger("headrace")


class Program:
    """Opens every stage of a plan, and closes every one that was opened, whatever happens.

    `with Program(plan, run_dir) as program: program.execute()`.
    """

    def __init__(self, plan: Plan, run_dir: Path):
        self.plan, self.graph, self.run_dir = plan, plan.graph, run_dir
        self.meter = Meter()
        self.stages: dict[str, Stage] = {}
        self.runner: Runner = plan.runner.build()
        self.tracker: Tracker = plan.tracker.build()
        self._closing = ExitStack()
        self._version: int | None = None

    def __enter__(self) -> Program:
        root = self.plan.root
        device = root.run.device if root.run.device != "auto" else ("cuda" if has_cuda() else "cpu")
        try:
            self._metrics = JsonLines(self.run_dir / "metrics.jsonl")
            self._closing.callback(self._metrics.close)
            for node, spec in self.plan.nodes.items():
                stage = place(spec, self.plan.placement(node))
                ctx = Context(node=node, run_seed=root.seed, run_dir=self.run_dir, threads=root.run.threads, device=device, meter=self.meter)
                self._closing.callback(self._close, node, stage)
                with self._blame(node, 0), self._timed(node):
                    stage.open(ctx)
                self.stages[node] = stage
            self.meter.drain()
        except BaseException:
            self._closing.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._closing.close()

    def _close(self, node: str, stage: Stage) -> None:
        try:
            stage.close()
        except Exception:  # the others must close too, and the first error is the one to report
            log.exception("closing stage '%s' failed", node)

    # -- the run ---------------------------------------------------------------------------------------------

    def execute(self) -> None:
        """All steps, with evaluations before, during and after, and the export of what was learned."""
        root = self.plan.root
        self.tracker.start(self.plan, self.run_dir)
        try:
            self.publish(0)
            self._finish_step(0, {}, evaluated=self.evaluate(0))
            started = time.monotonic()
            for step, records in self.runner.steps(self, first=1, count=root.run.steps):
                last = step == root.run.steps
                due = last or bool(root.eval.every and step % root.eval.every == 0)
                self.meter.add("time/step_s", time.monotonic() - started, "sum")
                self._finish_step(step, records, evaluated=self.evaluate(step) if due else None)
                started = time.monotonic()
            for stage in self.stages.values():
                stage.export(str(self.run_dir / "final"))
            self.tracker.finish()
        finally:
            self.tracker.close()

    def _finish_step(self, step: int, records: Mapping[str, Record], evaluated: Mapping[str, Record] | None) -> None:
        metrics = {"step": step, "policy_version": self._version, **dict(sorted(summarise(self.meter.drain()).items()))}
        self._metrics.write([metrics])
        if evaluated:
            self.tracker.evaluated(step, evaluated, metrics)
        if step:
            self.tracker.stepped(step, records, metrics)

    # -- what a runner calls ---------------------------------------------------------------------------------

    def inputs(self, node: str, records: Mapping[str, Record]) -> dict[str, Any]:
        return {port: records[producer] for port, producer in self.graph.forward[node].items()}

    def forward(self, node: str, step: int, **inputs: Any) -> Any:
        with self._blame(node, step, inputs), self._timed(node):
            return self.stages[node].run(**inputs)

    def stream(self, node: str, step: int, **inputs: Any) -> Iterator[Rows]:
        """The stage's own time, without the time its consumer takes between two parts."""
        parts = self.stages[node].stream(**inputs)
        while True:
            with self._blame(node, step, inputs), self._timed(node):
                part = next(parts, None)
            if part is None:
                return
            yield part

    def learn(self, step: int, records: Mapping[str, Record]) -> None:
        for node, feeds in self.graph.learn.items():
            inputs = {port: records[producer] for port, producer in feeds.items()}
            with self._blame(node, step, inputs), self._timed(node):
                self.stages[node].learn(**inputs)

    def publish(self, step: int) -> None:
        """Weights from each learner to all its servers; one snapshot a learner."""
        snapshots: dict[str, Snapshot] = {}
        for server, learner in self.graph.publish.items():
            with self._blame(learner, step), self._timed("publish"):
                snapshot = snapshots.get(learner) or self.stages[learner].publish()
            with self._blame(server, step), self._timed("publish"):
                self.stages[server].receive(snapshot)
            snapshots[learner] = snapshot
            self._version = snapshot.version

    def evaluate(self, step: int) -> dict[str, Record]:
        """The records of the evaluation chain; of what its stages measured, only `eval/*` is kept."""
        training = self.meter.drain()
        records: dict[str, Record] = {}
        before: Record | None = None
        started = time.monotonic()
        for node in self.graph.evaluate:
            inputs = {} if before is None else {self.graph.eval_port[node]: before}
            with self._blame(node, step, inputs):
                before = self.stages[node].run(**inputs)
            if isinstance(before, Rows):
                before = replace(before, step=step)
            records[node] = before
        kept = {n: s for n, s in self.meter.drain().items() if n.startswith("eval/")}
        self.meter.absorb(training | kept)
        if records:
            self.meter.add("time/eval_s", time.monotonic() - started, "sum")
        return records

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.meter.add(f"time/{name}_s", time.monotonic() - started, "sum")

    @contextmanager
    def _blame(self, node: str, step: int, inputs: Mapping[str, Any] | None = None) -> Iterator[None]:
        """Any exception inside becomes a StageError that names node, step and rows."""
        try:
            yield
        except StageError:
            raise
        except Exception as e:
            rows = next((r.row_id.tolist() for r in (inputs or {}).values() if isinstance(r, Rows)), [])
            raise StageError(node, step, f"{type(e).__name__}: {e}", rows=rows, detail="".join(traceback.format_exception(e))) from e
