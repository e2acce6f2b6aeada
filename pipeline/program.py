"""A plan that is open and running: calls its nodes, times them, moves weights, evaluates, writes the metrics."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from pipeline.config import Device
from pipeline.context import Context
from pipeline.errors import StageError
from pipeline.metrics import JsonLines, Meter, peak_gb, summarise
from pipeline.placement import place
from pipeline.plan import Plan, has_cuda
from pipeline.records import Rows, Snapshot
from pipeline.runner import Runner
from pipeline.stage import Stage
from pipeline.tracker import Tracker

log = logging.getLogger("headrace")


class Program:
    """Opens every stage of a plan, and closes every one that was opened, whatever happens.

    `with Program(plan, run_dir) as program: program.execute()`. Any exception of a stage becomes a StageError.
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
        run, seed = self.plan.root.run, self.plan.root.seed
        device = ("cuda" if has_cuda() else "cpu") if run.device is Device.auto else run.device.value
        with ExitStack() as closing:  # leaves what is open to __exit__ if all goes well, else closes it
            self._metrics = JsonLines(self.run_dir / "metrics.jsonl")
            closing.callback(self._metrics.close)
            for node, spec in self.plan.nodes.items():
                ctx = Context(
                    node=node, run_seed=seed, run_dir=self.run_dir, threads=run.cores, device=device, meter=self.meter
                )
                self.stages[node] = place(spec, self.plan.placement(node))
                closing.callback(self._close, node)
                with self.blame(node, 0):
                    self.stages[node].open(ctx)
            self._closing = closing.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._closing.close()

    def _close(self, node: str) -> None:
        try:
            self.stages[node].close()
        except Exception:  # the others must close too, and the first error is the one to report
            log.exception("closing stage '%s' failed", node)

    # -- the run ---------------------------------------------------------------------------------------------

    def execute(self) -> None:
        """All steps, with evaluations before, during and after; then the export of what was learned, and advice."""
        run, every = self.plan.root.run, self.plan.root.eval.every
        try:
            self.tracker.start(self.plan, self.run_dir)
            self.publish(0)
            self._finish_step(0, {}, self.evaluate(0))
            started = time.monotonic()
            for step, records in self.runner.steps(self, first=1, count=run.steps):
                self.meter.add("time/step_s", time.monotonic() - started, "sum")
                due = step == run.steps or (every and step % every == 0)
                self._finish_step(step, records, self.evaluate(step) if due else {})
                started = time.monotonic()
            for node, stage in self.stages.items():
                with self.blame(node, run.steps):
                    stage.export(str(self.run_dir / "final"))
            self.tracker.finish(self._advice())
        finally:
            self.tracker.close()

    def _advice(self) -> list[str]:
        """What the stages advise; if anything, also as lines of `advice.txt`."""
        lines: list[str] = []
        for node, stage in self.stages.items():
            with self.blame(node, self.plan.root.run.steps):
                lines += [f"{node}: {sentence}" for sentence in stage.advice()]
        if lines:
            (self.run_dir / "advice.txt").write_text("".join(f"{line}\n" for line in lines), "utf-8")
        return lines

    def _finish_step(self, step: int, records: Mapping[str, Rows], evaluated: Mapping[str, Rows]) -> None:
        self.meter.add("memory/peak_gb", peak_gb(), "max")
        measured = dict(sorted(summarise(self.meter.drain()).items()))
        metrics = {"step": step, "policy_version": self._version, **measured}
        self._metrics.write([metrics])
        if evaluated:
            self.tracker.evaluated(step, evaluated, metrics)
        if step:
            self.tracker.stepped(step, records, metrics)

    # -- what a runner calls ---------------------------------------------------------------------------------

    def forward(self, node: str, step: int, **inputs: Any) -> Rows:
        with self.blame(node, step, inputs), self._timed(node):
            return self.stages[node].run(**inputs).in_order()

    def stream(self, node: str, step: int, **inputs: Any) -> Iterator[Rows]:
        """The parts of a forward, in any order. Timed without what its consumer does between two parts."""
        parts = self.stages[node].stream(**inputs)
        while True:
            with self.blame(node, step, inputs), self._timed(node):
                part = next(parts, None)
            if part is None:
                return
            yield part

    def learn(self, step: int, records: Mapping[str, Rows]) -> None:
        for node, feeds in self.graph.learn.items():
            inputs = {port: records[producer] for port, producer in feeds.items()}
            with self.blame(node, step, inputs), self._timed(node):
                self.stages[node].learn(**inputs)

    def publish(self, step: int) -> None:
        """Weights from each learner to all its servers; one snapshot a learner."""
        snapshots: dict[str, Snapshot] = {}
        for server, learner in self.graph.publish.items():
            if learner not in snapshots:
                with self.blame(learner, step), self._timed("publish"):
                    snapshots[learner] = self.stages[learner].publish()
            with self.blame(server, step), self._timed("publish"):
                self.stages[server].receive(snapshots[learner])
            self._version = snapshots[learner].version

    def evaluate(self, step: int) -> dict[str, Rows]:
        """The records of the evaluation chain; of what its stages measured, only `eval/*` is kept.

        The head of the chain (a loader) is put back to where it was, so each evaluation sees the same rows with
        the same ids and the same `step`, and so the same seeds: what differs is the policy alone.
        """
        chain = self.graph.evaluate
        if not chain:
            return {}
        training, started, records = self.meter.drain(), time.monotonic(), dict[str, Rows]()
        with self.blame(chain[0], step):
            state = self.stages[chain[0]].state_dict()
        for before, node in zip((None, *chain), chain, strict=False):
            inputs = {self.graph.eval_port[node]: records[before]} if before else {}
            with self.blame(node, step, inputs):
                records[node] = self.stages[node].run(**inputs).in_order()
        with self.blame(chain[0], step):
            self.stages[chain[0]].load_state_dict(state)
        kept = {n: s for n, s in self.meter.drain().items() if n.startswith("eval/")}
        self.meter.absorb(training | kept)
        self.meter.add("time/eval_s", time.monotonic() - started, "sum")
        return records

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.meter.add(f"time/{name}_s", time.monotonic() - started, "sum")

    @contextmanager
    def blame(self, node: str, step: int, inputs: Mapping[str, Rows] | None = None) -> Iterator[None]:
        """Any exception inside becomes a StageError that names node, step and rows."""
        try:
            yield
        except StageError:
            raise
        except Exception as e:
            rows = next((r.row_id.tolist() for r in (inputs or {}).values()), [])
            what, detail = f"{type(e).__name__}: {e}", "".join(traceback.format_exception(e))
            raise StageError(node, step, what, rows, detail) from e
