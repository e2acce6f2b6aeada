"""Any text can be given on the command line, and what cannot be read is answered with how it can."""

from __future__ import annotations

import shlex
import subprocess

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

from pipeline import quoting

ODD = [
    "a=b",
    "a,b",
    "{a}",
    "[a",
    "it's",
    'say "hi"',
    "a\nb\tc",
    "~/x",
    "a#b",
    "\\",
    'a\\"b',
    "x\\",
    "é ☃",
    "",
    "null",
    "on",
]
ODD += ["1e3", " lead", "%@*:", "$HOME", "`ls`", "a;b", "a\\nb", "\\'", "'\\''", "-x", "=", "\x01"]


def read_by_hydra(text: str) -> object:
    return OverridesParser.create().parse_override(text).value()


def test_what_is_shown_can_be_typed_into_a_shell() -> None:
    """bash takes the line apart, Hydra reads the override: the text comes out as it was."""
    words = " ".join(quoting.quoted("k.p", value) for value in ODD)
    given_to_program = subprocess.run(["bash", "-c", f"printf '%s\\0' {words}"], capture_output=True, check=True).stdout
    typed = given_to_program.decode().split("\0")[:-1]
    assert [read_by_hydra(text) for text in typed] == ODD


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_quotes_hold_any_text(value: str) -> None:
    text = quoting.quoted("k", value)
    if not text.startswith("$'"):  # which only bash reads: see above
        [text] = shlex.split(text)
        assert read_by_hydra(text) == value


@pytest.mark.parametrize("value", ["a=b", "{a", "it's", "a\nb", "~/x", "a#b", "a(b).c", "a!b", "é", "</s>"])
def test_what_cannot_be_read_is_told_by_its_characters(value: str) -> None:
    [problem] = quoting.parse([f"some.path={value}"])[1]
    odd = [c for c in value if not (c.isascii() and c.isalnum()) and c not in "./"]
    assert problem.where == "some.path"
    assert repr(odd[0]) in problem.what
    assert quoting.quoted("some.path", value) in problem.hint


def test_problems_do_not_keep_the_rest_from_being_read() -> None:
    parsed, problems = quoting.parse(["a=1", "b=c=d", "+e.f=[1,2]", "g", "h=1,2", "~i", "j=choice(1,2)", "=4"])
    assert [o.key_or_group for o in parsed] == ["a", "e.f", "i"]
    assert [p.where for p in problems] == ["b", "g", "h", "j", "=4"]


def test_plain_values_need_no_quotes() -> None:
    for value in ("a/b-c_d.e:f", "%", "@", "*", "a b", "$x", "on", "a|b+?"):
        parsed, problems = quoting.parse([f"k={value}"])
        assert not problems
        assert quoting.written(parsed[0]) == value
