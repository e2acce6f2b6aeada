"""A plan that is open and running: calls its nodes, times them, moves weights, evaluates, writes the metrics."""

from __future__ import annotations

import logging
import shutil
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from pipeline import progress
from pipeline.config import Device
from pipeline.context import Context
from pipeline.disk import ROOM, DiskError, room, write_whole, writing
from pipeline.errors import StageError
from pipeline.kept import keep
from pipeline.machine import cuda
from pipeline.metrics import METRICS, JsonLines, Meter, summarise
from pipeline.placement import place
from pipeline.plan import Plan, has_cuda
from pipeline.process import said
from pipeline.records import Rows, Snapshot
from pipeline.runner import Runner
from pipeline.stage import Stage
from pipeline.stopping import Stopping
from pipeline.tracker import Tracker
from pipeline.usage import Usage

log = logging.getLogger("headrace")


class Program:
    """Opens every stage of a plan, and closes every one that was opened, whatever happens.

    `with Program(plan, run_dir) as program: program.execute()`. Any exception of a stage becomes a StageError, that of
    a `close` too, unless there was another before. `stop` says when to end after the step under way. `step` is the
    last that was finished.
    """

    def __init__(self, plan: Plan, run_dir: Path, stop: Stopping | None = None):
        self.plan, self.graph, self.run_dir = plan, plan.graph, run_dir
        self.stop, self.step = stop or Stopping(), 0
        self.meter, self._usage = Meter(), Usage()
        self.stages: dict[str, Stage] = {}
        self.runner: Runner = plan.runner.build()
        self.tracker: Tracker = plan.tracker.build()
        self._closing = ExitStack()
        self._unclosed: list[StageError] = []
        self._version: int | None = None

    def __enter__(self) -> Program:
        run, seed = self.plan.root.run, self.plan.root.seed
        device = self._device = ("cuda" if has_cuda() else "cpu") if run.device is Device.auto else run.device.value
        with ExitStack() as closing:  # leaves what is open to __exit__ if all goes well, else closes it
            closing.callback(self._log_unclosed)
            self._metrics = JsonLines(self.run_dir / METRICS)
            closing.callback(self._metrics.close)
            closing.push(self._close_tracker)
            with self.blame("runner"):
                self._tell("start", self.plan, self.run_dir)  # before what takes long: it shows the plan
            for node, spec in self.plan.nodes.items():
                ctx = Context(
                    node=node, run_seed=seed, run_dir=self.run_dir, threads=run.cores, device=device, meter=self.meter
                )
                self.stages[node] = place(spec, self.plan.placement(node))
                closing.callback(self._close, node)
                with self.blame(node, 0, method="open"):
                    self.stages[node].open(ctx)
            self._closing = closing.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self._closing.__exit__(kind, error, trace)
        if kind is None and self._unclosed:
            raise self._unclosed[0]

    def _close(self, node: str) -> None:
        self.stop.closing()
        try:
            with self.blame(node, self.step, method="close"):
                self.stages[node].close()
        except StageError as e:  # the others must close too, and the first error is the one to report
            self._unclosed.append(e)

    def _log_unclosed(self) -> None:
        for e in self._unclosed:
            log.error("closing stage '%s' failed: %s\n%s", e.node, e.what, e.detail)

    # -- the run ---------------------------------------------------------------------------------------------

    def execute(self) -> None:
        """All steps, with evaluations before, during and after; then the export of what was learned, and advice.

        After a first signal it ends with the step under way, without an evaluation.
        """
        with self.blame("runner"):
            self._start()
            self._steps()
            self.stop.finishing("what was learned is saved")
            if not self.plan.root.run.only_steps:
                self._export()
            self._tell("finish", self._advice())

    def _close_tracker(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self._tell("close")
        except StageError as e:
            if kind is None:
                raise
            log.error("%s\n%s", e, e.detail)  # the first error is the one to report

    def _start(self) -> None:
        """Until the first step, a signal ends the run at once: there is nothing yet to be saved."""
        self.publish(0)
        self._finish_step(0, {}, {} if self.plan.root.run.only_steps else self.evaluate(0))

    def _steps(self) -> None:
        run, every = self.plan.root.run, self.plan.root.eval.every
        started = time.monotonic()
        self.stop.finishing("step 1")
        for step, records in self.runner.steps(self, first=1, count=run.steps):
            self.meter.add("time/step_s", time.monotonic() - started, "sum")
            if step in run.keep_records:
                keep(self.run_dir, step, records)
            due = not run.only_steps and (step == run.steps or (every and step % every == 0))
            self._finish_step(step, records, self.evaluate(step) if due and not self.stop.asked else {})
            if self.stop.asked:
                return
            self.stop.finishing(f"step {step + 1}")
            started = time.monotonic()

    def _export(self) -> None:
        """`final/`, in full or not at all."""
        self._metrics.write([])  # or stages would make a run directory that is gone anew
        final, part = self.run_dir / "final", self.run_dir / "final.part"
        try:
            for node, stage in self.stages.items():
                with self.blame(node, method="export"):
                    stage.export(str(part))
            if part.exists():
                with writing(final):
                    part.rename(final)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise

    def _advice(self) -> list[str]:
        """What the stages advise; if anything, also as lines of `advice.txt`."""
        lines: list[str] = []
        for node, stage in self.stages.items():
            with self.blame(node, method="advice"):
                lines += [f"{node}: {sentence}" for sentence in stage.advice()]
        if lines:
            write_whole(self.run_dir / "advice.txt", "".join(f"{line}\n" for line in lines))
        return lines

    def _tell(self, method: str, *news: Any) -> None:
        with self.blame("tracker", method=method):
            getattr(self.tracker, method)(*news)

    def _finish_step(self, step: int, records: Mapping[str, Rows], evaluated: Mapping[str, Rows]) -> None:
        self.meter.add("memory/peak_gb", self._usage.peak_gb(), "max")
        if self._device == "cuda" and (memory := cuda()):
            self.meter.add("gpu/memory_gb", (memory.total - memory.free) / 2**30, "last")
        measured = dict(sorted(summarise(self.meter.drain()).items()))
        metrics = {"step": step, "policy_version": self._version, **measured}
        self._metrics.write([metrics])
        self.step = step
        if evaluated:
            self._tell("evaluated", step, evaluated, metrics)
        if step:
            self._tell("stepped", step, records, metrics)

    # -- what a runner calls ---------------------------------------------------------------------------------

    def forward(self, node: str, step: int, **inputs: Any) -> Rows:
        with self.blame(node, step, inputs, "run"), self._timed(node):
            return self.stages[node].run(**inputs).in_order()

    def stream(self, node: str, step: int, **inputs: Any) -> Iterator[Rows]:
        """The parts of a forward, in any order. Timed without what its consumer does between two parts."""
        parts: Iterator[Rows] | None = None
        waiting = _row_ids(inputs)
        while True:
            with self.blame(node, step, waiting, "stream"), self._timed(node):
                parts = parts or self.stages[node].stream(**inputs)
                part = next(parts, None)
            if part is None:
                return
            given = set(part.row_id.tolist())
            waiting = [row for row in waiting if row not in given]
            yield part

    def learn(self, step: int, records: Mapping[str, Rows]) -> None:
        for node, feeds in self.graph.learn.items():
            inputs = {port: records[producer] for port, producer in feeds.items()}
            with self.blame(node, step, inputs, "learn"), self._timed(node):
                self.stages[node].learn(**inputs)

    def publish(self, step: int) -> None:
        """Weights from each learner to all its servers; one snapshot a learner."""
        snapshots: dict[str, Snapshot] = {}
        for server, learner in self.graph.publish.items():
            if learner not in snapshots:
                with self.blame(learner, step, method="publish"), self._timed("publish"):
                    snapshots[learner] = self.stages[learner].publish()
            with self.blame(server, step, method="receive"), self._timed("publish"):
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
        with self.blame(chain[0], step, method="state_dict"):
            state = self.stages[chain[0]].state_dict()
        for before, node in zip((None, *chain), chain, strict=False):
            inputs = {self.graph.eval_port[node]: records[before]} if before else {}
            with self.blame(node, step, inputs, "run"):
                records[node] = self.stages[node].run(**inputs).in_order()
        with self.blame(chain[0], step, method="load_state"):
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
    def blame(
        self,
        node: str,
        step: int | None = None,
        inputs: Mapping[str, Rows] | Sequence[int] = (),
        method: str = "",
    ) -> Iterator[None]:
        """Any exception inside becomes a StageError that names node, step (None: the last) and rows.

        With the name of a method, the node is shown to be at work. What ends the run from outside goes through.
        """
        step = self.step if step is None else step
        rows = _row_ids(inputs) if isinstance(inputs, Mapping) else inputs
        try:
            with progress.working(node, method, step, rows) if method else nullcontext():
                yield
        except (StageError, DiskError, KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as e:  # SystemExit too: a stage that leaves has broken
            what, detail = said(e), "".join(traceback.format_exception(e))
            if (isinstance(e, OSError) and e.errno in ROOM) or "No space left on device" in what:  # safetensors' own
                what += f" ({room(self.run_dir)}; hydra.run.dir says where a run writes)"
            raise StageError(node, step, what, rows, detail) from e


def _row_ids(inputs: Mapping[str, Rows]) -> list[int]:
    return next((r.row_id.tolist() for r in inputs.values()), [])
