"""Overrides of the command line one by one: what each says, and how a value must be written to be read.

Hydra's grammar takes `= , { } [ ] ( ) # ~ ' "` and newlines as its own outside quotes, and says so in the words of a
parser. Here such a value is answered with the override as it should have been typed into a shell.
"""

from __future__ import annotations

import re
import shlex
import unicodedata
from collections.abc import Sequence
from typing import Any

from antlr4 import CommonTokenStream, InputStream
from hydra.core.override_parser.overrides_parser import OverridesParser, create_functions
from hydra.core.override_parser.overrides_visitor import HydraOverrideVisitor
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException
from hydra.grammar.gen.OverrideLexer import OverrideLexer
from hydra.grammar.gen.OverrideParser import OverrideParser

from pipeline.errors import Problem

_KEY = re.compile(r"[\w$./@-]+")
_LONGEST = 200
"""Characters of a config path; Hydra looks for a folder of that name, and file systems have a limit."""


def parse(texts: Sequence[str]) -> tuple[list[Override], list[Problem]]:
    """Those that can be read, and a problem for each that cannot. Of several values for one key none is one."""
    parsed: list[Override] = []
    problems: list[Problem] = []
    for text in texts:
        override = _parse(text)
        if override is None:
            problems.append(_unreadable(text))
        elif override.is_sweep_override():
            problems.append(_several(text))
        else:
            parsed.append(override)
    return parsed, problems


def _parse(text: str) -> Override | None:
    try:
        override = OverridesParser.create().parse_override(text)
    except (HydraException, ValueError):  # ValueError: a number of more digits than Python reads
        return None
    key = override.key_or_group
    return override if key and len(key) <= _LONGEST else None


def is_readable(text: str) -> bool:
    """Whether the text follows Hydra's grammar; it may be a sweep."""
    return _parse(text) is not None


def key_of(text: str) -> str:
    """The config path that an override names, whether it can be read or not."""
    return text.partition("=")[0].strip().lstrip("+~")


def written(override: Override) -> str:
    """The value as it stands on the command line."""
    return (override.input_line or "").partition("=")[2].strip()


class _AsWritten(HydraOverrideVisitor):
    """Gives numbers and truth values as the characters that they are written with."""

    def visitPrimitive(self, ctx: OverrideParser.PrimitiveContext) -> Any:
        made = super().visitPrimitive(ctx)
        return ctx.getText() if isinstance(made, (int, float)) else made


def as_written(override: Override) -> Any:
    """The value, in which text stands for each number and truth value: `[1e3, yes]` holds '1e3'."""
    tokens = CommonTokenStream(OverrideLexer(InputStream(override.input_line or "")))
    read: Any = _AsWritten(create_functions()).visit(OverrideParser(tokens).override())
    return read.value()


def quoted(key: str, value: str) -> str:
    """The override that sets this very text, ready for a shell."""
    return shell(f"{key}={QuotedString(value, Quote.double).with_quotes()}")


def shell(text: str) -> str:
    """The text as one word of a POSIX shell; of bash if it holds control characters."""
    if text.isprintable():
        return shlex.quote(text)
    escaped = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text.replace("\\", r"\\"))
    return "$'" + escaped.replace("'", r"\'") + "'"


def _unreadable(text: str) -> Problem:
    head, equals, value = text.partition("=")
    key = key_of(text)
    if not _KEY.fullmatch(key) or (equals and _parse(f"key={value}")):
        return _no_path(text, head)
    if not equals:
        hint = f"write {key}=VALUE; '~{key}' would remove it, and a flag begins with '-'"
        return Problem(where=key, what="has no value: an override is PATH=VALUE", hint=hint)
    why = f"{_listed(special)} must stand in quotes" if (special := _special(value)) else "its quotes do not match"
    why = "it has too many digits" if value.isdigit() else why
    hint = f"for this very text: {quoted(head.strip(), value)}"
    if value[:1] in ("[", "{"):
        form = f"{key}=[a,b]" if value[0] == "[" else f"{key}={{a:1,b:2}}"
        hint = f"a {'list' if value[0] == '[' else 'section'} is written {shell(form)}; {hint}"
    return Problem(where=key, what=f"the value {_short(repr(value))} cannot be read: {why}", hint=hint)


def _no_path(text: str, head: str) -> Problem:
    """What stands before the '=' is what cannot be read; a letter of another alphabet may look like one of ours."""
    key = head.strip().lstrip("+~")
    odd = {c: unicodedata.name(c, "no character with a name") for c in key if not c.isascii()}
    why = [f"{c!r} is {name}" for c, name in odd.items()]
    why += [f"it is longer than {_LONGEST} characters"] if len(key) > _LONGEST else []
    why += ["there is a space beside it"] if key and head != head.strip() else []
    what = f"is no override: {_short(repr(key)) if key else 'nothing'} is no config path"
    hint = "an override is PATH=VALUE, such as rollout.n=4; an item of a list is PATH.0=VALUE"
    return Problem(where=_short(text) or "''", what=f"{what}{': ' if why else ''}{', '.join(why)}", hint=hint)


def _several(text: str) -> Problem:
    key, value = text.partition("=")[0].strip(), text.partition("=")[2]
    what = f"{_short(repr(value))} are several values, which only a sweep can have"
    hint = f"a sweep needs the flag -m; a list is {shell(f'{key}=[{value}]')}, one text {quoted(key, value)}"
    return Problem(where=key.lstrip("+~"), what=what, hint=hint)


def _special(value: str) -> list[str]:
    """The characters that cannot stand inside a word of Hydra's grammar."""
    odd = dict.fromkeys(c for c in value if not (c.isascii() and c.isalnum()) and c not in " _-./:")
    return [c for c in odd if (made := _parse(f"k=a{c}b")) is None or made.is_sweep_override()]


def _listed(characters: Sequence[str]) -> str:
    return " ".join(repr(c) for c in characters)


def _short(text: str, most: int = 60) -> str:
    return text if len(text) <= most else f"{text[:most]}..."
