"""What a plan checks beyond types and edges, and what it tells."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeline import machine, plan, registry
from pipeline.errors import PlanError
from pipeline.machine import Memory
from pipeline.plan import changed
from pipeline.registry import backend
from pipeline.stage import Component, Stage, setting
from tests.pipeline.conftest import problems, toy_plan
from tests.pipeline.stages_for_tests import (
    ExactScaleConfig,
    NegateScorer,
    Numbers,
    Scale,
    Scores,
)


def test_a_plan_tells_what_will_run() -> None:
    made = toy_plan("double=streaming", "double.most=2", "+placement.double=process", "mode=plan")
    told = json.loads(json.dumps(made.plain()))
    assert told["order"] == ["source", "double", "second", "scorer", "learner", "judge"]
    assert told["nodes"]["double"] == {
        "role": "double",
        "backend": "streaming",
        "placement": "process",
        "grain": "row",
        "inputs": {"numbers": "source"},
        "output": "Numbers",
        "components": {"scale": "exact"},
        "changed": {"most": 2},
        "sizes": {},
        "memory": {},
    }
    assert told["facts"] == {"rows_per_step": 6}
    assert list(made.nodes) == [*told["order"], "eval_source"]


def test_the_facts_of_an_evaluation_node_are_not_those_of_training() -> None:
    assert toy_plan("eval_source.groups=50").facts == {"rows_per_step": 6}
    assert toy_plan("source.groups=50").facts == {"rows_per_step": 100}


def test_a_part_checks_itself_with_the_facts_of_the_others() -> None:
    found = problems("double.limit=5")
    assert list(found) == ["double.limit"]
    assert found["double.limit"].what == "5 is less than the 6 rows of a step"


def test_a_part_that_breaks_does_not_hide_what_others_say(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: object, facts: object) -> object:
        raise KeyError("tokens")

    for method in ("check", "facts"):
        with monkeypatch.context() as patched:
            patched.setattr(NegateScorer, method, broken if method == "check" else lambda self: broken(self, None))
            found = problems("double.limit=5")
            assert set(found) == {"double.limit", "scorer", "second"}
            assert found["scorer"].what == "the stage itself broke while it was planned: KeyError: 'tokens'"
            assert f"raised at {__file__}:" in found["scorer"].hint


GIB = 2**30


def of_memory(monkeypatch: pytest.MonkeyPatch, there: Memory | None, **bytes_of: int) -> None:
    """Every scorer (there are two) says that it needs so much, and the machine has so much."""
    told = {name.replace("host_", "host/"): size for name, size in bytes_of.items()}
    monkeypatch.setattr(NegateScorer, "memory", lambda self, facts: told)
    monkeypatch.setattr(machine, "host", lambda: there)


def test_memory_is_added_up_for_each_device(monkeypatch: pytest.MonkeyPatch) -> None:
    of_memory(monkeypatch, Memory(64 * GIB, 32 * GIB), weights=GIB, host_snapshot=2 * GIB)
    monkeypatch.setattr(plan, "has_cuda", lambda: True)
    monkeypatch.setattr(machine, "cuda", lambda: Memory(80 * GIB, 80 * GIB))
    made = toy_plan()
    assert made.estimates.memory == {n: {"weights": GIB, "host/snapshot": 2 * GIB} for n in ("scorer", "second")}
    assert made.estimates.needed() == {
        d: dict.fromkeys(("scorer", "second"), n) for d, n in (("cuda", GIB), ("cpu", 2 * GIB))
    }
    told = json.loads(json.dumps(made.plain()))
    assert told["memory"]["needed"] == {"cuda": 2 * GIB, "cpu": 4 * GIB}
    assert told["memory"]["there"]["cuda"] == {"total": 80 * GIB, "free": 80 * GIB}
    assert told["nodes"]["scorer"]["memory"] == {"weights": GIB, "host/snapshot": 2 * GIB}
    on_host = toy_plan("run.device=cpu")
    assert on_host.estimates.needed() == {"cpu": dict.fromkeys(("scorer", "second"), 3 * GIB)}


def test_what_is_held_all_the_time_must_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    of_memory(monkeypatch, Memory(10 * GIB, 9 * GIB), weights=2 * GIB, optimizer=4 * GIB)
    found = problems()
    assert found["scorer"].what == "weights, gradients, optimizer of all nodes need 12.9 GB, and cpu has 10.7 GB"
    assert "scorer 6.4 GB, second 6.4 GB" in found["scorer"].hint
    assert [(p.where, p.level) for p in toy_plan("mode=plan").problems] == [("scorer", "warning")]


def test_what_may_not_fit_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    of_memory(monkeypatch, Memory(10 * GIB, 5 * GIB), weights=GIB, kv_cache=2 * GIB)
    [warning] = toy_plan().problems
    assert (warning.level, warning.what) == ("warning", "the run may need 6.4 GB, and 5.4 GB of cpu are free")
    of_memory(monkeypatch, Memory(10 * GIB, 7 * GIB), weights=GIB, kv_cache=2 * GIB)
    assert toy_plan().problems == ()
    of_memory(monkeypatch, None, weights=GIB, kv_cache=2 * GIB)
    assert toy_plan().problems == (), "where nothing is known of the machine, nothing is said of it"


def test_a_part_is_told_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(NegateScorer, "sizes", lambda self, facts: seen.append(facts) or {"rows a step": 6})
    monkeypatch.setattr(machine, "cuda", lambda: None)
    made = toy_plan("run.device=cuda", "mode=plan")
    assert {(f.key, f.device, f.device_memory) for f in seen} == {("scorer", "cuda", None), ("second", "cuda", None)}
    assert made.estimates.sizes == {"scorer": {"rows a step": 6}, "second": {"rows a step": 6}}


def test_placement_of_an_unknown_node() -> None:
    found = problems("+placement.scoer=process", "+placement.scale=process")
    assert set(found) == {"placement.scoer", "placement.scale"}
    assert found["placement.scoer"].hint.startswith("did you mean 'scorer'?")


def test_a_missing_component_and_runner() -> None:
    found = problems("~scale", "~runner", "double.limit=0")
    assert set(found) == {"scale", "runner", "double.limit"}
    assert found["scale"].what == "is missing"
    assert "scale=exact" in found["scale"].hint
    assert "scale=rough" in found["scale"].hint
    assert "runner=sync" in found["runner"].hint


def test_a_component_of_another_role() -> None:
    found = problems("~scale", "+tracker@scale=recording")
    assert found["scale"].what == "must be a scale, but tracker=recording is configured here"


def test_capabilities_both_ways() -> None:
    found = problems("scale=rough", "scale.factor=1")
    assert {w: (p.what, p.hint) for w, p in found.items()} == {
        "double": ("double=whole needs 'exactness', which scale=rough does not provide", "these do: scale=exact"),
        "scale": ("scale=rough needs 'patience', which double=whole does not provide", "these do: (nothing)"),
    }


def test_a_component_that_nothing_takes_is_a_warning() -> None:
    made = toy_plan("+scale@other=exact")
    assert [(p.where, p.level) for p in made.problems] == [("other", "warning")]


@dataclass(slots=True, kw_only=True)
class HeavyScorerConfig:
    rows: int = setting(4, min=1, doc="rows at once")


@dataclass(slots=True, kw_only=True)
class OtherScorerConfig:
    rows: int = setting(4, min=1, doc="rows at once")


def test_requirements_are_warnings_in_a_plan_and_errors_in_a_run(
    registered: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    cls: type = NegateScorer
    monkeypatch.setattr(cls, "requires", ("json", "a_package_nobody_has", "device:cuda"))
    monkeypatch.setattr(plan, "has_cuda", lambda: False)
    found = problems()
    assert found["scorer"].what == "scorer=negate needs the package 'a_package_nobody_has', which is not installed"
    made = toy_plan("mode=plan")
    told = [(p.where, p.level) for p in made.problems]
    assert told == [("scorer", "warning")] * 2 + [("second", "warning")] * 2
    assert any("CUDA device" in p.what for p in made.problems)
    monkeypatch.setattr(plan, "has_cuda", lambda: True)
    assert not any("CUDA device" in p.what for p in toy_plan("mode=plan").problems)
    assert any("CUDA device" in p.what for p in toy_plan("mode=plan", "run.device=cpu").problems)


def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "has_cuda", lambda: False)
    assert problems("run.device=cuda")["run.device"].what == "is cuda, and there is no CUDA device"
    assert [(p.where, p.level) for p in toy_plan("run.device=cuda", "mode=plan").problems] == [
        ("run.device", "warning")
    ]
    assert toy_plan("run.device=auto").problems == toy_plan("run.device=cpu").problems == ()
    monkeypatch.setattr(plan, "has_cuda", lambda: True)
    assert toy_plan("run.device=cuda").configured.plain()["run"]["device"] == "cuda"


def test_changed_settings() -> None:
    assert changed(ExactScaleConfig()) == {}
    assert changed(ExactScaleConfig(factor=3.0)) == {"factor": 3.0}


# -- the registry --------------------------------------------------------------------------------------------


def test_registering_checks_the_shape(registered: None) -> None:
    with pytest.raises(TypeError, match="registered as role 'scorer' but extends role 'scale'"):

        @backend("scorer", "misfit")
        class Misfit(Scale):
            def __init__(self, cfg: HeavyScorerConfig): ...

    with pytest.raises(TypeError, match="first constructor parameter of NoConfig must be annotated"):

        @backend("scorer", "bare")
        class NoConfig(Stage):
            def __init__(self, cfg: int): ...

    with pytest.raises(TypeError, match="first constructor parameter of Nothing must be annotated"):

        @backend("scorer", "nothing")
        class Nothing(Stage):
            def __init__(self) -> None: ...


def test_names_of_backends_and_configs_are_unique(registered: None) -> None:
    @backend("scorer", "heavy")
    class Heavy(Stage):
        def __init__(self, cfg: HeavyScorerConfig): ...

        def run(self, numbers: Numbers) -> Scores: ...  # type: ignore[empty-body]

    entry = registry.entry_of(HeavyScorerConfig)
    assert entry is not None
    assert (str(entry), entry.cls) == ("scorer=heavy", Heavy)
    assert Heavy.backend == "heavy"
    assert Heavy.role == "scorer"
    with pytest.raises(ValueError, match=r"scorer=heavy is registered twice: .*test_plan\.py:\d+ and .*\.py:\d+"):

        @backend("scorer", "heavy")
        class Other(Stage):
            def __init__(self, cfg: OtherScorerConfig): ...

    with pytest.raises(ValueError, match="config class HeavyScorerConfig is registered twice"):

        @backend("scale", "heavier")
        class Same(Component):
            def __init__(self, cfg: HeavyScorerConfig): ...


def test_a_module_that_does_not_import_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no plug-in's fault if no plug-in named it."""
    (tmp_path / "own_stages").mkdir()
    (tmp_path / "own_stages" / "__init__.py").write_text("")
    (tmp_path / "own_stages" / "broken.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    for named, where in (("", "own_stages.broken"), ("plugins", "plugins")):
        with pytest.raises(PlanError) as caught:
            registry.discover("own_stages", named)
        assert [(p.where, "ZeroDivisionError" in p.what) for p in caught.value.problems] == [(where, True)]


def test_settings_do_not_share_lists() -> None:
    @dataclass(slots=True, kw_only=True)
    class Config:
        names: list[str] = setting(["a"], doc="names")

    one, two = Config(), Config()
    one.names.append("b")
    assert two.names == ["a"]
