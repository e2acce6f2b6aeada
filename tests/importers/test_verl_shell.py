"""Words of a script's command, read without running it: bash itself says what they are."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from importers.verl.shell import Unknown, commands

BASH = shutil.which("bash")
pytestmark = pytest.mark.skipif(BASH is None, reason="needs bash, to compare with")
ENVIRONMENT = {"HOME": "/home/ann", "SIZE": "4", "PWD": "/"}


def words(script: str) -> list[str | Unknown]:
    """Of the only command `train`."""
    [found] = [c for c in commands(script, ENVIRONMENT) if c.words[0].value == "train"]
    return [w.value for w in found.words[1:]]


def bash(script: str) -> list[str]:
    """What bash gives the command `train`, which here prints its words. Files that it makes go with the folder."""
    assert BASH
    text = "train() { [ $# = 0 ] || printf '%s\\0' \"$@\" >&3; }\n" + script
    command = [BASH, "-c", f"exec 3>&1 >/dev/null 2>&1\n{text}"]
    with tempfile.TemporaryDirectory() as folder:
        run = subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    return run.stdout.split("\0")[:-1]


SCRIPTS = {
    "words": "train a=1   b.c=2\t+d=3",
    "continued": "train a=1 \\\n    b=2 \\\n\\\n  c=3\n",
    "comment": "# train x=1\ntrain a=1 # b=2\n#c\n",
    "no comment": "train a=1#2 '#b' \\#c",
    "comment ends the command": "train a=1 \\\n  # b=2 \\\n  c=3\n",
    "space after the backslash": "train a=1 \\ \n  b=2\n",
    "quotes": """train a='x y' b="x y" 'c=1' "d=1" e=x' 'y f=''""",
    "quotes of lists": """train a='["x","y"]' b="['x','y']" c=[\\'x\\']""",
    "escapes": r"""train a="\$HOME \" \\ \n" b=\$HOME c=x\ y d='\' """,
    "ansi": r"train a=$'x\ty\'z'",
    "variables": 'A=1\nB="$A 2"\ntrain a=$A b="$B" c=${A}b "d=${B}" e=$HOME/x f=\'$A\' g=$A.$A',
    "split": 'MORE="a=1 b=2"\nEMPTY=\ntrain $MORE "$MORE" x=$MORE y="$MORE" $MORE$MORE $EMPTY "$EMPTY"',
    "defaults": "A=\ntrain a=${A:-3} b=${A-3} c=${B:-3} d=${SIZE:-9} e=${B:-$SIZE} f=${B:=x y}",
    "default in quotes": 'train "a=${B:-x y}" "b=${B:-}"',
    "more": "A=1\nA+=2\ntrain a=$A",
    "export": 'export A=1 B="x y"\ndeclare C=3\ntrain a=$A b="$B" c=$C',
    "last": "A=1\nA=2\ntrain a=$A\nA=3",
    "in front": "A=1 B=2 train a=1",
    "arithmetic": "N=3\nM=$((N * 4))\ntrain a=$((1+2 * 3)) b=$((M / 5)) c=$((-7/2)) d=$(((N + $SIZE) % 4)) e=$((-7%3))",
    "array": 'A=(\n  a=1  # one\n  b="x y"\n  \'c=$HOME\'\n  d=$SIZE\n)\nB=()\ntrain "${A[@]}" ${B[@]} z=1',
    "array more": 'A=(a=1)\nA+=(b=2 c=3)\ntrain "${A[@]}"',
    "arguments": 'train a=1 "$@" $@ ${@} b=2 "${@:2}"',
    "pipes": "train a=1 2>&1 | tee log.txt\ntrue >x.txt 2>/dev/null && echo y; echo z &",
    "redirected": "train a=1 >/dev/null b=2 2>>/dev/null < /dev/null c=3 &>/dev/null",
    "separated": "echo x; train a=1; echo y",
    "here": "cat <<EOF\ntrain x=1 '\nEOF\ntrain a=1",
    "set": "set -x\nset -euo pipefail\ntrain a=1",
    "dollar alone": 'train a=$ b="$" c="5$"',
    "braces": "train a={b:1} c={d:{e:1}}",
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_words_are_those_of_bash(script: str) -> None:
    assert words(script) == bash(script)


def test_lines_may_end_as_on_windows() -> None:
    assert words("A=1\r\ntrain a=$A \\\r\n  b=2\r\n") == ["a=1", "b=2"]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0\r"), min_size=1), max_size=5))
def test_any_text_in_quotes_comes_back(texts: list[str]) -> None:
    assert words(f"train {shlex.join(texts)} end") == [*texts, "end"]


UNTOLD = {
    "train a=$(date +%s)": "$(date +%s) is the output of a command",
    "train a=x-`date`": "$(date) is the output of a command",
    "train a=$NONE": "$NONE is set neither in the script nor in the environment",
    "train a=${NONE}": "$NONE is set neither in the script nor in the environment",
    "train a=$1": "$1 is an argument of the script",
    "train a=${SIZE%.*}": "${SIZE%.*} is more than a name and a default",
    "if [ -z $A ]; then\n  A=1\nfi\ntrain a=$A": "$A is set under a condition, in a loop or in a function (line 2)",
    "for A in 1 2; do B=$A; done\ntrain a=$B": "$B is set under a condition, in a loop or in a function (line 1)",
    "f() {\n  A=1\n}\ntrain a=$A": "$A is set under a condition, in a loop or in a function (line 2)",
    "A=$(pwd)/x$(date)\ntrain a=$A": "$(date) is the output of a command",
    "train a=$((2 ** 70))": "$((2 ** 70)) is not read",
    "train a=$((__import__('os').getpid()))": "$((__import__('os').getpid())) is not read",
    "train a=$((1 / 0))": "$((1 / 0)) is not read",
}


@pytest.mark.parametrize(("script", "why"), UNTOLD.items(), ids=map(str, range(len(UNTOLD))))
def test_what_only_running_could_tell_is_told(script: str, why: str) -> None:
    [word] = words(script)
    assert isinstance(word, Unknown)
    assert word.why.startswith(why)


@pytest.mark.parametrize(
    "script", ["if true; then\n train a=1\nfi", "while true; do train a=1; done", "f() {\ntrain a=1\n}"]
)
def test_commands_under_a_condition_are_none(script: str) -> None:
    assert commands(script, {}) == [] or all(c.words[0].value != "train" for c in commands(script, {}))


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("train a='x\n", "the quote ' of line 1 is never closed"),
        ('x\ntrain a="x\n', 'the quote " of line 2 is never closed'),
        ("train a=`x\n", "the quote ` of line 1 is never closed"),
        ("train a=$(x\n", "'(' of line 1 is never closed"),
        ("train a=${x\n", "'{' of line 1 is never closed"),
        ("A=(x\n", "')' is missing at the end of the script"),
    ],
)
def test_what_is_never_closed_is_an_error_with_its_line(script: str, says: str) -> None:
    with pytest.raises(ValueError, match=r"closed|missing") as e:
        commands(script, {})
    assert str(e.value) == says


def test_nothing_is_run(tmp_path: Path) -> None:
    made = tmp_path / "made"
    script = f"touch {made}\nA=$(touch {made})\ntrain a=$A b=`touch {made}` c=$((touch))\n"
    found = commands(script, {})
    assert [c.words[0].value for c in found] == ["touch", "train"]
    assert not made.exists()


def test_what_a_word_names_is_not_filled_in_where_it_is_shown() -> None:
    [command] = commands('A=(x=$SECRET)\ntrain a=$SECRET "b=${SECRET}" "${A[@]}"', {"SECRET": "s3cret"})
    assert [w.value for w in command.words[1:]] == ["a=s3cret", "b=s3cret", "x=s3cret"]
    assert [w.raw for w in command.words[1:]] == ["a=$SECRET", '"b=${SECRET}"', "x=$SECRET"]
