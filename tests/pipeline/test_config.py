"""A command line becomes dataclasses, or a list of everything that is wrong with it."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from pipeline import plan
from pipeline.config import parse, to_yaml
from pipeline.errors import PlanError, Problem
from tests.pipeline.conftest import PLUGINS, TOY, problems, toy_plan


def one(*overrides: str) -> Problem:
    found = problems(*overrides)
    assert len(found) == 1, found
    return next(iter(found.values()))


def config_of(node: str, *overrides: str) -> object:
    return toy_plan(*overrides).nodes[node].config


def test_overrides_reach_the_dataclasses() -> None:
    made = toy_plan("source.groups=7", "double=streaming", "double.delay_s=1e-3", "seed=4", "scorer.fail_at=2")
    assert made.nodes["source"].config.groups == 7
    assert made.nodes["double"].cls.backend == "streaming"
    assert made.nodes["double"].config.delay_s == 0.001
    assert made.nodes["scorer"].config.fail_at == 2
    assert made.nodes["second"].config.fail_at == -1, "a second node of a role has settings of its own"
    assert made.root.seed == 4


def test_values_with_special_characters_arrive_exactly() -> None:
    assert config_of("source", r"source.path=a/epoch\=3") == config_of("source", "source.path='a/epoch=3'")
    assert config_of("source", 'source.path="a#b%@*, é"').path == "a#b%@*, é"  # type: ignore[attr-defined]


def test_a_misspelt_setting_is_refused_however_it_is_given() -> None:
    """Hydra itself lets `+key` through."""
    found = problems("double.limitt=3", "+double.limits=3", "++double.limi=3", "++run.stepps=3", "graph.forwrad=3")
    assert set(found) == {"double.limitt", "double.limits", "double.limi", "run.stepps", "graph.forwrad"}
    assert {p.what for p in found.values()} == {"no such setting"}
    assert found["double.limitt"].hint == "did you mean 'limit'? allowed: limit"
    assert all("did you mean" in p.hint for p in found.values())


def test_a_new_key_at_the_top_needs_a_schema() -> None:
    problem = one("+evall=3")
    assert problem.what == "no such setting"
    assert "did you mean 'eval'?" in problem.hint
    assert "+GROUP@evall=OPTION" in problem.hint


def test_a_setting_of_a_part_that_is_not_there() -> None:
    found = problems("critic.lr=1", "scorr.delay_s=1", "scorer.deep.er=1")
    assert found["critic.lr"].what == "there is no 'critic' in this pipeline"
    assert found["critic.lr"].hint.startswith("configured: compare, double, eval, eval_source, graph, judge")
    assert found["scorr.delay_s"].hint.startswith("did you mean 'scorer'? configured: ")
    assert found["scorer.deep.er"].hint == "allowed: delay_s, die_at, fail_at"


def test_a_misspelt_group_and_option() -> None:
    found = problems("dobule=whole", "double=streming", "source@eval_source=countin", "+scorer@third=negat")
    assert set(found) == {"dobule", "double", "source@eval_source", "scorer@third"}
    assert found["dobule"].hint.startswith("did you mean 'double'?")
    assert found["double"].what == "there is no 'streming' in the group 'double'"
    assert found["double"].hint == "did you mean 'streaming'? allowed: awkward, streaming, whole"


def test_a_misspelt_pipeline_or_recipe_is_refused() -> None:
    for override, group in (("pipeline=pp0", "pipeline"), ("experiment=gsm8kk", "experiment")):
        with pytest.raises(PlanError) as caught:
            plan.make(parse([override, "mode=plan"]))
        assert f"in the group '{group}'" in str(caught.value)


WRONG_TYPES = {
    "double.limit=1.5": (
        "1.5 is not a whole number",
        "must be a whole number >= 1 (most rows a step), such as double.",
    ),
    "source.groups=many": ("'many' is not a whole number", "must be a whole number >= 0"),
    "source.group_size=null": ("null is not a whole number", "must be a whole number"),
    "scorer.fail_at.x=3": ("no such setting: 'scorer.fail_at' is a single value", "set it itself: scorer.fail_at=3"),
    "second.delay_s=[1]": ("[1] is not a number", "must be a number >= 0"),
    "seed=abc": ("'abc' is not a whole number", "must be a whole number >= 0"),
    "mode=pln": ("'pln' is not allowed", "did you mean 'plan'? allowed: compare, diff, plan, run"),
    "run.device=tpu": ("'tpu' is not allowed", "did you mean 'cpu'? allowed: auto, cpu, cuda"),
    "placement.double=remote": ("'remote' is not allowed", "allowed: local, process"),
    "eval=3": ("is a section, and '3' is a single value", "its keys: every"),
    "source.path=${nope}": (
        "Interpolation key 'nope' not found",
        r"for a literal '${' write '\${' (its value is ${nope})",
    ),
    "eval_source.path=a=b": ("the value 'a=b' cannot be read: '='", """'eval_source.path="a=b"'"""),
    "run.steps=[1": ("the value '[1' cannot be read", "a list is written 'run.steps=[a,b]'"),
}


def test_wrong_types_are_all_reported() -> None:
    found = problems(*WRONG_TYPES)
    assert set(found) == {o.partition("=")[0] for o in WRONG_TYPES}
    for override, (what, hint) in WRONG_TYPES.items():
        problem = found[override.partition("=")[0]]
        assert what in problem.what
        assert hint in problem.hint


def test_values_out_of_range_are_all_reported() -> None:
    rules = {
        "double.limit=0": "must be >= 1: most rows a step",
        "scale.factor=nan": "must be > 0 and <= 100: times",
        "source.groups=-1": "must be >= 0: groups a step",
        "run.steps=-1": "must be >= 0: training steps",
        "seed=-1": "must be >= 0: all randomness of a run derives from it",
        "learner.lr=0": "must be > 0: step size",
    }
    found = problems(*rules)
    assert set(found) == {o.partition("=")[0] for o in rules}
    for override, rule in rules.items():
        path, _, value = override.partition("=")
        assert found[path].what in (f"{value} is not allowed", f"{float(value)} is not allowed")
        assert found[path].hint == rule


@pytest.mark.parametrize("value", ["0", "-1", "100.1", "inf"])
def test_bounds(value: str) -> None:
    assert one(f"scale.factor={value}").what == f"{float(value)} is not allowed"


def test_bounds_are_inclusive_where_they_should_be() -> None:
    assert toy_plan("scale.factor=100", "double.limit=6").nodes["double"].config.limit == 6


def test_nan_is_refused_without_a_range_too() -> None:
    assert problems("scale=rough", "scale.factor=nan")["scale.factor"].what == "nan is not allowed"


def test_a_value_that_must_be_given() -> None:
    assert one("scale=rough") == Problem(where="scale.factor", what="must be given", hint="times")


def test_several_problems_are_all_reported() -> None:
    found = problems(
        "seed=abc", "mode=pln", "dobule=whole", "double.limitt=3", "+run.foo=1", "scale.factor=nan", "eval=3",
        "source=conting", "placement.nobody=process", "scorer.delay_s=-1", "~graph.forward.second", "double.limit=1",
    )  # fmt: skip
    assert set(found) == {
        "seed", "mode", "dobule", "double.limitt", "run.foo", "scale.factor", "eval", "source", "placement.nobody",
        "scorer.delay_s", "second", "graph.forward.judge.extra", "double.limit",
    }  # fmt: skip


def test_the_order_of_overrides_does_not_matter_for_what_is_reported() -> None:
    """`delay_s` exists only once the other backend is chosen; one bad override does not take it along."""
    assert list(problems("double.delay_s=0.5", "double=streaming", "seed=x")) == ["seed"]


def test_a_node_can_be_taken_out() -> None:
    found = problems("~graph.forward.judge")
    assert set(found) == {"judge", "graph.learn.learner.judged"}
    assert "~judge" in found["judge"].hint
    made = toy_plan("~graph.forward.judge", "~judge", "graph.learn.learner.judged=scorer")
    assert sorted(made.graph.forward) == ["double", "learner", "scorer", "second", "source"]
    assert one("~graph.forward.jugde").hint.startswith("did you mean 'judge'?")


def test_the_resolved_configuration_can_be_written_and_read(tmp_path: Path) -> None:
    from omegaconf import OmegaConf

    made = toy_plan("scale.factor=1e-6", "source.path='1E234'", "+placement.judge=process")
    (tmp_path / "config.yaml").write_text(to_yaml(made.configured.plain()))
    back = OmegaConf.to_container(OmegaConf.load(tmp_path / "config.yaml"))
    assert back == made.configured.plain()
    assert back["scale"]["factor"] == 1e-6  # type: ignore[index,call-overload]
    assert back["source"]["path"] == "1E234"  # type: ignore[index,call-overload]
    assert back["placement"] == {"judge": "process"}  # type: ignore[index,call-overload]


# -- plug-ins ------------------------------------------------------------------------------------------------

MODULE = """
from dataclasses import dataclass
from pipeline.registry import backend
from pipeline.stage import setting
from tests.pipeline.stages_for_tests import Scale

@dataclass(slots=True, kw_only=True)
class {name}Config:
    factor: float = setting(5.0, doc="times")

@backend("scale", "{name}")
class {name}(Scale):
    provides = frozenset({{"exactness"}})
    def __init__(self, cfg: {name}Config):
        self.factor = cfg.factor
"""
YAML = "defaults:\n  - /schema/scale/{name}@_here_\n  - _self_\n"


@pytest.fixture
def plugin(registered: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a `conf`, beside which the user's modules lie."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    shutil.copytree(TOY[1], tmp_path / "conf")
    return tmp_path


def make_with(folder: Path, module: str, *overrides: str) -> plan.Plan:
    plugins = f"plugins=[tests.pipeline.stages_for_tests,{module}]"
    return plan.make(parse(["--config-dir", str(folder / "conf"), "pipeline=toy", plugins, *overrides]))


def test_a_backend_from_outside(plugin: Path) -> None:
    """One module and one option file beside the user's configuration; nothing else is edited."""
    (plugin / "addon_one.py").write_text(MODULE.format(name="fivefold"))
    (plugin / "conf" / "scale" / "fivefold.yaml").write_text(YAML.format(name="fivefold"))
    made = make_with(plugin, "addon_one", "scale=fivefold", "scale.factor=6")
    assert (made.nodes["double"].components["scale"].cls.backend, made.nodes["double"].build().scale.factor) == (
        "fivefold",
        6.0,
    )


def test_a_plugin_that_does_not_exist_or_import(plugin: Path) -> None:
    (plugin / "addon_broken.py").write_text("import json\n\nx = json.loads('{')\n")
    (plugin / "addon_needs.py").write_text("import a_package_nobody_has\n")
    (plugin / "addon_syntax.py").write_text("\ndef f(:\n")
    (plugin / "addon_ends.py").write_text("raise SystemExit(3)\n")
    expected = {
        "addon_absent": ("ModuleNotFoundError: No module named 'addon_absent'", "there is no module of that name"),
        "addon_broken": ("JSONDecodeError", f"raised at {plugin}/addon_broken.py:3"),
        "addon_syntax": ("SyntaxError", f"raised at {plugin}/addon_syntax.py:2"),
        "addon_ends": ("SystemExit: 3", f"raised at {plugin}/addon_ends.py:1"),
        "addon_needs": ("No module named 'a_package_nobody_has'", f"raised at {plugin}/addon_needs.py:1"),
    }
    for module, (what, hint) in expected.items():
        with pytest.raises(PlanError) as caught:
            make_with(plugin, module)
        [problem] = caught.value.problems
        assert problem.where == "plugins"
        assert f"importing '{module}' failed" in problem.what
        assert what in problem.what
        assert hint in problem.hint


def test_one_name_registered_twice_names_both_files(plugin: Path) -> None:
    (plugin / "addon_first.py").write_text(MODULE.format(name="sixfold"))
    (plugin / "addon_second.py").write_text("\n\n" + MODULE.format(name="sixfold"))
    with pytest.raises(PlanError) as caught:
        make_with(plugin, "addon_first,addon_second")
    text = str(caught.value)
    assert "scale=sixfold is registered twice" in text
    assert f"{plugin}/addon_first.py:11" in text
    assert f"{plugin}/addon_second.py:13" in text


def test_an_option_without_a_schema_or_without_a_backend(plugin: Path) -> None:
    (plugin / "conf" / "scale" / "loose.yaml").write_text("factor: 3\n")
    (plugin / "conf" / "scale" / "ghost.yaml").write_text(YAML.format(name="ghost"))
    with pytest.raises(PlanError) as caught:
        make_with(plugin, "json", "scale=loose")
    found = {p.where: p for p in caught.value.problems}
    assert found["scale"].what.startswith(f"its option file {plugin}/conf/scale/loose.yaml extends no schema")
    assert "[/schema/scale/BACKEND@_here_, _self_]; backends: exact, rough" in found["scale"].hint
    with pytest.raises(PlanError) as caught:
        make_with(plugin, "json", "scale=ghost")
    [problem] = caught.value.problems
    extends = "extends /schema/scale/ghost, and no stage is registered as scale=ghost"
    assert problem.what == f"{plugin}/conf/scale/ghost.yaml {extends}"
    assert problem.hint == "registered: exact, rough; is its module among plugins=[...]?"


def test_plugins_named_too_late(plugin: Path) -> None:
    """In a YAML they would be read after composing, when it is too late."""
    toy = plugin / "conf" / "pipeline" / "toy.yaml"
    toy.write_text(toy.read_text() + "plugins: [somewhere]\n")
    with pytest.raises(PlanError, match="give plugins"):
        plan.make(parse(["--config-dir", str(plugin / "conf"), "pipeline=toy"]))


def test_flags_of_hydra_are_told_from_overrides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").mkdir()
    line = parse(["-m", "seed=1,2", "--config-dir", "x"])
    assert (line.multirun, line.overrides, line.inspects) == (True, ("seed=1,2",), False)
    assert line.config_dir == tmp_path / "x"
    for flag in (["--help"], ["--cfg", "job"], ["--info"]):
        assert parse(flag).inspects


@pytest.mark.parametrize(
    ("flags", "hint"),
    [
        (["--config-name=other"], "experiment="),
        (["-cn", "other"], "experiment="),
        (["--config-path", "x"], "--config-dir"),
        (["--package", "x"], "experiment="),
        (["--config-name", "x", "--cfg", "job"], "experiment="),
        (["--experimental-rerun", "x"], "overrides"),
    ],
)
def test_flags_that_a_plan_cannot_follow_are_refused(flags: list[str], hint: str) -> None:
    with pytest.raises(PlanError) as caught:
        parse([*flags, "mode=plan"])
    [problem] = caught.value.problems
    assert problem.where.startswith("--")
    assert hint in problem.hint


def test_a_package_may_be_shown() -> None:
    assert parse(["--cfg", "job", "--package", "rollout"]).inspects


def test_a_bad_list_of_plugins() -> None:
    with pytest.raises(PlanError, match=r"plugins: the value '\[a' cannot be read"):
        plan.make(parse([*TOY, "plugins=[a"]))


def test_plan_leaves_nothing_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plan.make(parse([*TOY, PLUGINS]))
    assert list(tmp_path.iterdir()) == []
