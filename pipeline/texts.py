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
from omegaconf import DictConfig, OmegaConf
from omegaconf._utils import get_yaml_loader

from pipeline import quoting
from pipeline.slots import Slot

_PACKAGE = re.compile(r"#\s*@package\s+(\S+)")

_MADE = re.compile(r"[\d+.-]|(True|False)$")
"""How a text begins that was made of a number or a truth value."""

SlotOf = Callable[[str], Slot | None]


def keep(cfg: DictConfig, hydra: DictConfig | None, overrides: Sequence[str], slot_of: SlotOf) -> None:
    """Put back what was written for each text setting that a number or truth value was made of.

    `hydra` says of which files the configuration was made; `overrides` are those it was made with.
    """
    given = {o.key_or_group: o for o in quoting.parse(overrides)[0]}
    for key, override in given.items():
        slot = slot_of(key)
        if slot and slot.is_text and isinstance(override.value(), (int, float)) and not override.is_delete():
            OmegaConf.update(cfg, key, quoting.written(override))
    changed = {p: v for p, v in _texts(cfg) if p not in given and _MADE.match(v) and not isinstance(_of_yaml(v), str)}
    if changed and hydra is not None:
        for path, text in _in_files(hydra):
            if path in changed and text != changed[path] and str(_of_yaml(text)) == changed[path]:
                OmegaConf.update(cfg, path, text)


def _texts(node: DictConfig, where: str = "") -> Iterator[tuple[str, str]]:
    """Path and value of every text in the configuration, interpolations left out."""
    for key in node:
        child, path = node._get_node(key), f"{where}{key}"
        if path == "hydra":
            continue
        if isinstance(child, DictConfig) and not child._is_none() and not child._is_missing():
            yield from _texts(child, f"{path}.")
        elif child is not None and isinstance(value := child._value(), str) and not child._is_interpolation():
            yield path, value


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


def _in_files(hydra: DictConfig) -> Iterator[tuple[str, str]]:
    """Config path and text of every plain scalar in the option files that were chosen, in no special order."""
    for key, file in option_files(hydra).items():
        content = file.read_text("utf-8")
        package = (_PACKAGE.search(content) or ["", key.replace("/", ".")])[1]
        root = yaml.compose(content, Loader=yaml.SafeLoader)
        yield from _scalars(root, "" if package == "_global_" else package)


def _scalars(node: yaml.Node | None, where: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from _scalars(value, f"{where}.{key.value}".lstrip("."))
    elif isinstance(node, yaml.ScalarNode) and node.style is None:
        yield where, node.value
