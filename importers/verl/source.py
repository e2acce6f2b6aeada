"""The reader: what a user's file sets of verl's `ppo_trainer` configuration, and that configuration as a whole.

A file is YAML (nested as verl's config, or a list of overrides) or a script with a command line of
`verl.trainer.main_ppo`. verl itself is never imported: what it has as defaults stands in a YAML of its package.
"""

from __future__ import annotations

import copy
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from yaml import YAMLError

from importers.verl import shell
from pipeline.errors import PlanError, Problem

FACTS = Path(__file__).with_name("defaults.yaml")
"""Defaults of verl 0.9.1 for the keys that are carried over: for a machine without verl, and for the page."""

ENGINES = {"dp": "ppo", "megatron": "ppo_megatron", "torchtitan": "ppo_torchtitan", "veomni": "ppo_veomni"}
"""verl's `model_engine`, and what the name of its whole configuration begins with."""

_MAIN = re.compile(r"(^|/)(verl[./]trainer[./]main_ppo(\.py)?)$")
_SECRET_FREE = ("HOME", "PWD", "USER")


@dataclass(frozen=True, slots=True)
class Given:
    """One key that the user's file sets. `raw` is how it is written, with variables not filled in."""

    key: str
    value: Any
    raw: str
    added: bool = False
    """With `+`: verl's configuration need not have it."""
    removed: bool = False
    """With `~`."""
    unknown: str = ""
    """Why the value cannot be told."""


class Untold(ValueError):
    """A value that cannot be told from the file; the message says why."""


@dataclass(slots=True)
class Config:
    """verl's configuration with the user's file in it. `known` are all keys that verl's has."""

    whole: DictConfig
    given: dict[str, Given]
    known: frozenset[str]
    version: str
    default: DictConfig
    complete: bool
    """Whether `known` is all of verl's configuration: verl is installed."""
    notes: list[str] = field(default_factory=list)
    """What of the file never reaches verl."""

    def __getitem__(self, key: str) -> Any:
        """The value verl would see; None where it has none. Untold if the file does not tell it."""
        if (given := self.given.get(key)) and given.unknown:
            raise Untold(given.unknown)
        return _select(self.whole, key)

    def at_default(self, key: str) -> bool:
        return key in self.known and self[key] == _select(self.default, key)


def _select(cfg: DictConfig, key: str) -> Any:
    try:
        value = OmegaConf.select(cfg, key, throw_on_missing=True)
    except MissingMandatoryValue:
        return None
    except OmegaConfBaseException as e:
        raise Untold(str(e).split("\n")[0]) from None
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def read(path: Path) -> Config:
    """PlanError with everything that cannot be read."""
    text = _text(path)
    notes: list[str] = []
    if path.suffix.lower() in (".yaml", ".yml"):
        given, engine = list(_of_yaml(path, text)), "dp"
    else:
        words, notes = _command_line(path, text)
        given, engine = _of_words(words, path)
    engine = _engine(given) or engine
    default, version, complete = defaults(engine)
    known = frozenset(leaves(OmegaConf.to_container(default, resolve=False)))
    whole = copy.deepcopy(default)
    for g in given:
        if not _inside_of_value(g.key, known, default):
            _put(whole, g, path)
    return Config(whole, {g.key: g for g in given if g.key != "model_engine"}, known, version, default, complete, notes)


def _engine(given: Sequence[Given]) -> str:
    """As the file names it: to Hydra, or in what Hydra made of that."""
    values = {g.key: str(g.value) for g in given}
    strategy = values.get("actor_rollout_ref.actor.strategy", "")
    return values.get("model_engine") or (strategy if strategy in ENGINES else "")


def _inside_of_value(key: str, known: frozenset[str], default: DictConfig) -> bool:
    """Whether it lies below a single value of verl's configuration: it is no key of it, and must not replace that."""
    parents = [key[:i] for i, c in enumerate(key) if c == "."]
    return any(p in known and _select(default, p) != {} for p in parents)


def _put(whole: DictConfig, given: Given, path: Path) -> None:
    if given.removed or given.unknown:
        return
    try:
        OmegaConf.update(whole, given.key, given.value, merge=True, force_add=True)
    except (OmegaConfBaseException, ValueError, TypeError) as e:
        raise PlanError(
            [Problem(where=given.key, what=str(e).split("\n")[0], hint=f"{path} has: {given.raw}")]
        ) from None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as e:
        raise PlanError([Problem(where="import.verl", what=f"'{path}' cannot be read: {e.strerror}")]) from None
    except UnicodeDecodeError as e:
        raise PlanError([Problem(where="import.verl", what=f"'{path}' is not UTF-8: byte {e.start}")]) from None


# -- verl's own configuration ------------------------------------------------------------------------------------


@lru_cache(maxsize=4)
def defaults(engine: str = "dp") -> tuple[DictConfig, str, bool]:
    """verl's configuration, its version, and whether it is all of it: the installed verl's, or what `FACTS` has.

    PlanError for an engine that verl does not have.
    """
    if engine not in ENGINES:
        what = f"verl has no engine '{engine}'"
        raise PlanError([Problem(where="model_engine", what=what, hint=f"allowed: {', '.join(ENGINES)}")])
    found = importlib.util.find_spec("verl")
    folder = Path(found.origin).parent / "trainer" / "config" if found and found.origin else FACTS.parent
    file = folder / f"_generated_{ENGINES[engine]}_trainer.yaml"
    installed = file.is_file()
    cfg: Any = OmegaConf.load(file if installed else FACTS)
    version = importlib.metadata.version("verl") if installed else "0.9.1"
    return cfg, version, installed


def leaves(value: Any, at: str = "") -> Iterator[str]:
    """Paths of all values that are no sections; an empty section is one."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from leaves(inner, f"{at}.{name}" if at else str(name))
    elif at:
        yield at


# -- YAML --------------------------------------------------------------------------------------------------------


def _of_yaml(path: Path, text: str) -> Iterator[Given]:
    try:
        cfg = OmegaConf.create(text)
        plain: Any = OmegaConf.to_container(cfg, resolve=False)
    except (YAMLError, OmegaConfBaseException, ValueError) as e:
        what = f"'{path}' is not YAML: {' '.join(str(e).split())}"
        raise PlanError([Problem(where="import.verl", what=what)]) from None
    if isinstance(plain, list) and all(isinstance(item, str) for item in plain):
        yield from _overrides([(item, item) for item in plain], path)
        return
    if not isinstance(plain, dict) or not set(plain) & {str(k) for k in defaults()[0]}:
        what, hint = (
            f"'{path}' holds no sections",
            "verl's are actor_rollout_ref, algorithm, data, trainer, ...",
        )
        raise PlanError([Problem(where="import.verl", what=what, hint=hint)])
    for key in leaves({k: v for k, v in plain.items() if k not in ("defaults", "hydra")}):
        value = plain
        for name in key.split("."):
            value = value[name]
        yield Given(key, value, f"{key}={value}", added=True)


# -- the command line of a script --------------------------------------------------------------------------------


def _command_line(path: Path, text: str) -> tuple[list[shell.Word], list[str]]:
    """The words after `verl.trainer.main_ppo`, and lines that look like overrides and stand outside of it."""
    environment = {k: v for k, v in os.environ.items() if k in _SECRET_FREE or re.search(rf"\$\{{?{k}\b", text)}
    try:
        found = shell.commands(text, environment)
    except ValueError as e:
        raise PlanError([Problem(where="import.verl", what=f"'{path}' is no script that can be read: {e}")]) from None
    starts = [
        (c, i) for c in found for i, w in enumerate(c.words) if isinstance(w.value, str) and _MAIN.search(w.value)
    ]
    if len(starts) != 1:
        raise PlanError([_not_one(path, [c for c, _ in starts], text)])
    [(command, at)] = starts
    outside = [c for c in found if c is not command and re.match(r"[+~]{0,2}\w+(\.\w+)+=", str(c.words[0].value or ""))]
    hint = "the line before it has no '\\' at its end, or a space after it, or is a comment"
    notes = [f"line {c.line}: {c.words[0].raw} is not part of the command: {hint}" for c in outside]
    return list(command.words[at + 1 :]), notes


def _not_one(path: Path, found: Sequence[shell.Command], text: str) -> Problem:
    if found:
        lines = ", ".join(str(c.line) for c in found)
        what = f"'{path}' has {len(found)} command lines of verl.trainer.main_ppo (lines {lines})"
        return Problem(where="import.verl", what=what, hint="keep one of them in a file of its own")
    mains = sorted(set(re.findall(r"\b[\w.]+\.main_\w+|\b\w*_trainer\b", text)) - {"ppo_trainer"})
    what = f"'{path}' has no command line of verl.trainer.main_ppo"
    hint = (
        "a script with `python3 -m verl.trainer.main_ppo KEY=VALUE ...` outside of conditions and functions, or a .yaml"
    )
    return Problem(where="import.verl", what=what, hint=hint + (f"; it has: {', '.join(mains)}" if mains else ""))


def _of_words(words: Sequence[shell.Word], path: Path) -> tuple[list[Given], str]:
    """Overrides, and the engine that `--config-name` names."""
    engine, texts = "dp", list[tuple[str | shell.Unknown, str]]()
    names = {f"{prefix}_trainer": name for name, prefix in ENGINES.items()}
    flags = iter(words)
    for word in flags:
        if not isinstance(word.value, str) or not word.value.startswith("-"):
            texts.append((word.value, word.raw))
            continue
        flag, equals, value = word.value.partition("=")
        if not equals and flag in ("--config-name", "--config-path", "--config-dir", "-cn", "-cp", "-cd"):
            value = str(getattr(next(flags, None), "value", ""))
        if flag in ("--config-name", "-cn"):
            name = value.removesuffix(".yaml")
            if name not in names:
                what = f"verl has no configuration '{name}' of this kind"
                raise PlanError([Problem(where="--config-name", what=what, hint=f"allowed: {', '.join(names)}")])
            engine = names[name]
    return list(_overrides(texts, path)), engine


def _overrides(texts: Sequence[tuple[str | shell.Unknown, str]], path: Path) -> Iterator[Given]:
    """By Hydra's own grammar. PlanError with every one that it does not take."""
    problems: list[Problem] = []
    found: dict[str, Given] = {}
    for text, raw in texts:
        if isinstance(text, shell.Unknown):
            key = re.match(r"[\"'+~]*([\w.]+)=", raw)
            if key is None:
                problems.append(Problem(where=raw, what=text.why, hint=f"write its value into {path}"))
            else:
                found[key[1]] = Given(key[1], None, raw, unknown=text.why)
            continue
        try:
            made = OverridesParser.create().parse_override(text)
            if made.is_sweep_override():
                why = "it is several values, which only a sweep can have; text with ',' needs quotes of its own"
                problems.append(Problem(where=raw, what=f"is no override that Hydra, and so verl, can read: {why}"))
                continue
            key, value = made.key_or_group, None if made.is_delete() else made.value()
        except HydraException as e:
            why = str(e).split("\n")[0]
            problems.append(Problem(where=raw, what=f"is no override that Hydra, and so verl, can read: {why}"))
            continue
        given = Given(key, value, raw, added=made.is_add() or made.is_force_add(), removed=made.is_delete())
        for inner in _flat(given):
            found[inner.key] = inner
    if problems:
        raise PlanError(problems)
    yield from found.values()


def _flat(given: Given) -> Iterator[Given]:
    """An override that gives a section, as one for each of its keys."""
    if not isinstance(given.value, Mapping) or not given.value:
        yield given
        return
    for key in leaves(given.value):
        value: Any = given.value
        for name in key.split("."):
            value = value[name]
        whole = f"{given.key}.{key}"
        yield Given(whole, value, given.raw if "$" in given.raw else f"{whole}={value}", given.added)
