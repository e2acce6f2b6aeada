"""A user's Python file with a scoring function: read without running it, loaded, and called as verl calls it."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import math
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from stages.reward.workers import Outcome, Sample, Unscorable, without_gpu

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""What verl hands to a scoring function, by keyword (verl/workers/reward_manager)."""

_PACKAGE = "_headrace_user_reward"
_LARGEST = float(np.finfo(np.float32).max)


# -- before anything runs ----------------------------------------------------------------------------------------


def flaws(path: Path, name: str, extra: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """What is wrong with the file, from its text alone: ('path' or 'name', what, hint)."""
    if not path.is_file():
        yield "path", f"'{path}' is not a file", "a Python file with a scoring function"
        return
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except (SyntaxError, ValueError) as e:
        yield "path", f"'{path}' is not Python: {e}", ""
        return
    found, open_ended = _names(tree)
    if name not in found and not open_ended:
        yield "name", f"'{path}' defines no '{name}'", f"it defines: {', '.join(found) or 'nothing'}"
    if isinstance(function := found.get(name), ast.arguments):
        yield from _signature_flaws(name, function, {*ARGUMENTS, *extra})


def _names(tree: ast.Module) -> tuple[dict[str, ast.arguments | None], bool]:
    """Module-level names (with the arguments where a plain function is seen), and whether there may be others."""
    names: dict[str, ast.arguments | None] = {}
    open_ended = False
    for node in _statements(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            names[node.name] = None if node.decorator_list else node.args
        elif isinstance(node, ast.ClassDef):
            names[node.name] = None
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(a.asname or a.name).split(".")[0]: None for a in node.names if a.name != "*"}
            open_ended |= any(a.name == "*" for a in node.names)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            args = node.value.args if isinstance(node.value, ast.Lambda) else None
            names |= {n.id: args for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}
    return names, open_ended


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Those that run at import: also inside if, try, with and loops, not inside functions and classes."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            yield from _statements(child)


def _signature_flaws(name: str, args: ast.arguments, given: set[str]) -> Iterator[tuple[str, str, str]]:
    known = [a.arg for a in (*args.args, *args.kwonlyargs)]
    optional = {a.arg for a in args.args[len(args.args) - len(args.defaults) :]} if args.defaults else set()
    optional |= {a.arg for a, d in zip(args.kwonlyargs, args.kw_defaults, strict=True) if d is not None}
    hint = f"it is called as {name}({', '.join(f'{g}=...' for g in sorted(given))})"
    if refused := sorted(given - set(known)) if not args.kwarg else []:
        yield "name", f"'{name}' does not take {', '.join(refused)}", f"{hint}; add them, or **kwargs"
    positional = [a.arg for a in args.posonlyargs]
    if unfed := positional + [k for k in known if k not in given and k not in optional]:
        yield "name", f"'{name}' needs {', '.join(unfed)}, which nothing gives", f"{hint}; more come by kwargs"


# -- in the worker -----------------------------------------------------------------------------------------------


class FunctionScorer:
    """Calls the function once a row. A coroutine function runs in one event loop for all rows."""

    def __init__(self, path: str, name: str, kwargs: dict[str, Any], correct_at: float):
        import asyncio  # a tenth of a second that planning can do without

        self._name, self._kwargs, self._correct_at = name, kwargs, correct_at
        self._function = load(Path(path), name)
        self._loop = asyncio.Runner()

    def __call__(self, sample: Sample) -> Outcome:
        given = {
            "data_source": sample.data_source,
            "solution_str": sample.response,
            "ground_truth": sample.answer,
            "extra_info": sample.extra,
        }
        value = self._function(**(given | self._kwargs))
        if inspect.iscoroutine(value):
            value = self._loop.run(value)
        return self._read(value, sample.row_id)

    def _read(self, value: Any, row: int) -> Outcome:
        whole = value if isinstance(value, Mapping) else {"score": value}
        if "score" not in whole:
            raise Unscorable(f"{self._name} returned an object without 'score' for row {row}; it has: {_listed(whole)}")
        if whole["score"] is None:
            raise Unscorable(f"{self._name} abstained on row {row}")
        score = _number(whole["score"])
        if score is None:
            raise Unscorable(f"{self._name} returned {_shown(whole['score'])} for row {row}, not a finite number")
        accuracy = float(score >= self._correct_at) if whole.get("acc") is None else _number(whole["acc"])
        if accuracy is None or not 0 <= accuracy <= 1:
            raise Unscorable(f"{self._name} returned acc {_shown(whole['acc'])} for row {row}, not a number in 0..1")
        others = {str(k): _number(v) for k, v in whole.items() if k not in ("score", "acc")}
        return Outcome(score=score, accuracy=accuracy, parts={k: v for k, v in others.items() if v is not None})


def load(path: Path, name: str) -> Any:
    """The function of the file. ImportError if the file does not run, or does not define it.

    The file becomes a module of a private package, whose folder is the file's: it may be called `json.py`
    without hiding the standard library's, `from . import helper` finds its neighbours, and so does
    `import helper`, after everything that is installed. A worker loads it once (verl issue 3150).
    """
    package = types.ModuleType(_PACKAGE)
    package.__path__ = [str(path.parent)]
    sys.modules[_PACKAGE] = package
    sys.path.append(str(path.parent))
    stem = path.stem if path.stem.isidentifier() else "file"
    spec = importlib.util.spec_from_file_location(f"{_PACKAGE}.{stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"the reward file '{path}' must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look a class's module up there
    try:
        spec.loader.exec_module(module)
    except BaseException as e:  # SystemExit too
        raise ImportError(without_gpu(f"the reward file '{path}' does not run: {type(e).__name__}: {e}")) from e
    function = getattr(module, name, None)
    if not callable(function):
        raise ImportError(f"the reward file '{path}' defines no function '{name}'")
    return function


def _number(value: Any) -> float | None:
    """As a float that float32 can hold, or None: text and containers are no numbers, whatever they hold."""
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        return None
    try:
        out = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # e.g. an array of several values
        return None
    return out if math.isfinite(out) and abs(out) <= _LARGEST else None


def _shown(value: Any) -> str:
    kind = type(value).__name__
    text = repr(value)
    return f"{text if len(text) <= 80 else text[:80] + '...'} ({kind})"


def _listed(keys: Mapping[Any, Any]) -> str:
    return ", ".join(map(str, keys)) or "nothing"
