"""Where a node runs. `local` is the stage itself; `process` is a proxy with the same methods and numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

from pipeline import progress
from pipeline.context import Context
from pipeline.metrics import Samples
from pipeline.process import Child
from pipeline.records import Packed, Rows, Snapshot, Unresolved
from pipeline.registry import PartSpec
from pipeline.stage import Stage

CLOSE_S = 30.0
"""Seconds that a stage may take to close before its process is killed."""


class Placement(Enum):
    local = "local"
    process = "process"


def place(spec: PartSpec, placement: Placement) -> Stage:
    return ProcessStage(spec) if placement is Placement.process else spec.build()


class _NotHere(LookupError):
    """The answer of the other process where a packed record names what it cannot find: the stage was not called."""


class ProcessStage(Stage):
    """A stage in a process of its own. Records cross by shared memory, metrics come back with each answer.

    A record may be packed: it names columns that both processes can find, instead of sending them. Where the other
    process does not find all of them, it says so before the stage is touched, and gets the whole record.
    """

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

    def run(self, **records: Rows) -> Rows:
        return self._with_records("run", records)

    def learn(self, **records: Rows) -> None:
        self._with_records("learn", records)

    def _with_records(self, method: str, records: Mapping[str, Rows]) -> Any:
        try:
            return self._call(method, **self._packed(records))
        except _NotHere:
            pass
        return self._call(method, **self._whole(records))

    def stream(self, **records: Rows) -> Iterator[Rows]:
        try:
            yield from self._stream(self._packed(records))
            return
        except _NotHere:  # it comes before the first part
            pass
        yield from self._stream(self._whole(records))

    def _stream(self, sent: Mapping[str, Packed]) -> Iterator[Rows]:
        for part, samples in self._opened().stream("stream", sent):
            self.ctx.meter.absorb(samples)
            if part is not None:
                yield part

    def _packed(self, records: Mapping[str, Rows]) -> Mapping[str, Packed]:
        return {name: r.pack(self.ctx) for name, r in records.items()}

    def _whole(self, records: Mapping[str, Rows]) -> Mapping[str, Packed]:
        self.ctx.meter.add(f"{self.ctx.node}/sent_again", sum(map(len, records.values())), "sum")
        return records

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

    def advice(self) -> list[str]:
        return self._call("advice")


class _Host:
    """In the child: the real stage."""

    def __init__(self, spec: PartSpec, ctx: Context):
        self._ctx, self._meter = ctx, ctx.meter
        progress.serve(ctx.node)
        self._stage: Stage = spec.build()
        try:
            self._stage.open(ctx)
        except BaseException:
            self._stage.close()
            raise

    def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Packed]) -> tuple[Any, Samples]:
        """`kwargs` are records."""
        return getattr(self._stage, method)(*args, **self._unpacked(kwargs)), self._meter.drain()

    def stream(self, packed: dict[str, Packed]) -> Iterator[tuple[Rows | None, Samples]]:
        for part in self._stage.stream(**self._unpacked(packed)):
            yield part, self._meter.drain()
        yield None, self._meter.drain()

    def _unpacked(self, packed: Mapping[str, Packed]) -> dict[str, Rows]:
        try:
            records = {name: p.unpack(self._ctx) for name, p in packed.items()}
        except Unresolved as e:
            raise _NotHere(*e.args) from e
        if named := sum(p.named for p in packed.values()):
            self._meter.add(f"{self._ctx.node}/by_reference", named, "sum")
        return records

    def close(self) -> None:
        self._stage.close()
