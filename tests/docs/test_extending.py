"""docs/extending.md as it stands: its files are written, its commands run in order, and what they print is compared.

A file block follows a line with its path; a console block holds commands behind '$ ' and what they print. `...` stands
for lines, or for the part of a path, that are not shown, and one number for another.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "extending.md"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@dataclass(frozen=True)
class Command:
    """As it is typed, with the lines of its output that are shown."""

    typed: str
    shown: tuple[str, ...]


def blocks(text: str) -> Iterator[tuple[str, str, str]]:
    """Of each fenced block its language, its content, and the path that the text before names last in backquotes."""
    for match in re.finditer(r"^```(\w+)\n(.*?)^```$", text, re.M | re.S):
        before = text[: match.start()].rstrip().rsplit("\n\n", 1)[-1]
        named = re.findall(r"`(my/[\w/]+\.(?:py|yaml))`", before)
        yield match[1], match[2], named[-1] if named else ""


def commands(content: str) -> Iterator[Command]:
    """Of one console block."""
    for part in re.split(r"^\$ ", content, flags=re.M)[1:]:
        lines = part.splitlines()
        end = next(i for i, line in enumerate(lines) if not line.endswith("\\")) + 1
        yield Command("\n".join(lines[:end]), tuple(lines[end:]))


def pattern(line: str) -> re.Pattern[str]:
    """What a shown line stands for; spaces that line columns up may be fewer or more."""
    escaped = re.escape(" ".join(line.split()))
    escaped = escaped.replace(re.escape("/.../"), r"/\S*/")
    return re.compile(re.sub(r"\d+(\\?[.,]\d+)*", r"[\\d.,]+", escaped))


def missing(shown: tuple[str, ...], printed: str) -> str | None:
    """The first shown line that was not printed after those before it. Without `...` between, the next line counts."""
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    at, free = 0, False
    for line in shown:
        if line == "...":
            free = True
            continue
        found = range(at, len(lines)) if free else range(at, min(at + 1, len(lines)))
        place = next((i for i in found if pattern(line).search(lines[i])), None)
        if place is None:
            return line
        at, free = place + 1, False
    return None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With every file of the page, as a reader has it in the end."""
    folder = tmp_path_factory.mktemp("extending")
    for language, content, path in blocks(PAGE.read_text("utf-8")):
        if language in ("python", "yaml"):
            assert path, f"a block has no name:\n{content}"
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(content)
    return folder


COMMANDS = [
    c for language, content, _ in blocks(PAGE.read_text("utf-8")) if language == "console" for c in commands(content)
]


@pytest.fixture(scope="module")
def printed(folder: Path) -> list[tuple[int, str]]:
    """Exit status and output of every command, in the order of the page."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "HYDRA"))}
    env |= {"HEADRACE": str(ROOT), "PATH": f"{Path(sys.executable).parent}:{env['PATH']}", "OMP_NUM_THREADS": "1"}
    env |= {"COLUMNS": "100", "PYTHONDONTWRITEBYTECODE": "1"}
    out: list[tuple[int, str]] = []
    for command in COMMANDS:
        ended = subprocess.run(
            ["bash", "-c", f"OLDPWD=$PWD; {command.typed}"],
            cwd=folder,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=240,
        )
        out.append((ended.returncode, ended.stdout))
    return out


@pytest.mark.parametrize("number", range(len(COMMANDS)), ids=[re.sub(r"\W+", "-", c.typed)[-60:] for c in COMMANDS])
def test_a_command_prints_what_the_page_shows(printed: list[tuple[int, str]], number: int):
    command, (status, text) = COMMANDS[number], printed[number]
    assert command.shown, "the page shows nothing of it"
    lost = missing(command.shown, text)
    assert lost is None, f"not printed, or not there: {lost}\n{command.typed}\n{text}"
    assert status == (2 if "cannot run" in command.shown[0] else 0), text
    assert "Traceback" not in text


def test_the_page_shows_files_of_each_kind(folder: Path):
    files = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.suffix in (".py", ".yaml")}
    assert {
        "my/my_stages/in_place.py",
        "my/conf/reward/in_place.yaml",
        "my/my_stages/no_cache.py",
        "my/conf/rollout/no_cache.yaml",
        "my/my_stages/length.py",
        "my/conf/filter/length.yaml",
    } <= files


def test_filtered_rows_have_a_reason_and_no_reward(printed: list[tuple[int, str]], folder: Path):
    """By the tokens that were written down; the filter is not in the chain of evaluation."""
    rows = [json.loads(line) for line in (folder / "first" / "rollouts.jsonl").read_text().splitlines()]
    trained = [r for r in rows if r["purpose"] == "train"]
    out = [r for r in trained if not 4 <= r["tokens"] <= 6]

    assert 0 < len(out) < len(trained)
    assert {r["status"] for r in out} == {"filtered"}
    assert [r["reason"] for r in out] == [f"{r['tokens']} tokens" for r in out]
    assert {r["reward"] for r in out} == {None}
    assert all(r["status"] == "ok" and r["reward"] is not None for r in trained if r not in out)
    assert {r["status"] for r in rows if r["purpose"] == "eval"} == {"ok"}


def test_the_reward_is_the_share_in_place(printed: list[tuple[int, str]], folder: Path):
    rows = [json.loads(line) for line in (folder / "first" / "rollouts.jsonl").read_text().splitlines()]
    for r in (r for r in rows if r["status"] == "ok"):
        given, answer = r["response"].strip(), r["ground_truth"]["sort"]
        share = sum(a == b for a, b in zip(given, answer, strict=False)) / max(len(given), len(answer))
        assert r["reward"] == pytest.approx(share, abs=1e-6)


def test_numbers_and_hidden_lines_are_all_that_may_differ():
    assert missing(("a 1.5", "...", "c"), "a 2,300\nb\nc\n") is None
    assert missing(("a", "c"), "a\nb\nc\n") == "c"
    assert missing(("/.../x.py:3",), "/tmp/y/x.py:14\n") is None
    assert missing(("a", "...", "d"), "a\nb\nc\n") == "d"
