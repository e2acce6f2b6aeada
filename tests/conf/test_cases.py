"""Whatever is wrong on a command line is told at once, in words that teach, with exit status 2 and nothing on disk."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline import config, registry
from tests.conf.cases import CASES, Case, lay_out, told

config.prepare(config.parse([]))  # so that what a case registers, and no more, is forgotten after it

NOTHING = "Nothing was started and nothing was written."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cases")
    lay_out(folder)
    return folder


@pytest.fixture(autouse=True)
def in_the_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test leaves the folder as it found it."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.dont_write_bytecode", False)
    before = sorted(p.relative_to(folder) for p in folder.rglob("*"))
    yield
    assert sorted(p.relative_to(folder) for p in folder.rglob("*")) == before, "something was left on disk"


def errors(text: str) -> list[str]:
    """Each error with its hint, as printed; warnings left out."""
    lines = text.removesuffix(f"{NOTHING}\n").splitlines()[1:]
    starts = [i for i, line in enumerate(lines) if re.match("  \\S", line)]
    found = ["\n".join(lines[a:b]) for a, b in zip(starts, [*starts[1:], len(lines)], strict=True)]
    return [problem for problem in found if not problem.startswith("  warning: ")]


def check(text: str, status: int, cases: list[Case]) -> None:
    assert status == 2, text
    assert "Traceback" not in text
    assert NOTHING in text
    count = sum(case.problems for case in cases)
    assert text.startswith(f"The configuration cannot run: {count} problem{'s' if count > 1 else ''}."), text
    assert len(errors(text)) == count
    for case in cases:
        for piece in case.told:
            assert piece in text
    assert all(problem.splitlines()[1:] for problem in errors(text)), "a problem does not say what to do"


@pytest.mark.parametrize("name", CASES)
def test_alone(name: str) -> None:
    status, text = told(CASES[name].args)
    check(text, status, [CASES[name]])


def threes() -> Iterator[list[str]]:
    """Each case that can stand beside others, with two others far from it in the table that set something else."""
    names = [n for n, case in CASES.items() if not case.alone]
    for i, name in enumerate(names[::2]):
        group, taken = [name], {place(a) for a in CASES[name].args}
        for step in range(len(names)):
            other = names[(2 * i + 17 + 11 * step) % len(names)]
            places = {place(a) for a in CASES[other].args}
            if len(group) < 3 and other not in group and not any(_meet(a, b) for a in places for b in taken):
                group.append(other)
                taken |= places
        yield group


def place(arg: str) -> str:
    return arg.partition("=")[0].lstrip("+~").partition("@")[2] or arg.partition("=")[0].lstrip("+~")


def _meet(a: str, b: str) -> bool:
    """Whether two overrides may touch each other: one part, or sizes that belong together."""
    together = {"rollout", "trainer", "tokenizer_cache", "model"}
    heads = {a.partition(".")[0], b.partition(".")[0]}
    return len(heads) == 1 or (heads <= together and len(heads) == 2)


@pytest.mark.parametrize("names", [*threes()], ids="+".join)
def test_three_at_a_time(names: list[str]) -> None:
    cases = [CASES[n] for n in names]
    status, text = told(tuple(arg for case in cases for arg in case.args))
    check(text, status, cases)


def test_all_stages_are_still_registered() -> None:
    """The cases above forget what plug-ins registered, and no more."""
    assert {"reward=rule", "reward=function"} <= {str(e) for e in registry.entries("reward")}
    assert not {"mine", "clumsy"} & {e.name for e in registry.entries("reward")}
