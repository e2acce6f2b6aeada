"""A row of data as the columns of a prompt, and every reason to refuse it.

`RowParser(cfg, where)` works in two steps, so that formats share the second: `parse(line)` makes an object of a
line of JSON, `columns(object)` makes a `Row` of it. Calling the parser does both. `verdict_key()` and
`columns_key()` name what decides which rows are bad, and what the rows hold.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from copy import copy
from dataclasses import asdict
from typing import Any, NamedTuple

import orjson
import xxhash

from stages.loader import FieldNames, LoaderConfig

VERSION = 2
"""Of the rules in this module. To be raised when another row becomes bad, or a row gives other columns."""

DEEPEST = 128
"""Objects and lists inside each other. The JSON writer and what walks over a row by recursion reach further."""

_BEYOND_64_BITS = 2.0**63
"""From here on a float may be an integer that the JSON reader could not hold."""


_to_json = orjson.dumps


class Row(NamedTuple):
    """The columns of one prompt, as bytes: JSON, JSON, UTF-8 text, JSON."""

    prompt: bytes
    ground_truth: bytes
    data_source: bytes
    extra: bytes


class BadRow(ValueError):
    """Why one row cannot be used. Never holds the row's content, which may be private."""


class DataError(ValueError):
    """The file cannot be trained on."""


class RowParser:
    """Turns rows of a file into columns by a loader's settings; `where` is its config key, for messages. Picklable."""

    def __init__(self, cfg: LoaderConfig, where: str):
        self.fields: FieldNames = cfg.fields
        self.chat, self.system_prompt, self.where = cfg.chat, cfg.system_prompt, where
        self._known_good = False
        f = self.fields
        paths = (f.prompt, f.ground_truth, f.data_source, f.extra)
        self._paths = [(path, path.split(".") if "." in path else None) for path in paths]

    def for_known_good(self) -> RowParser:
        """The same for rows that this parser has taken before, byte for byte: what takes long to find is not looked
        for again (keys that stand twice, integers beyond 64 bits, odd chats)."""
        quick = copy(self)
        quick._known_good = True
        return quick

    def __call__(self, line: bytes) -> Row:
        """BadRow if the line is not a usable row."""
        return self.columns(self.parse(line))

    def verdict_key(self) -> bytes:
        """16 bytes: differs where another row may be bad."""
        return _digest(VERSION, asdict(self.fields), bool(self.system_prompt))

    def columns_key(self) -> bytes:
        """16 bytes: differs where a row may hold something else."""
        return _digest(VERSION, asdict(self.fields), self.system_prompt, self.chat)

    def parse(self, line: bytes) -> dict[str, Any]:
        """The JSON object of a line. Strict: UTF-8, no NaN, no lone surrogates, no key twice, no deep nesting.

        An integer beyond 64 bits stays an integer, which the JSON writer then refuses.
        """
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError as e:
            raise BadRow(_not_json(line, e)) from None
        if type(row) is not dict:
            raise BadRow(f"an object is needed, not {_kind(row)}")
        if self._known_good:
            return row
        keys, large = _census(row)
        if not _surely_distinct(line, keys):
            json.loads(line, object_pairs_hook=_distinct)
        return json.loads(line) if large else row

    def columns(self, row: Mapping[str, Any]) -> Row:
        """Of an object that any format gave. BadRow if it lacks something, or holds what JSON cannot."""
        if self._known_good and not (self.system_prompt or self.chat or self.fields.ground_truth_after):
            return self._plain_columns(row)
        prompt, truth = self._prompt(row), self._ground_truth(row)
        source, extra = self._data_source(row), self._extra(row)
        try:
            return Row(_dumps(prompt), _dumps(truth), source, _dumps(extra) if extra else b"{}")
        except orjson.JSONEncodeError as e:
            raise BadRow(_not_writable(e)) from None

    def _plain_columns(self, row: Mapping[str, Any]) -> Row:
        """The same of a row that is known to be good, where nothing is made of its values."""
        get = row.get
        found = [get(path) if nested is None or path in row else _inside(row, nested) for path, nested in self._paths]
        prompt, truth, source, extra = found
        return Row(
            b"%b" % _to_json(prompt),
            b"%b" % _to_json(truth),
            source.encode() if source else b"",
            b"%b" % _to_json(extra) if extra else b"{}",
        )

    def _prompt(self, row: Mapping[str, Any]) -> Any:
        prompt = self._required(row, self.fields.prompt, "prompt")
        if isinstance(prompt, str):
            if not prompt or prompt.isspace():
                raise BadRow(f"the prompt (key '{self.fields.prompt}') is empty")
            if not (self.chat or self.system_prompt):
                return prompt
            prompt = [{"role": "user", "content": prompt}]
        elif not self._known_good:
            _check_chat(prompt, self.fields.prompt)
        if not self.system_prompt:
            return prompt
        if prompt[0]["role"] == "system":
            raise BadRow(f"the chat has a system message of its own, and {self.where}.system_prompt sets another")
        return [{"role": "system", "content": self.system_prompt}, *prompt]

    def _ground_truth(self, row: Mapping[str, Any]) -> Any:
        key, mark = self.fields.ground_truth, self.fields.ground_truth_after
        if not key:
            return None
        value = self._required(row, key, "ground_truth")
        if not mark:
            return value
        if not isinstance(value, str):
            raise BadRow(f"key '{key}' must be text to look for '{mark}' in, not {_kind(value)}")
        _, found, answer = value.rpartition(mark)
        if not found or not answer.strip():
            raise BadRow(f"key '{key}' has no answer after '{mark}'")
        return answer.strip()

    def _data_source(self, row: Mapping[str, Any]) -> bytes:
        value = _look_up(row, self.fields.data_source)
        if value is None or value is _MISSING:
            return b""
        if not isinstance(value, str):
            raise BadRow(f"key '{self.fields.data_source}' must be text, not {_kind(value)}")
        return value.encode()

    def _extra(self, row: Mapping[str, Any]) -> dict[str, Any] | None:
        value = _look_up(row, self.fields.extra)
        if value is None or value is _MISSING:
            return None
        if not isinstance(value, dict):
            raise BadRow(f"key '{self.fields.extra}' must be an object, not {_kind(value)}")
        return value

    def _required(self, row: Mapping[str, Any], key: str, field: str) -> Any:
        value = row.get(key)
        if value is not None:
            return value
        value = _look_up(row, key)
        if value is _MISSING:
            setting = f"{self.where}.fields.{field}"
            raise BadRow(f"has no key '{key}' ({setting}); its keys are: {_keys_of(row)}")
        if value is None:
            raise BadRow(f"key '{key}' is null")
        return value


def _dumps(value: Any) -> bytes:
    """JSON. A copy of its own size: what the writer returns holds 4 KiB, however short it is."""
    return b"%b" % _to_json(value)


_MISSING: Any = object()


def _digest(*values: Any) -> bytes:
    return xxhash.xxh3_128_digest(orjson.dumps(values, option=orjson.OPT_SORT_KEYS))


def _not_json(line: bytes, error: orjson.JSONDecodeError) -> str:
    try:
        line.decode()
    except UnicodeDecodeError as e:
        return f"is not UTF-8: byte 0x{line[e.start]:02x} at byte {e.start + 1} of the line"
    if error.msg.startswith("depth limit exceeded"):  # the parser's own limit, far beyond ours
        return _TOO_DEEP
    return f"is not JSON: {error.msg} at character {error.pos + 1} of the line"


_TOO_DEEP = f"is nested too deeply: at most {DEEPEST} objects and lists may lie inside each other"
_TOO_LARGE = "an integer is too large for 64 bits; write it as text"


def _not_writable(error: orjson.JSONEncodeError) -> str:
    return _TOO_LARGE if "64-bit" in str(error) else f"holds what JSON cannot: {error}"


def _census(row: dict[str, Any]) -> tuple[int, bool]:
    """How many keys all objects of a row have, and whether a number in it may be an integer beyond 64 bits."""
    keys, large, depth = 0, False, 0
    level: list[Any] = [row]
    while level:
        depth += 1
        if depth > DEEPEST:
            raise BadRow(_TOO_DEEP)
        below: list[Any] = []
        for value in level:
            if type(value) is dict:
                keys += len(value)
                value = value.values()
            for v in value:
                kind = type(v)
                if kind is str or kind is int:  # most are
                    continue
                if kind is dict or kind is list:
                    below.append(v)
                elif kind is float and not -_BEYOND_64_BITS < v < _BEYOND_64_BITS:
                    large = True
        level = below
    return keys, large


_SPACED_COLON = re.compile(rb'"[ \t\r\n]+:')


def _surely_distinct(line: bytes, keys: int) -> bool:
    """Whether no key can stand twice, of a line in whose objects `keys` keys are left.

    Every key brings a colon behind a quote, perhaps with spaces between. If there are no more of them than keys are
    left, none was dropped. A string may hold such colons too: then the line is read again, key by key.
    """
    return line.count(b":") == keys or (line.count(b'":') == keys and not _SPACED_COLON.search(line))


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) < len(pairs):
        keys = [k for k, _ in pairs]
        raise BadRow(f"key '{next(k for k in out if keys.count(k) > 1)}' stands twice in one object")
    return out


def _inside(row: Mapping[str, Any], keys: list[str]) -> Any:
    """The value that these nested keys lead to, or None."""
    value: Any = row
    for key in keys:
        if type(value) is not dict:
            return None
        value = value.get(key)
    return value


def _look_up(row: Mapping[str, Any], path: str) -> Any:
    """The value, or _MISSING. The path as one key comes before its parts as nested keys."""
    value: Any = row.get(path, _MISSING)
    if value is not _MISSING or "." not in path:
        return value
    value = row
    for key in path.split("."):
        if not isinstance(value, dict) or key not in value:
            return _MISSING
        value = value[key]
    return value


def _keys_of(row: Mapping[str, Any], most: int = 20, longest: int = 60) -> str:
    shown = [repr(str(k)[:longest]) for k in list(row)[:most]]
    more = f" and {len(row) - most} more" if len(row) > most else ""
    return ", ".join(shown) + more or "none"


def _check_chat(prompt: Any, key: str) -> None:
    if not isinstance(prompt, list):
        raise BadRow(f"the prompt (key '{key}') must be text or a list of chat messages, not {_kind(prompt)}")
    if not prompt:
        raise BadRow(f"the prompt (key '{key}') is a chat without messages")
    said = False
    for i, message in enumerate(prompt):
        if not isinstance(message, dict):
            raise BadRow(f"message {i} of the chat must be an object, not {_kind(message)}")
        role, content, calls = message.get("role"), message.get("content"), message.get("tool_calls")
        if not isinstance(role, str):
            raise BadRow(f"message {i} of the chat needs a text 'role', not {_kind(role)}")
        if not isinstance(content, str) and not calls:
            raise BadRow(f"message {i} of the chat needs a text 'content', not {_kind(content)}")
        said = said or bool(calls) or not (content == "" or content.isspace())  # type: ignore[union-attr]
    if not said:
        raise BadRow(f"the prompt (key '{key}') is a chat of empty messages")


def _kind(value: Any) -> str:
    names = {bool: "true or false", dict: "an object", list: "a list", str: "text", int: "a number", float: "a number"}
    return names.get(type(value), "null" if value is None else f"a {type(value).__name__}")
