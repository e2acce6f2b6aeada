"""The shape of the project: light imports, layers, one file and one YAML a backend, everything documented."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pipeline import registry
from pipeline.stage import Part

ROOT = Path(__file__).resolve().parents[2]
CONF = ROOT / "conf"
HEAVY = ("torch", "vllm", "ray", "verl", "transformers", "tensordict", "flashinfer")
for package in ("pipeline.runner", "stages"):
    registry.discover(package)
OURS = [e for e in registry.entries() if e.cls.__module__.startswith(("stages.", "pipeline."))]
ROLES = {e.role for e in OURS}
NOT_BACKENDS = {"pipeline", "experiment", "task", "sweep"}
"""Groups of `conf/` that compose other groups."""


@pytest.mark.parametrize("overrides", [[], ["pipeline=grpo", "runner=overlap"], ["rollout=vllm_async", "mode=plan"]])
def test_planning_loads_nothing_heavy(overrides: list[str]) -> None:
    script = (
        "import sys; from pipeline import plan, entry, run_dir, show; from pipeline.config import parse;"
        "from pipeline.errors import PlanError\n"
        "try: plan.make(parse(sys.argv[1:]))\n"
        "except PlanError as e: print(e, file=sys.stderr)\n"
        f"print(*[m for m in {HEAVY} if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", script, *overrides], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == []


def test_only_one_module_knows_the_configuration_library() -> None:
    """`pipeline.config` and its three helpers compose; `pipeline.entry` hands over to `hydra.main`; two modules ask
    Hydra about sweeps.

    No DictConfig goes further.
    """
    users = {p.relative_to(ROOT).as_posix() for p in sources() if imported(p) & {"hydra", "omegaconf"}}
    of_sweeps = {"pipeline/launching.py", "pipeline/sweep/points.py"}
    of_composing = {"pipeline/compose.py", "pipeline/quoting.py", "pipeline/texts.py"}
    assert users <= {"pipeline/config.py", "pipeline/entry.py", *of_composing, *of_sweeps}


def test_layers() -> None:
    """The contracts of pyproject.toml, by import-linter."""
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout


def sources(*folders: str) -> list[Path]:
    return [p for f in folders or ("pipeline", "stages") for p in sorted((ROOT / f).rglob("*.py"))] + [ROOT / "run.py"]


def imported(path: Path) -> set[str]:
    """Top-level packages that a file imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {a.name.partition(".")[0] for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
    return names


# -- one file and one YAML a backend -------------------------------------------------------------------------


def options() -> list[Path]:
    return sorted(p for p in CONF.glob("*/*.yaml") if p.parent.name not in NOT_BACKENDS)


def test_backends_and_options_are_the_same() -> None:
    assert {f"{p.parent.name}={p.stem}" for p in options()} == {str(e) for e in OURS}


@pytest.mark.parametrize("path", options(), ids=lambda p: f"{p.parent.name}={p.stem}")
def test_an_option_extends_its_schema_and_changes_what_the_schema_has(path: Path) -> None:
    content = yaml.safe_load(path.read_text())
    role, name = path.parent.name, path.stem
    assert content["defaults"] == [f"/schema/{role}/{name}@_here_", "_self_"]
    [entry] = [e for e in OURS if (e.role, e.name) == (role, name)]
    assert content.keys() - {"defaults"} <= {f.name for f in dataclasses.fields(entry.config)}


def test_no_import_path_stands_in_a_configuration() -> None:
    for path in sorted(CONF.rglob("*.yaml")):
        assert "_target_" not in path.read_text(), path


@pytest.mark.parametrize("entry", OURS, ids=str)
def test_a_backend_is_one_file_of_its_role(entry: registry.Entry) -> None:
    own = Path(entry.origin.partition(":")[0]).relative_to(ROOT)
    assert own.stem == entry.name
    assert own.parent.name == entry.role
    assert len([e for e in OURS if e.cls.__module__ == entry.cls.__module__]) == 1


NAMED_ELSEWHERE = {
    # Words that are backend names and also mean something else: the library, a file format, a device kind, a role.
    "torch",
    "verl",
    "hf",
    "none",
    "function",
    "process",
    "standard",
    "memory",
    "model",
}


@pytest.mark.parametrize("entry", OURS, ids=str)
def test_no_backend_is_named_outside_its_own_file(entry: registry.Entry) -> None:
    """As a string constant (docstrings are free to explain), as `role=name`, or by importing its class."""
    own = Path(entry.origin.partition(":")[0])
    telling = {str(entry)} | (set() if entry.name in NAMED_ELSEWHERE else {entry.name})
    for path in sources():
        if path == own:
            continue
        tree = ast.parse(path.read_text())
        docs = {id(d) for n in ast.walk(tree) if isinstance(n, ast.Expr) for d in [n.value]}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
                assert node.value not in telling, f"{path}:{node.lineno} names {entry}"
            if isinstance(node, ast.ImportFrom):
                assert node.module != entry.cls.__module__, f"{path}:{node.lineno} imports {entry}"


# -- documentation -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", OURS, ids=str)
def test_every_backend_and_setting_is_documented(entry: registry.Entry) -> None:
    assert own_doc(entry.cls), f"{entry.cls.__name__} has no docstring"
    assert own_doc(entry.config), f"{entry.config.__name__} has no docstring"
    undocumented = [f.name for f in dataclasses.fields(entry.config) if not f.metadata.get("doc")]
    assert undocumented == []


def own_doc(cls: type) -> str:
    """The docstring that stands in the class itself; a dataclass makes one up from its signature."""
    doc = cls.__dict__.get("__doc__") or ""
    return "" if doc.startswith(f"{cls.__name__}(") else doc


@pytest.mark.parametrize("role", sorted(ROLES))
def test_every_role_says_its_contract(role: str) -> None:
    contracts = {c for e in OURS if e.role == role for c in e.cls.__mro__ if c.__dict__.get("role") == role}
    abstract = [c for c in contracts if inspect.isabstract(c) or c not in {e.cls for e in OURS}]
    assert any(own_doc(c) for c in abstract)
    assert all(issubclass(c, Part) for c in contracts)


def test_every_module_of_the_framework_is_documented() -> None:
    for path in sources():
        assert ast.get_docstring(ast.parse(path.read_text())), path
