"""Hydra's composition, with every problem and not only the first.

Composing has two halves, in Hydra as here: choices of options (`rollout=hf`) make the configuration, values
(`rollout.n=4`) are then set in it. Both are tried together, and one by one where that fails. This module and
pipeline/config.py are the only ones that know Hydra's and OmegaConf's objects.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from hydra import compose
from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError
from yaml import YAMLError

from pipeline import quoting
from pipeline.errors import PlanError, Problem, listed, near
from pipeline.registry import Entry, entries
from pipeline.slots import Slot, innermost, refusal

CONF = Path(__file__).resolve().parent.parent / "conf"

SlotOf = Callable[[DictConfig, str], Slot | None]
"""What the setting at a config path takes, if its schema is known."""


@dataclass(frozen=True, slots=True)
class _Chosen:
    """A configuration made by choices alone, and the choices that could not be made, with why."""

    cfg: DictConfig
    failed: Mapping[str, Exception]


def compose_all(texts: Sequence[str], slot_of: SlotOf, own: Collection[str] = ()) -> tuple[DictConfig, list[Problem]]:
    """Inside `config.composing`: the configuration with as many overrides as can be applied, and one problem for each
    that cannot. PlanError if it does not compose by itself. `own`: keys at the top that are not for options.
    """
    loader: Any = GlobalHydra.instance().config_loader()
    search = tuple(str(p.path).removeprefix("file://") for p in loader.get_search_path().get_path())
    folders = [Path(p) for p in search if Path(p).is_dir()]
    parsed, problems = quoting.parse(texts)
    misplaced = {id(o): p for o in parsed if (p := _not_allowed(o, own, _is_choice(o, loader)))}
    problems += misplaced.values()
    parsed = [o for o in parsed if id(o) not in misplaced]
    choices = {str(o.input_line): o for o in parsed if _is_choice(o, loader)}
    chosen = _choose(search, tuple(choices), frozenset(entries()))
    for text, error in chosen.failed.items():
        inside = _inside_of_option(error, chosen.cfg, folders, slot_of)
        problems.append(inside or _choice_problem(choices[text], error, chosen.cfg, folders))
    cfg = copy.deepcopy(chosen.cfg)
    missed = {o.package or o.key_or_group: o.key_or_group for o in map(choices.__getitem__, chosen.failed)}
    values = [o for o in parsed if o.input_line not in choices]
    misread = {id(o): p for o in values if (p := _no_truth(o.key_or_group, o.value(), cfg, slot_of))}
    problems += misread.values()
    parsed = [o for o in parsed if id(o) not in misread]
    failed = dict(_set([o for o in values if id(o) not in misread], cfg))
    for override, error in failed.values():
        if not _of_missed_choice(override, missed):
            problems.append(_value_problem(override, error, cfg, slot_of))
    _note(cfg, [o for o in parsed if o.input_line not in chosen.failed and o.input_line not in failed])
    order = [quoting.key_of(text) for text in texts]
    return cfg, sorted(problems, key=lambda p: order.index(p.where) if p.where in order else len(order))


def _not_allowed(override: Override, own: Collection[str], choice: bool) -> Problem | None:
    """What Hydra would take and nobody can mean: an option in place of a section of the configuration itself, and the
    removal of such a section or setting, after which its default would count."""
    key = override.key_or_group
    name = override.package
    if choice and name is not None and ("." in name or name in {*own, "", "hydra", "_global_", "_here_"}):
        what = f"'{name}' is no name for a node or component"
        hint = f"a plain name that is not used yet: +{key}@NAME={quoting.written(override)}"
        return Problem(where=f"{key}@{name}", what=what, hint=f"{hint}; used for other things: {listed(sorted(own))}")
    if override.is_delete() and not choice and key in own:
        return Problem(where=key, what="can be set but not removed", hint=f"leave '~{key}' out, and its default counts")
    return None


def _no_truth(key: str, value: Any, cfg: DictConfig, slot_of: SlotOf) -> Problem | None:
    """A number other than 0 and 1 for true or false, which OmegaConf would take for true."""
    if isinstance(value, dict):
        return next((p for k, v in value.items() if (p := _no_truth(f"{key}.{k}", v, cfg, slot_of))), None)
    number = int(value) if isinstance(value, str) and re.fullmatch(r"[-+]?\d{1,9}", value) else value
    if not isinstance(number, (int, float)) or number in (0, 1):
        return None
    slot = slot_of(cfg, key)
    return refusal(key, value, slot) if slot and slot.is_truth else None


def _note(cfg: DictConfig, overrides: Sequence[Override]) -> None:
    """What Hydra keeps of overrides in its own section, where directories of jobs are made of it."""
    kept = cfg.hydra.overrides
    kept.hydra = [o.input_line for o in overrides if o.is_hydra_override()]
    kept.task = [o.input_line for o in overrides if not o.is_hydra_override()]
    form = cfg.hydra.job.config.override_dirname
    cfg.hydra.job.override_dirname = get_overrides_dirname(
        overrides=[o for o in overrides if not o.is_hydra_override()],
        kv_sep=form.kv_sep,
        item_sep=form.item_sep,
        exclude_keys=form.exclude_keys,
    )


# -- choices -------------------------------------------------------------------------------------------------


def _is_choice(override: Override, loader: Any) -> bool:
    """As Hydra tells choices of options from values: by whether there is a group of that name."""
    key = override.key_or_group
    is_group = loader.repository.group_exists(key)
    return key == "hydra.searchpath" or (is_group and not isinstance(override.value(), dict))


@lru_cache(maxsize=16)
def _choose(search: tuple[str, ...], choices: tuple[str, ...], schemas: frozenset[Entry]) -> _Chosen:
    """Compose with all choices; if that fails, with as many as possible.

    Remembered for one process, as the points of a sweep share their choices. `search` is where Hydra looks for options,
    `schemas` what is registered: a plug-in more makes another configuration.

    Those that fail together are tried by halves, and those that fail alone are tried again as long as others went
    well: a choice may depend on one that stands behind it.
    """
    cfg, kept, failed, rest = None, list[str](), dict[str, Exception](), list(choices)

    def add(more: list[str]) -> None:
        nonlocal cfg
        try:
            cfg = compose("config", overrides=[*kept, *more], return_hydra_config=True)
            kept.extend(more)
        except Exception as e:  # Hydra's own, OmegaConf's, YAML's, and TypeErrors where a list holds what it may not
            if not more:
                hint = "mend the YAML of conf/, or of the folder that --config-dir names"
                what = f"does not compose by itself: {first_line(e)}"
                raise PlanError([Problem(where="conf", what=what, hint=hint)]) from e
            if len(more) == 1:
                failed[more[0]] = e
            else:
                add(more[: len(more) // 2])
                add(more[len(more) // 2 :])

    add(rest)
    while len(failed) < len(rest):
        rest = list(failed)
        failed.clear()
        for choice in rest:
            add([choice])
    if cfg is None and failed:
        return _Chosen(_choose(search, (), schemas).cfg, failed)
    assert cfg is not None  # without choices, add() composed or raised
    return _Chosen(cfg, failed)


def _inside_of_option(
    error: BaseException, cfg: DictConfig, folders: Sequence[Path], slot_of: SlotOf
) -> Problem | None:
    """What is wrong with a setting that an option's file gives: Hydra says only that something is."""
    cause: BaseException | None = error
    while cause is not None and not getattr(cause, "full_key", None):
        cause = cause.__cause__ or cause.__context__
    key, option = str(getattr(cause, "full_key", "")), re.match("In '([^']*)'", str(error))
    if not key or option is None:
        return None
    file = option_file(option[1], folders)
    if isinstance(cause, (ConfigAttributeError, ConfigKeyError)):
        found = unknown(key, cfg)
    elif slot := slot_of(cfg, key):
        found = refusal(key, getattr(cause, "value", None), slot)
    else:
        return None
    return replace(found, what=f"{found.what}, and {file} sets it")


def _choice_problem(override: Override, error: Exception, cfg: DictConfig, folders: Sequence[Path]) -> Problem:
    key, group, text = override.get_key_element().lstrip("+~"), override.key_or_group, str(error)
    value = v if isinstance(v := override.value(), str) else quoting.written(override)
    if schema := re.search(r"In '(.*)': Could not load 'schema/(.*)/(.*)'", text):
        return _without_backend(key, schema, folders)
    if options := re.search(r"Available options in '(.*)':\n((?:\t.*\n?)+)", text):
        what = f"there is no '{value}' in the group '{options[1]}'"
        return Problem(where=key, what=what, hint=near(value, options[2].split()))
    if "Multiple values for" in text:
        hint = f"choose it with {key}={value}, without '+'; a second one: +{group}@NAME={value}"
        return Problem(where=key, what="is chosen already, and is not a list", hint=hint)
    if (named := re.search("Could not (override|delete) '(.*)'", text)) and named[2] not in (key, group):
        what = f"'{value}' changes the choice of '{named[2]}', and nothing is chosen under that name here"
        return Problem(where=key, what=what, hint=f"choose {group}={value} itself, or another pipeline")
    if named:
        configured = [k for k in cfg.hydra.runtime.choices if not k.startswith("hydra/")]
        hint = f"to add it: +{key}={value}; {near(key, configured, 'chosen so far')}"
        return Problem(where=key, what="nothing is chosen under this name, so nothing can be changed", hint=hint)
    if "force-add" in text:
        return Problem(where=key, what="is chosen, not set", hint=f"choose it with {key}={value}, without '++'")
    if key == "hydra.searchpath":
        hint = "a folder of your own is added by --config-dir DIR"
        return Problem(where=key, what=f"{value or 'nothing'} is no list of folders", hint=hint)
    if isinstance(error, YAMLError):
        return Problem(where=key, what=f"YAML that cannot be read: {first_line(error)}", hint="mend it at that place")
    known = _options(group, folders)
    if value in known:
        what = f"'{value}' does not compose: {first_line(error.__cause__ or error)}"
        return Problem(where=key, what=what, hint=f"mend {option_file(f'{group}/{value}', folders)}")
    what = f"'{value}' is no option of the group '{group}'"
    return Problem(where=key, what=what, hint=f"{near(value, known)}; '~{key}' leaves it out")


def _without_backend(key: str, schema: re.Match[str], folders: Sequence[Path]) -> Problem:
    """An option file extends the schema of a backend that nobody has registered."""
    option, role, name = (str(g) for g in schema.groups())
    file = option_file(option, folders)
    what = f"{file} extends /schema/{role}/{name}, and no stage is registered as {role}={name}"
    hint = near(name, (e.name for e in entries(role)), "registered")
    return Problem(where=key, what=what, hint=f"{hint}; is its module among plugins=[...]?")


def option_file(option: str, folders: Sequence[Path]) -> Path | str:
    """The YAML of an option such as `reward/rule`; the option itself if no folder has it."""
    return next((f for folder in folders if (f := folder / f"{option}.yaml").is_file()), option)


def _options(group: str, folders: Sequence[Path]) -> set[str]:
    return {f.stem for folder in folders for f in (folder / group).glob("*.yaml")}


# -- values --------------------------------------------------------------------------------------------------


def _set(values: Sequence[Override], cfg: DictConfig) -> Iterator[tuple[str, tuple[Override, Exception]]]:
    """Set values in the configuration, and give back those that cannot be, with why."""
    for override in values:
        part = copy.deepcopy(cfg) if isinstance(override.value(), dict) else cfg  # a dict may be half in when it fails
        try:
            ConfigLoaderImpl._apply_overrides_to_config([override], part)
        except Exception as e:
            yield str(override.input_line), (override, e)
            continue
        if part is not cfg:
            ConfigLoaderImpl._apply_overrides_to_config([override], cfg)


def _of_missed_choice(override: Override, missed: Mapping[str, str]) -> bool:
    """Whether a value belongs to an option that was not found: then it is not what is wrong."""
    key, _, setting = override.key_or_group.partition(".")
    name = setting.partition(".")[0]
    return key in missed and any(f.name == name for e in entries(missed[key]) for f in fields(e.config))


def _value_problem(override: Override, error: Exception, cfg: DictConfig, slot_of: SlotOf) -> Problem:
    key, cause, value = override.key_or_group, error.__cause__ or error, quoting.written(override)
    named = str(getattr(cause, "full_key", None) or key)
    where = named if named.startswith(f"{key}.") else key  # inside of a section that was given as a whole
    if isinstance(cause, (ConfigAttributeError, ConfigKeyError)):
        return unknown(where, cfg)
    if "does not exist." in str(error) and override.package is None:
        return unknown(key, cfg)
    if override.package is not None:
        groups = sorted({e.role for e in entries()})
        return Problem(where=key, what=f"there is no group '{key}'", hint=near(key, groups))
    above, _, item = key.rpartition(".")
    inside = OmegaConf.select(cfg, above) if above else None
    if override.is_delete() and isinstance(inside, ListConfig):
        return Problem(where=key, what="an item of a list cannot be removed", hint=f"give the list: {above}=[...]")
    if "does not support deletion" in str(cause):
        slot = slot_of(cfg, key)
        hint = f"set it to its default instead: {key}={slot.example}" if slot and slot.example else "set it instead"
        return Problem(where=key, what="is a setting, which can be set but not removed", hint=hint)
    if "An item is already at" in str(error):
        return Problem(where=key, what="is there already", hint=f"leave the '+' out: {key}={value}")
    if "Could not delete from config. The value" in str(error):
        now = OmegaConf.select(cfg, key)
        return Problem(where=key, what=f"is {now} and not {value}, so it is not removed", hint=f"'~{key}' removes it")
    if isinstance(inside, ListConfig):
        what = f"there is no item {item}: the list has {len(inside)}, counted from 0"
        return Problem(where=key, what=what, hint=f"give the whole list: {above}=[...]")
    if slot := slot_of(cfg, where):
        inner, given, slot = innermost(override.value() if where == key else value, slot)
        return refusal(f"{where}.{inner}".rstrip("."), given, slot)
    if key.startswith(f"{named}.") and slot_of(cfg, named):
        hint = f"set it itself: {named}={value}"
        return Problem(where=key, what=f"no such setting: '{named}' is a single value", hint=hint)
    return Problem(where=key, what=first_line(cause), hint=f"the override was: {override.input_line}")


def unknown(key: str, cfg: DictConfig) -> Problem:
    """A key that is not there, told at the first of its parts that is missing."""
    parent, _, leaf = key.rpartition(".")
    while parent and not isinstance(OmegaConf.select(cfg, parent), DictConfig):
        parent, _, leaf = parent.rpartition(".")
    node = OmegaConf.select(cfg, parent) if parent else cfg
    kind = OmegaConf.get_type(node)
    allowed = [f.name for f in fields(kind)] if is_dataclass(kind) else [str(k) for k in node if k != "hydra"]
    if parent:
        other = elsewhere(leaf, parent, cfg)
        hint = other + near(leaf, allowed, "allowed here" if other else "allowed")
        return Problem(where=key, what="no such setting", hint=hint)
    if leaf in allowed:
        return Problem(where=key, what=f"no such setting: '{leaf}' has none inside", hint=f"it is {node.get(leaf)} now")
    what = f"there is no '{leaf}' in this pipeline"
    return Problem(where=key, what=what, hint=near(leaf, allowed, "configured"))


def elsewhere(leaf: str, parent: str, cfg: DictConfig) -> str:
    """Where else a setting of that name stands: `sampler.top_k` is `rollout.top_k`."""

    def plain(name: object) -> str:
        return str(name).replace("_", "").lower()

    if len(leaf) < 3:
        return ""
    found = [
        f"{key}.{name}"
        for key in cfg
        if isinstance(node := cfg._get_node(key), DictConfig) and key not in (parent, "hydra") and not node._is_none()
        for name in node
        if plain(name) == plain(leaf)
    ]
    return f"did you mean {listed(found)}? " if found else ""


def first_line(error: BaseException) -> str:
    if isinstance(error, YAMLError):  # its other lines say where
        return " ".join(str(error).split())
    return str(error).strip().split("\n")[0]
