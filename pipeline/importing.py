"""`import.FROM=PATH`: a configuration of another framework becomes a recipe here, and is planned right away.

What can be read is decided by the packages of `importers/`, each by its name; this module knows none of them. Such a
package has `bring(path, name)`, which gives the text of a recipe and a report (`Recipe`), or raises PlanError.
`import` is no setting: it is taken out of the command line before Hydra sees any of it.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pipeline import plan, quoting
from pipeline.config import CONF, parse
from pipeline.errors import PlanError, Problem, closest, listed, near

FOLDER = Path("imported")
"""Where recipes are written, in the working directory: a folder for `--config-dir`."""


class Recipe(Protocol):
    """What a package of `importers/` makes."""

    @property
    def text(self) -> str:
        """The YAML of an option of the group `experiment`."""
        ...

    @property
    def report(self) -> str:
        """What became of what, for the terminal."""
        ...


@dataclass(frozen=True, slots=True)
class Request:
    """`import.<source>=<path>`, and the name of the recipe."""

    source: str
    path: Path
    name: str


def sources() -> list[str]:
    """What can be imported from."""
    return sorted(m.name for m in pkgutil.iter_modules([str(CONF.parent / "importers")]) if m.ispkg)


def asked(argv: Sequence[str]) -> bool:
    """Whether the command line asks for an import, however it is misspelt."""
    return any(map(_is_import, argv))


def _is_import(text: str) -> bool:
    top, dot, source = quoting.key_of(text).partition(".")
    if text.startswith("-") or top == "import":
        return top == "import"
    return bool(dot) and source in sources() and closest(top, ["import"]) is not None


def bring(argv: Sequence[str]) -> str:
    """Write the recipe, plan it, and tell about both. PlanError if nothing was written."""
    request = read(argv)
    recipe: Recipe = importlib.import_module(f"importers.{request.source}").bring(request.path, request.name)
    file = FOLDER / "experiment" / f"{request.name}.yaml"
    _write(file, recipe.text)
    command = f"--config-dir {FOLDER} experiment={request.name}"
    verdict = "\n".join(_planned(command.split())) or "It plans without a problem."
    return f"{recipe.report}\n\n{file} is written. {verdict}\n  python run.py {command}"


def read(argv: Sequence[str]) -> Request:
    """PlanError for what is misspelt, and for what cannot stand beside an import."""
    imports = [t for t in argv if _is_import(t)]
    key, _, value = imports[0].partition("=")
    given = [t.partition("=")[2] for t in argv if t.startswith("name=")]
    path = Path(value).expanduser()
    name = given[-1] if given else _name_of(path)
    problems = list(_misspelt(imports[0])) or list(_no_file(key, path))
    problems += [*(_second(t) for t in imports[1:]), *_no_name(name)]
    problems += [_beside(t, key) for t in argv if t not in imports and not t.startswith("name=")]
    file = FOLDER / "experiment" / f"{name}.yaml"
    if not problems and file.exists():
        hint = f"give the recipe another name: {quoting.shell(imports[0])} name={name}-2"
        problems.append(Problem(where="name", what=f"'{file}' is there already, and is not written over", hint=hint))
    if problems:
        raise PlanError(problems)
    return Request(key.partition(".")[2], path, name)


def _misspelt(text: str) -> Iterator[Problem]:
    key, equals, value = text.partition("=")
    form = f"import.FROM=PATH, where FROM is {listed(sources())}"
    top, _, source = quoting.key_of(text).partition(".")
    if top != "import":
        yield Problem(where=key, what="no such command", hint=f"did you mean 'import.{source}'? {form}")
    elif source not in sources():
        what = f"nothing is known of '{source}'" if source else "does not say what is imported"
        yield Problem(where=key, what=what, hint=f"{near(source, sources()) if source else 'write ' + form}")
    elif key != f"import.{source}":
        yield Problem(where=key, what="is a command and no setting", hint=f"write it without '{key[0]}': {form}")
    elif not equals or not value:
        yield Problem(where=key, what="names no file", hint=form)


def _second(text: str) -> Problem:
    return Problem(where=quoting.key_of(text), what=f"'{text}' is a second import", hint="one file at a time")


def _beside(text: str, key: str) -> Problem:
    hint = f"only name=..., the recipe's name, goes with {key}; change the recipe once it is written, or when it is run"
    return Problem(where=quoting.key_of(text) or text, what=f"'{text}' cannot stand beside an import", hint=hint)


def _no_file(key: str, path: Path) -> Iterator[Problem]:
    if path.is_file():
        return
    what = f"'{path}' is {'a folder' if path.is_dir() else 'not a file'}"
    there = sorted(p.name for p in path.parent.iterdir() if p.is_file()) if path.parent.is_dir() else []
    match = closest(path.name, there)
    yield Problem(where=key, what=what, hint=f"did you mean '{path.parent / match}'?" if match else "give a file")


def _no_name(name: str) -> Iterator[Problem]:
    if name != _tidy(name):
        hint = f"letters, digits, '.', '_' and '-', at most 100: name={_tidy(name) or 'mine'}"
        yield Problem(where="name", what=f"'{name}' cannot be the name of a recipe", hint=hint)


def _name_of(path: Path) -> str:
    return _tidy(path.stem) or "imported"


def _tidy(text: str) -> str:
    return "".join(c if c.isalnum() or c in "._-" else "-" for c in text).strip("-.")[:100]


def _write(file: Path, text: str) -> None:
    """PlanError if it is there, or cannot be written; then nothing of it is left."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("x", encoding="utf-8") as out:
            out.write(text)
    except FileExistsError:
        raise PlanError([Problem(where="name", what=f"'{file}' is there already, and is not written over")]) from None
    except OSError as e:
        raise PlanError([Problem(where=str(file), what=f"cannot be written: {e.strerror}")]) from None


def _planned(argv: Sequence[str]) -> Iterator[str]:
    """What is wrong with the recipe on this machine, now."""
    try:
        problems = plan.make(parse([*argv, "mode=plan"])).problems
    except PlanError as e:
        problems = e.problems
    if problems:
        yield f"A plan of it on this machine has {len(problems)} warning{'s' * (len(problems) != 1)}:"
    for p in problems:
        yield f"  warning: {p}"
