"""The one door to verl: ragged records become its padded [B, T] tensors and back, and its registries are read.

A plan must know which estimators and losses exist and what they take, and must not pay the ten seconds that
importing verl costs. So `estimators()` and `policy_losses()` read verl's source with `ast`, and add what plug-ins
have put into the live registries if verl is loaded already. `core_algos()` loads it: only open stages call it.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from stages.device import send

if TYPE_CHECKING:
    import torch

CORE = "verl.trainer.ppo.core_algos"

AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
"""verl's `loss_agg_mode`: how a [B, T] matrix of token losses becomes one number (core_algos.agg_loss)."""


@dataclass(frozen=True, slots=True)
class Signature:
    """What a registered function takes.

    `required` and `optional` are parameter names; `takes_any` says that it has `**kwargs`. `reads` are the fields
    that its body takes from the parameter `config`. `defaults` holds the literal defaults of optional parameters.
    `own` is False for a function that a plug-in registered, of which only the parameters are known.
    """

    required: tuple[str, ...]
    optional: tuple[str, ...]
    takes_any: bool
    reads: frozenset[str]
    defaults: dict[str, Any]
    own: bool

    def takes(self, name: str) -> bool:
        return name in self.required or name in self.optional or name in self.reads or (self.takes_any and not self.own)


def estimators() -> dict[str, Signature]:
    """Advantage estimators by name; {} if verl is not installed."""
    return _table("register_adv_est", "ADV_ESTIMATOR_REGISTRY")


def policy_losses() -> dict[str, Signature]:
    """Policy losses by name; {} if verl is not installed."""
    return _table("register_policy_loss", "POLICY_LOSS_REGISTRY")


def is_own(function: Any) -> bool:
    """Whether a registered function is verl's, and not a plug-in's under the same name."""
    return getattr(function, "__module__", None) == CORE


def core_algos() -> ModuleType:
    """verl's module of estimators and losses, imported. Python's random state, which the import moves, is kept."""
    state = random.getstate()
    try:
        return importlib.import_module(CORE)
    finally:
        random.setstate(state)


def _table(decorator: str, registry: str) -> dict[str, Signature]:
    table = dict(_written().get(decorator, {}))
    live = getattr(sys.modules.get(CORE), registry, {})
    return table | {str(n): _of_function(f) for n, f in live.items() if not is_own(f)}


def _of_function(function: Any) -> Signature:
    parameters = inspect.signature(function).parameters.values()
    named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    defaults = {p.name: p.default for p in named if p.default is not p.empty}
    required = tuple(p.name for p in named if p.default is p.empty)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return Signature(required, tuple(defaults), takes_any, frozenset(), defaults, own=False)


@lru_cache(maxsize=1)
def _written() -> dict[str, dict[str, Signature]]:
    """Decorator -> registered name -> signature, from the source of the installed verl."""
    spec = importlib.util.find_spec("verl")
    folders = spec.submodule_search_locations if spec else None
    if not folders:
        return {}
    tree = ast.parse(Path(folders[0], *CORE.split(".")[1:]).with_suffix(".py").read_text())
    enums = dict(_enum_values(tree))
    out: dict[str, dict[str, Signature]] = {}
    for function in (n for n in tree.body if isinstance(n, ast.FunctionDef)):
        for d in function.decorator_list:
            if isinstance(d, ast.Call) and isinstance(d.func, ast.Name) and d.args:
                name = _literal(d.args[0], enums.get(ast.unparse(d.args[0])))
                if isinstance(name, str):
                    out.setdefault(d.func.id, {})[name] = _of_source(function)
    return out


def _enum_values(tree: ast.Module) -> Iterator[tuple[str, Any]]:
    """("AdvantageEstimator.GAE", "gae"), ... of every class of constants."""
    for cls in (n for n in tree.body if isinstance(n, ast.ClassDef)):
        for a in cls.body:
            if isinstance(a, ast.Assign) and isinstance(a.targets[0], ast.Name):
                yield f"{cls.name}.{a.targets[0].id}", _literal(a.value)


def _of_source(function: ast.FunctionDef) -> Signature:
    a = function.args
    positional = [*a.posonlyargs, *a.args]
    without = len(positional) - len(a.defaults)
    pairs = [(p.arg, a.defaults[i - without] if i >= without else None) for i, p in enumerate(positional)]
    pairs += [(p.arg, d) for p, d in zip(a.kwonlyargs, a.kw_defaults, strict=True)]
    required = tuple(n for n, d in pairs if d is None)
    defaults = {n: _literal(d) for n, d in pairs if d is not None}
    return Signature(
        required, tuple(defaults), a.kwarg is not None, frozenset(_config_reads(function)), defaults, own=True
    )


def _config_reads(function: ast.FunctionDef) -> Iterator[str]:
    """Fields taken from `config`: `config.x`, `config["x"]` and `config.get("x")`; also from `config.policy_loss`."""
    holders = ("config", "config.policy_loss")
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and _dotted(node.func) in [f"{h}.get" for h in holders] and node.args:
            yield str(_literal(node.args[0]))
        elif isinstance(node, ast.Attribute) and _dotted(node.value) in holders and node.attr != "get":
            yield node.attr
        elif isinstance(node, ast.Subscript) and _dotted(node.value) in holders:
            yield str(_literal(node.slice))


def _dotted(node: ast.expr) -> str:
    """`config.policy_loss` of such a node, and empty of any other; a plan has no time for `ast.unparse`."""
    if isinstance(node, ast.Attribute):
        return f"{inner}.{node.attr}" if (inner := _dotted(node.value)) else ""
    return node.id if isinstance(node, ast.Name) else ""


def _literal(node: ast.expr, otherwise: Any = None) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return otherwise


class Layout:
    """Rows of response tokens as verl wants them: padded on the right to the longest row, [B, T].

    `lengths` int64 [B] counts the tokens of each row; T is at least 1, for verl indexes the last column.
    """

    def __init__(self, lengths: np.ndarray, device: Any = "cpu"):
        self.tokens = int(lengths.sum())
        width = max(int(lengths.max(initial=0)), 1)
        inside = np.arange(width) < np.asarray(lengths)[:, None]
        sent = send(device, inside=inside, places=np.flatnonzero(inside))
        self._inside, self._places = sent["inside"], sent["places"]

    def pad(self, values: np.ndarray | torch.Tensor) -> torch.Tensor:
        """[N] tokens, row after row, to [B, T]; zero elsewhere, and gradients flow back."""
        import torch

        flat = torch.as_tensor(values, device=self._inside.device)
        if flat.shape != (self.tokens,):
            raise ValueError(f"the layout holds {self.tokens} tokens, but {tuple(flat.shape)} values were given")
        return flat.new_zeros(self._inside.shape).masked_scatter(self._inside, flat)

    def unpad(self, padded: torch.Tensor) -> torch.Tensor:
        """[B, T] to [N], the inverse of `pad`."""
        return padded.flatten()[self._places]  # by index: a mask would make the processor ask the device for a count


def group_index(group_id: np.ndarray) -> np.ndarray:
    """int64 [B]: groups numbered from 0 without gaps.

    Some estimators use the index as a position in an array: a large id allocates that much, a negative one fails.
    """
    return np.unique(group_id, return_inverse=True)[1].astype(np.int64)
