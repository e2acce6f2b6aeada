"""The contract of a stage, and of the components that stages hold.

A backend is a `Part`: a node of the graph (`Stage`) or a component that a node names as a typed constructor
parameter (`Component`). `__init__` is cheap and pure, so that a plan can build every part without loading
anything; `open(ctx)` loads; `close()` always runs, also after a failed `open`.

The methods of a stage are its nodes, and their typed signatures are the only declaration of ports:

- `run(**records) -> Rows`      the forward phase; weights do not change.
- `learn(**records) -> None`    the update phase, after all forwards of a step, in the order of the YAML.
- `stream(**records)`           yields parts of what `run` would return, as rows finish (capability `streaming`).
- `publish() -> Snapshot`, `receive(snapshot)`   weights on their way from learner to server. `receive`
                                returns only when every later row is made with the new weights.

A parameter with a default is an optional port. Rows come in ascending order of `row_id`; inputs are not written
to. Numbers a stage measures go to `ctx.meter`: a sample for each row, not their mean, so that a step may be cut.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args, get_type_hints

from pipeline.errors import Problem
from pipeline.records import Rows, Snapshot

if TYPE_CHECKING:
    from pipeline.context import Context
    from pipeline.plan import Facts

Grain = Literal["row", "group", "batch"]


def setting(
    default: Any = MISSING,
    *,
    doc: str,
    min: float | None = None,
    max: float | None = None,
    above: float | None = None,
    text: bool = False,
) -> Any:
    """A field of a config dataclass: its default, what it means (with unit), and the range that is allowed.

    `min` and `max` are inclusive, `above` is exclusive; numbers are finite. `text`: of a setting that takes more than
    text (a list, say), that a single value is text however it looks: a file may be named `1e3`. A list or dict default
    is copied for each instance; a dataclass stands for one made of its own defaults.
    """
    meta = {"doc": doc, "min": min, "max": max, "above": above, "text": text}
    if isinstance(default, (list, dict)):
        return field(default_factory=default.copy, metadata=meta)
    if isinstance(default, type):
        return field(default_factory=default, metadata=meta)
    return field(default=default, metadata=meta)


class Part:
    """What nodes and components have in common."""

    role: ClassVar[str]
    backend: ClassVar[str]
    """Filled by the registry."""
    provides: ClassVar[frozenset[str]] = frozenset()
    """Capabilities this part offers to the part that holds it or that it holds."""
    needs: ClassVar[frozenset[str]] = frozenset()
    """Capabilities that a node's components (or, for a component, the node that holds it) must provide."""
    requires: ClassVar[tuple[str, ...]] = ()
    """Python packages and devices that an execution needs: `("torch", "device:cuda")`."""

    def facts(self) -> Mapping[str, Any]:
        """What others may want to know at plan time, under plain names: `{"samples_per_prompt": 8}`."""
        return {}

    def check(self, facts: Facts) -> Iterable[Problem]:
        """Everything that is wrong with this part's settings given the rest; cheap, nothing heavy imported."""
        return ()

    def sizes(self, facts: Facts) -> Mapping[str, int | str]:
        """What follows from the settings of all, for the reader of a plan: `{"rows a step": 512}`. Only what is known;
        a bound is a text: `"at most 4,096"`."""
        return {}

    def memory(self, facts: Facts) -> Mapping[str, int]:
        """Bytes that this part holds on its device (`facts.device`) when it holds most, by what they are for.

        `weights`, `gradients` and `optimizer` are what is held from the first step to the end, whatever the data: a
        run that has no room for them is refused. Other names (`kv_cache`, `activations`, ...) are estimates. A name
        that begins with `host/` is of the host's memory, wherever the device is. The docstring gives the formula.
        """
        return {}


class Component(Part):
    """Held by a node; built once for each holder, wherever the node is placed."""


class Stage(Part):
    """A node of the graph."""

    grain: ClassVar[Grain] = "batch"
    """The smallest part of a batch that `run` may be given: any rows, whole groups, or all of it."""
    ctx: Context

    def open(self, ctx: Context) -> None:
        """Load what the stage needs. Subclasses call `super().open(ctx)` first."""
        self.ctx = ctx

    def close(self) -> None:
        """Give everything back; safe to call twice and after a failed `open`."""

    def state_dict(self) -> dict[str, Any]:
        """All that changes from step to step and is not derived from the step's number; taken at learn barriers."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            raise ValueError(f"{type(self).__name__} keeps no state, but was given {sorted(state)}")

    def run(self, *args: Any, **records: Any) -> Rows:
        raise TypeError(f"{type(self).__name__} takes no part in the forward phase")

    def learn(self, *args: Any, **records: Any) -> None:
        raise TypeError(f"{type(self).__name__} does not learn")

    def stream(self, *args: Any, **records: Any) -> Iterator[Rows]:
        """Parts of what `run` returns, each with whole rows; together all rows, in any order."""
        yield self.run(*args, **records)

    def publish(self) -> Snapshot:
        raise TypeError(f"{type(self).__name__} has no weights to publish")

    def receive(self, snapshot: Snapshot) -> None:
        raise TypeError(f"{type(self).__name__} takes no weights")

    def export(self, folder: str) -> None:
        """Write what a user keeps of this stage into `folder` at the end of a run; most have nothing."""

    def advice(self) -> list[str]:
        """What a user should set otherwise next time, seen from this run, a sentence each; asked for at a good end."""
        return []


@dataclass(frozen=True, slots=True)
class Port:
    """An input of a stage's method, read from its signature."""

    type: type[Rows]
    optional: bool


@dataclass(frozen=True, slots=True)
class Ports:
    """Inputs by name and output of one method of a stage class; `output` is None where nothing is returned."""

    inputs: dict[str, Port]
    output: type[Rows] | None


def has(cls: type[Stage], method: str) -> bool:
    """Whether the class (or its role) defines this method itself."""
    return getattr(cls, method) is not getattr(Stage, method)


@cache
def ports(cls: type[Stage], method: Literal["run", "learn"]) -> Ports:
    """TypeError says which annotation is missing or not a record of rows."""
    function = getattr(cls, method)
    hints = get_type_hints(function)
    inputs: dict[str, Port] = {}
    for p in list(inspect.signature(function).parameters.values())[1:]:
        kind = _rows_type(hints.get(p.name))
        if kind is None or p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL):
            where = f"{cls.__module__}.{cls.__name__}.{method}"
            raise TypeError(f"{where}: parameter '{p.name}' needs a record type (a subclass of Rows) as annotation")
        inputs[p.name] = Port(kind, p.default is not p.empty)
    return Ports(inputs, _rows_type(hints.get("return")))


def _rows_type(hint: Any) -> type[Rows] | None:
    """The record type in `X` or `X | None`."""
    kinds = [k for k in get_args(hint) or (hint,) if isinstance(k, type) and issubclass(k, Rows)]
    return kinds[0] if len(kinds) == 1 else None


def component_types(cls: type[Part]) -> dict[str, type[Component]]:
    """Constructor parameters that are components, by name: the name is the config key, the type is the role."""
    hints = get_type_hints(cls.__init__)
    return {n: t for n, t in hints.items() if isinstance(t, type) and issubclass(t, Component)}
