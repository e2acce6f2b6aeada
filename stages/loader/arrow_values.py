"""Values of Arrow types as JSON would give them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isfinite
from typing import TYPE_CHECKING, Any

import orjson

from stages.loader.rows import BadRow

if TYPE_CHECKING:
    import pyarrow as pa

Plain = Callable[[Any], Any]


def plain(kind: pa.DataType, column: str) -> Plain | None:
    """What turns a value that is not None, as Arrow gives it to Python, into one that JSON has; None if it is one.

    Dates and times become ISO 8601 text, decimals their digits, bytes UTF-8 text, maps objects, `arrow.json` what it
    says. The callable raises BadRow for a value without a form in JSON (NaN, bytes that are no text).
    """
    import pyarrow as pa

    is_ = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return _json(column) if kind.extension_name == "arrow.json" else plain(kind.storage_type, column)
    if is_.is_dictionary(kind):
        return plain(kind.value_type, column)
    if is_.is_nested(kind):
        return _nested(kind, column)
    if is_.is_floating(kind):
        return _finite(column)
    if is_.is_binary(kind) or is_.is_large_binary(kind) or is_.is_fixed_size_binary(kind) or is_.is_binary_view(kind):
        return _text(column)
    if is_.is_timestamp(kind) or is_.is_date(kind) or is_.is_time(kind):
        return lambda value: value.isoformat()
    return str if is_.is_decimal(kind) or is_.is_duration(kind) else None


def _nested(kind: Any, column: str) -> Plain | None:
    import pyarrow as pa

    if pa.types.is_struct(kind):
        return _struct({f.name: p for f in kind if (p := plain(f.type, column))})
    if pa.types.is_map(kind):
        return _map(plain(kind.item_type, column), column)
    item = plain(kind.value_type, column)
    return item and (lambda values: [v if v is None else item(v) for v in values])


def _struct(parts: Mapping[str, Plain]) -> Plain | None:
    def convert(value: dict[str, Any]) -> dict[str, Any]:
        for name, part in parts.items():
            if (inner := value.get(name)) is not None:  # not all parts need have been read
                value[name] = part(inner)
        return value

    return convert if parts else None


def _map(item: Plain | None, column: str) -> Plain:
    def convert(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
        out = {k: v if v is None or item is None else item(v) for k, v in pairs}
        if not all(isinstance(k, str) for k in out):
            raise BadRow(f"a map in column '{column}' has keys that are not text")
        if len(out) < len(pairs):
            raise BadRow(f"a map in column '{column}' has a key twice")
        return out

    return convert


def _finite(column: str) -> Plain:
    def convert(value: Any) -> float:
        if not isfinite(value):
            raise BadRow(f"column '{column}' holds {float(value)}, which JSON does not have")
        return float(value)

    return convert


def _text(column: str) -> Plain:
    def convert(value: bytes) -> str:
        try:
            return value.decode()
        except UnicodeDecodeError as e:
            raise BadRow(f"is not UTF-8: byte 0x{value[e.start]:02x} in column '{column}'") from None

    return convert


def _json(column: str) -> Plain:
    def convert(value: str) -> Any:
        try:
            return orjson.loads(value)
        except orjson.JSONDecodeError as e:
            raise BadRow(f"column '{column}' is not JSON: {e.msg} at character {e.pos + 1}") from None

    return convert
