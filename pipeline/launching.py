"""How Hydra starts the jobs of a sweep, and what is wrong where somebody says it in a place that Hydra passes over.

Hydra reads `hydra.launcher`, `hydra.sweeper` and `hydra.sweep.dir` once, before it composes the first job, and only in
a sweep. In a recipe that is itself swept, or in a single run, they would be ignored without a word.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipeline.errors import Problem

DEFAULT = {"launcher": "basic", "sweeper": "basic"}


@dataclass(frozen=True, slots=True)
class Launching:
    """Settings of launcher and sweeper as they are written, the options they came from, and the sweep's directory."""

    settings: dict[str, dict[str, Any]]
    choices: dict[str, str]
    written: str
    """`hydra.sweep.dir` before anything is filled in."""
    folder: Path
    """`hydra.sweep.dir`, absolute."""
    problems: tuple[Problem, ...]
    """What the settings say of themselves: their class may have a method `problems`."""


def launching(cfg: DictConfig) -> Launching:
    HydraConfig.instance().set_config(cfg)  # for ${hydra:...}
    parts = {name: cfg.hydra[name] for name in DEFAULT}
    folder, problems = Path("outputs"), list[Problem]()
    try:
        folder = Path(str(cfg.hydra.sweep.dir))
    except OmegaConfBaseException as e:
        problems.append(Problem(where="hydra.sweep.dir", what=str(e).split("\n")[0]))
    for part in parts.values():
        if check := getattr(OmegaConf.get_type(part), "problems", None):
            problems += check(OmegaConf.to_object(part))
    return Launching(
        {name: _plain(part) for name, part in parts.items()},
        {name: str(cfg.hydra.runtime.choices[f"hydra/{name}"]) for name in parts},
        str(_plain(cfg.hydra.sweep)["dir"]),
        folder.absolute(),
        tuple(problems),
    )


def _plain(node: DictConfig) -> Any:
    return OmegaConf.to_container(node, resolve=False)


def alone(cfg: DictConfig, overrides: Sequence[str]) -> Iterator[Problem]:
    """What only a sweep reads, in a single run. A job of a sweep is none: it has a number."""
    if not OmegaConf.is_missing(cfg.hydra.job, "num"):
        return
    hint = "add -m (--multirun), or leave it out"
    if cfg.hydra.mode is not None and cfg.hydra.mode.name == "MULTIRUN":
        yield Problem(where="hydra.mode", what="is MULTIRUN, and this is a single run", hint="add -m (--multirun)")
    for name, default in DEFAULT.items():
        part, choice = cfg.hydra[name], str(cfg.hydra.runtime.choices[f"hydra/{name}"])
        if choice != default or _plain(part) != _plain(OmegaConf.structured(OmegaConf.get_type(part))):
            what = f"'{choice}' or its settings are chosen, and a single run has no {name}"
            yield Problem(where=f"hydra/{name}", what=what, hint=hint)
    for text in overrides:
        if text.startswith("hydra.sweep."):
            yield Problem(where=text.partition("=")[0], what="this is a single run: nothing reads it", hint=hint)


def too_late(cfg: DictConfig, master: Launching) -> Iterator[Problem]:
    """What a point of a sweep sets that was read before: by a recipe that is swept over."""
    seen = launching(cfg)
    for name, choice in seen.choices.items():
        if seen.settings[name] != master.settings[name]:
            what = f"a recipe of this point sets '{choice}', after the sweep was started with '{master.choices[name]}'"
            same = choice == master.choices[name]
            hint = f"give {f'hydra.{name}.<setting>=...' if same else f'hydra/{name}={choice}'} on the command line"
            yield Problem(where=f"hydra/{name}", what=what, hint=f"{hint}, and take it out of the recipe")
    if seen.written != master.written:
        what = f"a recipe of this point sets '{seen.written}', after the sweep was started in '{master.written}'"
        hint = "give hydra.sweep.dir=... on the command line, and take it out of the recipe"
        yield Problem(where="hydra.sweep.dir", what=what, hint=hint)
