"""Values of secret variables of the environment, such as HF_TOKEN, stay out of files and off the terminal.

A variable is secret by its name, or because it is an address with a password in it. Where its value would be written,
`${oc.env:NAME}` stands instead: in `config.yaml` that is what a user would write, so the file can still be run.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote

LEAST = 8
"""Characters. Shorter values are words that stand in any text."""
_NAME = re.compile(
    r"(?<![A-Z])(KEY|PAT|PASS|PASSPHRASE|AUTH|CREDENTIAL)S?(?![A-Z])|TOKENS?(?![A-Z])|APIKEY|PASSWORD|PASSWD|SECRET|_PWD$",
    re.I,
)
_LOGIN = re.compile(r"://[^/?#\s]*:[^/?#\s]+@")
"""As in https://user:password@host."""

_known: dict[str, str] = {}
"""Text -> what stands instead, longest first. A value seen once is kept: a stage may unset the variable."""
_seen: dict[Any, Any] = {}
"""The environment that `_known` is made of. It is compared as it is: decoding it for each line would cost 0.2 ms."""


def _replacements() -> dict[str, str]:
    global _known, _seen
    if _seen != (raw := os.environ._data):  # pyright: ignore[reportAttributeAccessIssue]
        seen, found = raw.copy(), dict(_known)  # in one piece, whatever other threads do to it
        for name, value in ((os.fsdecode(n), os.fsdecode(v)) for n, v in seen.items()):
            if len(value) >= LEAST and (_NAME.search(name) or _LOGIN.search(value)) and not _place(value):
                for form in _forms(value):
                    found.setdefault(form, f"${{oc.env:{name}}}")
        _known = dict(sorted(found.items(), key=lambda item: -len(item[0])))
        _seen = seen  # last: another thread shall not take it for done
    return _known


def _place(value: str) -> bool:
    """Whether it is where a secret lies, as in KEY_DIR=/home/me; many a path in a message begins with it."""
    return value.startswith("/") and os.path.exists(value)


def _forms(value: str) -> Iterator[str]:
    """The ways to write it; without the line end of the file that it was read from, too."""
    for v in {value, stripped} if len(stripped := value.strip()) >= LEAST else {value}:
        yield from (quote(os.fsencode(v)), quote(os.fsencode(v), safe=""), repr(v)[1:-1], v)
        yield from (json.dumps(v, ensure_ascii=ascii)[1:-1] for ascii in (True, False))


def text(written: str) -> str:
    for secret, instead in _replacements().items():
        written = written.replace(secret, instead)
    return written


def structure(value: Any) -> Any:
    """The same with all texts in it redacted, keys too."""
    if isinstance(value, str):
        return text(value)
    if isinstance(value, Mapping):
        return {structure(k): structure(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [structure(v) for v in value]
    return value


class _Formatter(logging.Formatter):
    def __init__(self, inner: logging.Formatter):
        super().__init__()
        self.inner = inner

    def format(self, record: logging.LogRecord) -> str:
        return text(self.inner.format(record))


class _Stream:
    """A text stream that redacts what is written; everything else is the stream's own."""

    def __init__(self, inner: Any):
        self._inner = inner

    def write(self, written: str) -> int:
        self._inner.write(text(written))
        return len(written)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def guard_streams() -> None:
    """Standard output and error of this process, from now on; nothing changes where no variable is secret."""
    if _replacements():
        sys.stdout, sys.stderr = (s if isinstance(s, _Stream) else _Stream(s) for s in (sys.stdout, sys.stderr))


def guard_logs() -> None:
    """All handlers of the root logger, with what exceptions say."""
    for handler in logging.getLogger().handlers:
        if not isinstance(handler.formatter, _Formatter):
            handler.setFormatter(_Formatter(handler.formatter or logging.Formatter()))
