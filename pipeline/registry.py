"""Backends by role and name.

`@backend("rollout", "hf")` binds a class to the config dataclass that annotates the first parameter of its
constructor. That dataclass is the only home of defaults; it becomes the schema `schema/rollout/hf`, and the option
file `conf/rollout/hf.yaml` extends it. No import path stands in any YAML.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar, get_type_hints

from pipeline.errors import PlanError, Problem
from pipeline.stage import Part


@dataclass(frozen=True, slots=True)
class Entry:
    """One registered backend; `origin` is file:line of where that is said."""

    role: str
    name: str
    cls: type[Part]
    config: type
    origin: str

    def __str__(self) -> str:
        return f"{self.role}={self.name}"


@dataclass(frozen=True, slots=True)
class PartSpec:
    """How to build a part, here or in another process: class, config and the components it holds. Picklable."""

    key: str
    cls: type[Any]
    config: Any
    components: dict[str, PartSpec]

    def __str__(self) -> str:
        return f"{self.cls.role}={self.cls.backend}"

    def build(self) -> Any:
        return self.cls(self.config, **{name: c.build() for name, c in self.components.items()})

    def walk(self) -> Iterator[PartSpec]:
        """This spec and those of all it holds."""
        yield self
        for c in self.components.values():
            yield from c.walk()


class RegisteredTwice(ValueError):
    """Two backends want one name. The message names both files."""


P = TypeVar("P", bound=type[Part])

_entries: dict[tuple[str, str], Entry] = {}


def backend(role: str, name: str) -> Callable[[P], P]:
    """Register a class as backend `name` of `role`. TypeError or ValueError if its shape breaks the contract."""
    caller = sys._getframe(1)
    origin = f"{caller.f_code.co_filename}:{caller.f_lineno}"

    def bind(cls: P) -> P:
        if getattr(cls, "role", role) != role:
            raise TypeError(f"{cls.__name__} is registered as role '{role}' but extends role '{cls.role}'")
        entry = Entry(role, name, cls, _config_type(cls), origin)
        for other in _entries.values():
            same = str(other) == str(entry)
            if (same or other.config.__name__ == entry.config.__name__) and other.origin != origin:
                what = str(entry) if same else f"config class {entry.config.__name__}"
                raise RegisteredTwice(f"{what} is registered twice: {other.origin} and {origin}")
        cls.role, cls.backend = role, name
        _entries[role, name] = entry
        return cls

    return bind


def _config_type(cls: type[Part]) -> type:
    first = list(inspect.signature(cls.__init__).parameters)[1:2]
    config = get_type_hints(cls.__init__).get(*first) if first else None
    if not (isinstance(config, type) and dataclasses.is_dataclass(config)):
        raise TypeError(f"the first constructor parameter of {cls.__name__} must be annotated with its config class")
    return config


def entry_of(config: type | None) -> Entry | None:
    """The backend that a config dataclass belongs to."""
    return next((e for e in _entries.values() if e.config is config), None)


def entries(role: str | None = None) -> list[Entry]:
    """Registered backends, of one role or all, in order of role and name."""
    return [e for k, e in sorted(_entries.items()) if role in (None, k[0])]


def discover(package: str, where: str = "") -> None:
    """Import every module of a package, so that its backends register themselves.

    PlanError with the own error of each module that fails to import, never "not found". `where`: the config path
    that names the package; without one, a problem is told at the module.
    """
    problems: list[Problem] = []
    root = _load(package, where, problems)
    for info in pkgutil.walk_packages(getattr(root, "__path__", []), f"{package}.", onerror=lambda _: None):
        _load(info.name, where, problems)
    if problems:
        raise PlanError(problems)


def _load(name: str, where: str, problems: list[Problem]) -> Any:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as e:
        what = f"importing '{name}' failed: {type(e).__name__}: {e}"
        problems.append(Problem(where=where or name, what=what, hint=_import_hint(name, e)))
        return None


def _import_hint(name: str, error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name == name:
        looked = "the working directory, the folder beside --config-dir's, and PYTHONPATH"
        return f"there is no module of that name; looked in {looked}"
    if isinstance(error, RegisteredTwice):
        return "give one of them another name in its @backend(...), and its config class too; or leave one plug-in out"
    return f"its own error, to mend there: raised at {place_of(error)}"


def place_of(error: BaseException) -> str:
    """file:line where an error comes from: the innermost line that is not of Python itself or an installed package."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<")]
    installed = {sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")}
    own = [f for f in frames if not any(f.filename.startswith(folder) for folder in installed)]
    last = (own or frames)[-1]
    return f"{last.filename}:{last.lineno}"
