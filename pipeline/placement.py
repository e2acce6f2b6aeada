"""Where a node runs. `local` is the stage itself; `process` is a proxy with the same methods and numbers."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import Any

from pipeline.context import Context
from pipeline.metrics import Samples
from pipeline.process import Child
from pipeline.records import Rows, Snapshot
from pipeline.registry import PartSpec
from pipeline.stage import Stage

CLOSE_S = 30.0
"""Seconds that a stage may take to close before its process is killed."""


class Placement(Enum):
    local = "local"
    process = "process"


def place(spec: PartSpec, placement: Placement) -> Stage:
    return ProcessStage(spec) if placement is Placement.process else spec.build()


class ProcessStage(Stage):
    """A stage in a process of its own. Records cross by shared memory, metrics come back with each answer."""

    def __init__(self, spec: PartSpec):
        self._spec = spec
        self._child: Child | None = None

    def open(self, ctx: Context) -> None:
        super().open(ctx)
        log = ctx.run_dir / "run.log"
        self._child = Child(_Host, self._spec, ctx, name=self._spec.key, log=log, threads=ctx.threads)
        self._child.wait_ready()

    def close(self) -> None:
        child, self._child = self._child, None
        if child:
            child.close("close", CLOSE_S)

    def _opened(self) -> Child:
        if self._child is None:
            raise RuntimeError(f"stage '{self._spec.key}' is not open")
        return self._child

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        result, samples = self._opened().call("call", method, args, kwargs)
        self.ctx.meter.absorb(samples)
        return result

    def run(self, **records: Any) -> Rows:
        return self._call("run", **records)

    def learn(self, **records: Any) -> None:
        self._call("learn", **records)

    def stream(self, **records: Any) -> Iterator[Rows]:
        for part, samples in self._opened().stream("stream", records):
            self.ctx.meter.absorb(samples)
            if part is not None:
                yield part

    def publish(self) -> Snapshot:
        return self._call("publish")

    def receive(self, snapshot: Snapshot) -> None:
        self._call("receive", snapshot)

    def state_dict(self) -> dict[str, Any]:
        return self._call("state_dict")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._call("load_state_dict", state)

    def export(self, folder: str) -> None:
        self._call("export", folder)


class _Host:
    """In the child: the real stage."""

    def __init__(self, spec: PartSpec, ctx: Context):
        self._meter = ctx.meter
        self._stage: Stage = spec.build()
        try:
            self._stage.open(ctx)
        except BaseException:
            self._stage.close()
            raise

    def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Samples]:
        return getattr(self._stage, method)(*args, **kwargs), self._meter.drain()

    def stream(self, records: dict[str, Any]) -> Iterator[tuple[Rows | None, Samples]]:
        for part in self._stage.stream(**records):
            yield part, self._meter.drain()
        yield None, self._meter.drain()

    def close(self) -> None:
        self._stage.close()
