"""What a setting takes, in words, read from the dataclass that declares it."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from typing import Any, Union, get_args, get_origin, get_type_hints

from pipeline.errors import Problem, near

_WORDS: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "text", Any: "a value"}


@dataclass(frozen=True, slots=True)
class Slot:
    """A place for one value: its type, its default (MISSING if there is none) and what `setting(...)` says of it."""

    type: Any
    default: Any
    meta: Mapping[str, Any]

    @property
    def is_text(self) -> bool:
        """Of any type too, where `setting(text=True)` says so."""
        return _without_none(self.type)[0] is str or bool(self.meta.get("text"))

    @property
    def is_truth(self) -> bool:
        return _without_none(self.type)[0] is bool

    @property
    def is_number(self) -> bool:
        return _without_none(self.type)[0] in (int, float)

    @property
    def example(self) -> str:
        """The default as it is written on a command line; empty if there is none, or an empty one."""
        if self.default is MISSING or self.default == "":
            return ""
        return "null" if self.default is None else shown(self.default)

    def takes(self, value: Any) -> bool:
        """Whether the value is of the slot's type, as far as dicts, lists and enums decide that."""
        return _fits(value, self.type)


def find(schema: type, path: str) -> Slot | None:
    """The slot of a dotted path in a config dataclass; None if the schema has none."""
    name, _, rest = path.partition(".")
    declared = next((f for f in fields(schema) if f.name == name), None)
    if declared is None:
        return None
    kind, default = get_type_hints(schema)[name], declared.default
    if rest and is_dataclass(kind):
        return find(kind, rest)  # type: ignore[arg-type]
    for _ in rest.split(".") if rest else ():
        if kind is Any:
            break
        if get_origin(kind) not in (dict, list):
            return None
        kind, default = get_args(kind)[-1], MISSING
    return Slot(kind, default, declared.metadata)


def innermost(value: Any, slot: Slot) -> tuple[str, Any, Slot]:
    """Of a value that the slot does not take: the path inside it to what is wrong, that value, and its slot."""
    kind, _ = _without_none(slot.type)
    if get_origin(kind) in (dict, list) and isinstance(value, get_origin(kind)):
        inner = Slot(get_args(kind)[-1], MISSING, slot.meta)
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if not _fits(item, inner.type):
                path, item, at = innermost(item, inner)
                return f"{key}.{path}".rstrip("."), item, at
    return "", value, slot


def _fits(value: Any, kind: Any) -> bool:
    kind, optional = _without_none(kind)
    if value is None:
        return optional
    if get_origin(kind) is dict:
        return isinstance(value, dict) and all(_fits(v, get_args(kind)[1]) for v in value.values())
    if get_origin(kind) is list:
        return isinstance(value, list) and all(_fits(v, get_args(kind)[0]) for v in value)
    if _is_enum(kind):
        return isinstance(value, kind) or (isinstance(value, str) and value in kind.__members__)
    if kind in (int, float):
        return isinstance(value, (int, kind)) and not isinstance(value, bool)
    return not isinstance(value, (dict, list)) if kind in (str, bool) else True


def refusal(where: str, value: Any, slot: Slot) -> Problem:
    """The problem of a value that the slot does not take."""
    kind, _ = _without_none(slot.type)
    given = f"'{value}'" if isinstance(value, str) else shown(value)
    what = f"{given} is not allowed" if _is_enum(kind) else f"{given} is not {words(slot.type)}"
    return Problem(where=where, what=what, hint=_takes(where, shown(value), kind, slot))


def _takes(where: str, given: str, kind: Any, slot: Slot) -> str:
    if _is_enum(kind):
        return near(given, (m.name for m in kind))
    doc = f" ({slot.meta['doc']})" if slot.meta.get("doc") else ""
    spelt = " (yes, no, on and off too)" if kind is bool else ""
    limits = f" {bounds}" if (bounds := limits_of(slot.meta)) else ""
    such = f", such as {where}={slot.example}" if slot.example not in ("", "null") else ""
    if get_origin(kind) is list and given not in ("", "null") and given.isprintable() and given[0] not in "[{":
        such = f", such as {where}=[{given}]"
    return f"must be {words(slot.type)}{spelt}{limits}{doc}{such}"


def words(kind: Any) -> str:
    """A type in words: `a whole number or null`."""
    kind, optional = _without_none(kind)
    return _plain_words(kind) + (" or null" if optional else "")


def _plain_words(kind: Any) -> str:
    if _is_enum(kind):
        return "one of " + ", ".join(m.name for m in kind)
    if get_origin(kind) is list:
        return f"a list, each item {words(get_args(kind)[0])}"
    if get_origin(kind) is dict:
        return f"a section, each value {words(get_args(kind)[1])}"
    return "a section" if is_dataclass(kind) else _WORDS.get(kind, "a value")


def limits_of(meta: Mapping[str, Any]) -> str:
    """The range of a setting, as signs: `> 0 and <= 1`; empty if any number will do."""
    signs = {"above": ">", "min": ">=", "max": "<="}
    return " and ".join(f"{sign} {meta[name]}" for name, sign in signs.items() if meta.get(name) is not None)


def _without_none(kind: Any) -> tuple[Any, bool]:
    """`X | None` as (X, True)."""
    if get_origin(kind) in (Union, types.UnionType):
        others = [a for a in get_args(kind) if a is not type(None)]
        if len(others) == 1:
            return others[0], True
    return kind, False


def _is_enum(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Enum)


def shown(value: Any) -> str:
    """A plain value as it is written on a command line."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return value.name if isinstance(value, Enum) else str(value)
