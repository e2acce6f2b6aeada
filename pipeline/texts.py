"""Text settings hold the text that was written.

Hydra's grammar and YAML give numbers and truth values for some words: the name `1E234` would become `1e+234`, the
answer `no` would become `False`. Where a setting takes text, the characters in the file or on the command line count.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import AnyNode, DictConfig, OmegaConf
from omegaconf._utils import get_yaml_loader

from pipeline import quoting
from pipeline.errors import Problem
from pipeline.slots import Slot, refusal

_PACKAGE = re.compile(r"#\s*@package\s+(\S+)")

_MADE = re.compile(r"[\d+.-]|(True|False)$")
"""How a text begins that was made of a number or a truth value."""

SlotOf = Callable[[str], Slot | None]


def keep(cfg: DictConfig, hydra: DictConfig | None, overrides: Sequence[str], slot_of: SlotOf) -> list[Problem]:
    """Put back what was written for each text setting that a number or truth value was made of. What is given back
    are numbers and truth values that a file does not mean as they look.

    `hydra` says of which files the configuration was made; `overrides` are those it was made with.
    """
    given = {o.key_or_group: o for o in quoting.parse(overrides)[0] if not o.is_delete()}
    for key, override in given.items():
        for path, text in _numbers(key, override.value(), lambda o=override: quoting.as_written(o)):
            if (slot := slot_of(path)) and slot.is_text:
                OmegaConf.update(cfg, path, text)
    changed = {p: v for p, v in _texts(cfg) if p not in given and _MADE.match(v) and not isinstance(_of_yaml(v), str)}
    written = list(_in_files(hydra)) if hydra is not None else []
    for path, text, _ in written:
        was_made = path in changed and text != changed[path] and str(_of_yaml(text)) == changed[path]
        if was_made and (slot := slot_of(path)) and slot.is_text:
            OmegaConf.update(cfg, path, text)
    return [p for path, text, file in written if (p := _misread(cfg, path, text, file, slot_of))]


def _numbers(key: str, value: Any, as_written: Callable[[], Any]) -> Iterator[tuple[str, str]]:
    """Path and text of each number and truth value in what an override gives."""
    if isinstance(value, (dict, list)):
        texts = as_written()
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _numbers(f"{key}.{name}", item, lambda t=texts, n=name: t[n])
    elif isinstance(value, (int, float)):
        yield key, str(as_written())


_NOT_AS_IT_LOOKS = re.compile(r"[-+]?0[0-7_]*[0-7]|[-+]?\d[\d_]*(:[0-5]?\d)+(\.\d*)?")
"""What YAML 1.1 reads as octal (010 is 8) and sexagesimal (1:30 is 90) numbers."""


def _misread(cfg: DictConfig, path: str, text: str, file: Path, slot_of: SlotOf) -> Problem | None:
    """A number that is another one than it looks like, or stands for true or false, and counts in the end."""
    value = _of_yaml(text)
    odd = bool(_NOT_AS_IT_LOOKS.fullmatch(text)) and len(text) > 1
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (odd or value not in (0, 1)):
        return None
    slot, now = slot_of(path), OmegaConf.select(cfg, path, throw_on_resolution_failure=False)
    if slot and slot.is_truth and now is bool(value) and value not in (0, 1):
        return refusal(path, value, slot)
    if slot and slot.is_number and odd and now == value:
        what = f"'{text}', in {file}, is {value} in YAML, and does not look like it"
        return Problem(
            where=path, what=what, hint=f"write {value}, or the number that is meant, without a leading 0 or ':'"
        )
    return None


def _texts(node: DictConfig, where: str = "") -> Iterator[tuple[str, str]]:
    """Path and value of every text in the configuration, and of what may be text; interpolations left out."""
    for key in node:
        child, path = node._get_node(key), f"{where}{key}"
        if path == "hydra":
            continue
        if isinstance(child, DictConfig) and not child._is_none() and not child._is_missing():
            yield from _texts(child, f"{path}.")
        elif child is None or child._is_interpolation():
            continue
        elif isinstance(value := child._value(), str) or isinstance(child, AnyNode):
            yield path, str(value)


def _of_yaml(text: str) -> Any:
    """What a plain scalar becomes; the text itself if it is none."""
    try:
        return yaml.load(text, Loader=get_yaml_loader())
    except yaml.YAMLError:
        return text


def option_files(hydra: DictConfig) -> dict[str, Path]:
    """The file of each option that was chosen, by the config key that it is for; of conf/config.yaml by ''."""
    folders = [Path(s.path) for s in hydra.runtime.config_sources if s.schema == "file"]
    options = {key: f"{key.partition('@')[0]}/{option}" for key, option in hydra.runtime.choices.items() if option}
    found = {
        key.rpartition("@")[2]: next((f for folder in folders if (f := folder / f"{option}.yaml").is_file()), None)
        for key, option in {"": "config", **options}.items()
    }
    return {key: file for key, file in found.items() if file}


def shadowed(hydra: DictConfig) -> Iterator[Problem]:
    """Options that were chosen and that two folders have: Hydra takes the first, which is not that of --config-dir."""
    folders = [Path(s.path) for s in hydra.runtime.config_sources if s.schema == "file"]
    options = {key: f"{key.partition('@')[0]}/{option}" for key, option in hydra.runtime.choices.items() if option}
    for key, option in {"--config-dir": "config", **options}.items():
        first, *others = [f for folder in folders if (f := folder / f"{option}.yaml").is_file()] or [None]
        if others:
            what = f"{option}.yaml stands in two folders, and {others[0]} would not count: {first} comes first"
            hint = "give yours another name, and let it begin with what it builds on: defaults: [OPTION, _self_]"
            yield Problem(where=key, what=what, hint=hint)


def _in_files(hydra: DictConfig) -> Iterator[tuple[str, str, Path]]:
    """Config path, text and file of every plain scalar in the option files that were chosen, in no special order."""
    for key, file in option_files(hydra).items():
        content = file.read_text("utf-8")
        package = (_PACKAGE.search(content) or ["", key.replace("/", ".")])[1]
        root = yaml.compose(content, Loader=yaml.SafeLoader)
        for path, text in _scalars(root, "" if package == "_global_" else package):
            yield path, text, file


def _scalars(node: yaml.Node | None, where: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from _scalars(value, f"{where}.{key.value}".lstrip("."))
    elif isinstance(node, yaml.ScalarNode) and node.style is None:
        yield where, node.value
