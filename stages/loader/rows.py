"""A line of JSON as the columns of a prompt, and every reason to refuse it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from stages.loader import FieldNames, LoaderConfig
from stages.loader.lines import Lines

SHOWN = 10
"""Bad rows that a message lists one by one."""

DEEPEST = 128
"""Objects and lists inside each other. The JSON writer and what walks over a row by recursion reach further."""


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
    """Turns lines into rows by a loader's settings; `where` is its config key, for messages."""

    def __init__(self, cfg: LoaderConfig, where: str):
        self.fields: FieldNames = cfg.fields
        self.chat, self.system_prompt, self.where = cfg.chat, cfg.system_prompt, where

    def __call__(self, line: bytes) -> Row:
        """BadRow if the line is not a usable row."""
        row = _object(line)
        return Row(
            orjson.dumps(self._prompt(row)),
            orjson.dumps(self._ground_truth(row, line)),
            self._data_source(row),
            orjson.dumps(self._extra(row, line)),
        )

    def _prompt(self, row: dict[str, Any]) -> Any:
        prompt = self._required(row, "prompt")
        if isinstance(prompt, str):
            if not prompt.strip():
                raise BadRow(f"the prompt (key '{self.fields.prompt}') is empty")
            if not (self.chat or self.system_prompt):
                return prompt
            prompt = [{"role": "user", "content": prompt}]
        else:
            _check_chat(prompt, self.fields.prompt)
        if not self.system_prompt:
            return prompt
        if prompt[0]["role"] == "system":
            raise BadRow(f"the chat has a system message of its own, and {self.where}.system_prompt sets another")
        return [{"role": "system", "content": self.system_prompt}, *prompt]

    def _ground_truth(self, row: dict[str, Any], line: bytes) -> Any:
        if not self.fields.ground_truth:
            return None
        value, mark = self._required(row, "ground_truth"), self.fields.ground_truth_after
        if not mark:
            _check_numbers(value, line)
            return value
        if not isinstance(value, str):
            raise BadRow(f"key '{self.fields.ground_truth}' must be text to look for '{mark}' in, not {_kind(value)}")
        _, found, answer = value.rpartition(mark)
        if not found or not answer.strip():
            raise BadRow(f"key '{self.fields.ground_truth}' has no answer after '{mark}'")
        return answer.strip()

    def _data_source(self, row: dict[str, Any]) -> bytes:
        value, _ = _look_up(row, self.fields.data_source)
        if not isinstance(value, str | None):
            raise BadRow(f"key '{self.fields.data_source}' must be text, not {_kind(value)}")
        return (value or "").encode()

    def _extra(self, row: dict[str, Any], line: bytes) -> dict[str, Any]:
        value, _ = _look_up(row, self.fields.extra)
        if not isinstance(value, dict | None):
            raise BadRow(f"key '{self.fields.extra}' must be an object, not {_kind(value)}")
        _check_numbers(value, line)
        return value or {}

    def _required(self, row: dict[str, Any], field: str) -> Any:
        key = getattr(self.fields, field)
        value, found = _look_up(row, key)
        if not found:
            setting = f"{self.where}.fields.{field}"
            raise BadRow(f"has no key '{key}' ({setting}); its keys are: {', '.join(map(repr, row)) or 'none'}")
        if value is None:
            raise BadRow(f"key '{key}' is null")
        return value


def _object(line: bytes) -> dict[str, Any]:
    """The JSON object of a line. Strict: UTF-8, no NaN, no lone surrogates, no key twice, no deep nesting."""
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as e:
        raise BadRow(_not_json(line, e)) from None
    if not isinstance(row, dict):
        raise BadRow(f"an object is needed, not {_kind(row)}")
    # Every key brings a colon. No colon more than there are keys left: no key was dropped, and none stood twice.
    # Colons inside strings may hide one, so such a line is read again, key by key, which takes three times as long.
    if line.count(b":") != _keys(row):
        json.loads(line, object_pairs_hook=_distinct)
    return row


def _not_json(line: bytes, error: orjson.JSONDecodeError) -> str:
    try:
        line.decode()
    except UnicodeDecodeError as e:
        return f"is not UTF-8: byte 0x{line[e.start]:02x} at byte {e.start + 1} of the line"
    if error.msg.startswith("depth limit exceeded"):  # the parser's own limit, far beyond ours
        return _TOO_DEEP
    return f"is not JSON: {error.msg} at character {error.pos + 1} of the line"


_TOO_DEEP = f"is nested too deeply: at most {DEEPEST} objects and lists may lie inside each other"


def _keys(value: Any, depth: int = 1) -> int:
    """Keys of all objects in an object or list."""
    if depth > DEEPEST:
        raise BadRow(_TOO_DEEP)
    if isinstance(value, dict):
        return len(value) + sum(_keys(v, depth + 1) for v in value.values() if isinstance(v, dict | list))
    return sum(_keys(v, depth + 1) for v in value if isinstance(v, dict | list))


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) < len(pairs):
        keys = [k for k, _ in pairs]
        raise BadRow(f"key '{next(k for k in out if keys.count(k) > 1)}' stands twice in one object")
    return out


def _look_up(row: dict[str, Any], path: str) -> tuple[Any, bool]:
    """Value and whether it is there. The path as one key comes before its parts as nested keys."""
    if path in row:
        return row[path], True
    value: Any = row
    for key in path.split("."):
        if not isinstance(value, dict) or key not in value:
            return None, False
        value = value[key]
    return value, True


def _check_chat(prompt: Any, key: str) -> None:
    if not isinstance(prompt, list):
        raise BadRow(f"the prompt (key '{key}') must be text or a list of chat messages, not {_kind(prompt)}")
    if not prompt:
        raise BadRow(f"the prompt (key '{key}') is a chat without messages")
    for i, message in enumerate(prompt):
        if not isinstance(message, dict):
            raise BadRow(f"message {i} of the chat must be an object, not {_kind(message)}")
        for part in ("role", "content"):
            value = message.get(part)
            if not isinstance(value, str) and not (part == "content" and message.get("tool_calls")):
                raise BadRow(f"message {i} of the chat needs a text '{part}', not {_kind(value)}")
    if not any((m.get("content") or "").strip() or m.get("tool_calls") for m in prompt):
        raise BadRow(f"the prompt (key '{key}') is a chat of empty messages")


def _check_numbers(value: Any, line: bytes) -> None:
    """The parser gives integers beyond 64 bits as the nearest float: an answer would change in silence."""
    if _has_large(value):
        json.loads(line, parse_int=_within_64_bits)


def _has_large(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_has_large(v) for v in value.values())
    if isinstance(value, list):
        return any(_has_large(v) for v in value)
    return isinstance(value, float) and abs(value) >= 2.0**63


def _within_64_bits(digits: str) -> int:
    value = int(digits) if len(digits) <= 20 else 2**64
    if not -(2**63) <= value < 2**64:
        raise BadRow("an integer is too large for 64 bits; write it as text")
    return value


def _kind(value: Any) -> str:
    names = {bool: "true or false", dict: "an object", list: "a list", str: "text", int: "a number", float: "a number"}
    return names.get(type(value), "null")


def read_rows(path: Path, data: Any, lines: Lines, parse: Callable[[bytes], Row]) -> Iterator[Row]:
    """Every row of `data[start:stop]`; after the last one DataError, if any was bad, with the first ten and the count.

    `data` gives bytes for a slice: `bytes` or `mmap`.
    """
    bad: list[str] = []
    count = 0
    for i, (start, stop, number) in enumerate(zip(lines.start, lines.stop, lines.number, strict=True)):
        try:
            yield parse(data[start:stop])
        except BadRow as e:
            count += 1
            if len(bad) < SHOWN:
                cut = i == len(lines) - 1 and not lines.whole and stop == len(data)
                hint = " (the file ends here without a newline: is it cut short?)" if cut else ""
                bad.append(f"  {path}:{number} (byte {start}): {e}{hint}")
    if count:
        shown = f"; the first {SHOWN}" if count > SHOWN else ""
        raise DataError(f"{count} of {len(lines)} rows of {path} cannot be used{shown}:\n" + "\n".join(bad))
