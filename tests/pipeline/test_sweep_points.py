"""Which jobs a command line stands for, and what is wrong with them, before anything is started."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from pipeline import config, entry, plan
from pipeline.config import CommandLine
from pipeline.errors import Problem
from pipeline.plan import Plan
from pipeline.sweep.lanes import Lanes
from pipeline.sweep.points import _hide_secrets, expand
from tests.pipeline.conftest import toy_line


def sweep_line(*overrides: str) -> CommandLine:
    return replace(toy_line(*overrides), multirun=True)


def plans(*overrides: str) -> list[Plan]:
    """Of a sweep without problems."""
    lines, problems = expand(sweep_line(*overrides))
    assert not problems
    return [plan.make(line) for line in lines]


def told(capsys: pytest.CaptureFixture[str], line: CommandLine) -> str:
    """What a person is told of a command line that cannot run."""
    assert entry.plan_or_explain(line) is None
    return capsys.readouterr().err


def problems(*overrides: str) -> dict[str, Problem]:
    """Problems of a sweep as a whole, by where they are."""
    return {p.where: p for p in expand(sweep_line(*overrides))[1]}


# -- what Hydra makes of it --------------------------------------------------------------------------------------


def test_lists_choices_and_ranges_are_multiplied_in_hydras_order() -> None:
    made = plans("seed=choice(5,6)", "run.steps=range(1,4,2)", "learner.lr=0.5")
    assert [(p.root.seed, p.root.run.steps) for p in made] == [(5, 1), (5, 3), (6, 1), (6, 3)]
    assert {p.nodes["learner"].config.lr for p in made} == {0.5}


def test_a_glob_stands_for_the_options_of_the_users_own_folder() -> None:
    assert [p.nodes["double"].cls.backend for p in plans("double=glob(*,exclude=[whole,awkward])")] == ["streaming"]


def test_an_interpolation_follows_each_point() -> None:
    """Bug bank 128: as many jobs as there are values, and not their square."""
    made = plans("seed=3,4", "run.steps=${seed}")
    assert [(p.root.seed, p.root.run.steps) for p in made] == [(3, 3), (4, 4)]


def test_a_setting_may_follow_the_number_of_the_job() -> None:
    """Bug bank 129: ${hydra:...} can be resolved beforehand."""
    assert [p.root.seed for p in plans("run.steps=3,4", "seed=${hydra:job.num}")] == [0, 1]


def test_deletions_and_quoted_values_survive() -> None:
    without_second = ("~second", "~graph.forward.second", "~graph.forward.judge.extra")
    made = plans("seed=1,2", *without_second, "source.path='a,b=c {d} # ü'")
    assert [p.nodes["source"].config.path for p in made] == ["a,b=c {d} # ü"] * 2
    assert all("second" not in p.nodes for p in made)


def test_a_recipe_may_hold_the_grid() -> None:
    made = plans("sweep=toys", "learner.lr=0.3")
    assert [(p.root.seed, p.nodes["learner"].config.lr) for p in made] == [(3, 0.3), (4, 0.3)]


def test_a_search_is_checked_at_its_corners() -> None:
    made = plans("sweep=search", "seed=1,2", "run.steps=range(2,9)")
    found = [(p.root.seed, p.root.run.steps, p.nodes["double"].components["scale"].config.factor) for p in made]
    assert found == [(1, 2, 1.0), (1, 2, 3.0), (2, 2, 1.0), (1, 8, 1.0)]


# -- what cannot be ----------------------------------------------------------------------------------------------


def test_values_that_are_none_are_told() -> None:
    found = problems("learner.lr=interval(0.1,1)", "double=glob(zzz*)", "run.steps=range(3,1)", "seed=1,2")
    assert set(found) == {"learner.lr", "double", "run.steps"}
    assert "which a grid needs" in found["learner.lr"].what
    assert "sweep=optuna" in found["learner.lr"].hint
    assert "would be no job" in found["double"].what


def test_hydras_own_settings_cannot_be_swept() -> None:
    assert set(problems("hydra/launcher=basic,joblib", "hydra.mode=RUN", "seed=1,2")) == {
        "hydra/launcher",
        "hydra.mode",
    }


def test_problems_of_all_points_are_told_at_once_each_with_its_point(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    line = sweep_line("seed=-1,2", "++run.stepss=1", "hydra.launcher.at_once=0")
    text = told(capsys, line)
    assert "3 problems" in text
    assert "run.stepss: no such setting\n    did you mean 'steps'? allowed: device, " in text
    assert "hydra.launcher.at_once: 0 is not allowed" in text
    assert (
        "seed: -1 is not allowed\n    must be >= 0: all randomness of a run derives from it\n    at the point seed=-1\n"
        in text
    )
    assert not list(tmp_path.iterdir())


def test_a_broken_plug_in_has_its_own_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no_such_module" in told(capsys, sweep_line("plugins=[no_such_module]", "seed=1,2"))


@pytest.mark.parametrize(
    ("overrides", "where"),
    [
        (("hydra/launcher=joblib",), "hydra/launcher"),
        (("hydra.launcher.at_once=2",), "hydra/launcher"),
        (("hydra/sweeper=optuna",), "hydra/sweeper"),
        (("sweep=toys",), "hydra/sweeper"),
        (("experiment=own_launcher",), "hydra/launcher"),
        (("hydra.sweep.dir=here",), "hydra.sweep.dir"),
        (("hydra.mode=MULTIRUN",), "hydra.mode"),
    ],
)
def test_what_only_a_sweep_reads_is_refused_in_a_single_run(
    overrides: tuple[str, ...], where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = told(capsys, toy_line(*overrides))
    assert f"  {where}: " in text
    assert "add -m" in text
    assert "1 problem." in text


def test_a_launcher_in_a_recipe_that_is_swept_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Bug bank 134: Hydra has read its launcher before it looks into the recipe, and would ignore it."""
    text = told(capsys, sweep_line("experiment=own_launcher,own_place,short"))
    assert "3 problems" in text
    assert "hydra/launcher: a recipe of this point sets 'joblib', after the sweep was started with 'basic'" in text
    assert "give hydra/launcher=joblib on the command line" in text
    assert "give hydra.launcher.<setting>=... on the command line" in text
    assert "hydra.sweep.dir: a recipe of this point sets 'elsewhere', after the sweep was started in" in text
    assert "at the point experiment=own_place" in text


def test_a_launcher_in_the_one_recipe_of_a_sweep_is_honoured() -> None:
    [made, _] = plans("experiment=own_launcher", "seed=1,2")
    assert made.configured.master is not None
    assert made.configured.master.choices["launcher"] == "joblib"


@pytest.mark.parametrize("subdir", ["${name}", "${hydra.job.override_dirname}", "x${seed}${hydra.job.num}/y", "."])
def test_each_job_has_one_flat_directory_of_its_own(subdir: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Bug bank 127: a value with a slash would make folders in folders, a long one a name that no disk takes."""
    line = sweep_line(f"hydra.sweep.subdir='{subdir}'", f"source.path=a/b,{'e' * 300}")
    assert "hydra.sweep.subdir: " in told(capsys, line)


def test_directories_are_numbered() -> None:
    assert [p.configured.job_dir for p in plans(f"source.path=a/b,c=d,{'e' * 300}".replace("c=d", "'c=d'"))] == list(
        "012"
    )


@pytest.mark.parametrize("folder", ["/proc/nowhere", "y" * 256])
def test_a_directory_that_cannot_be_made_is_told(
    folder: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    line = sweep_line("seed=1,2", f"hydra.sweep.dir={folder}")
    made = entry.plan_or_explain(line)
    assert made is None or entry.sweep(line, made) == 2
    assert f"hydra.sweep.dir: '{tmp_path / folder}'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_all_points_share_the_directory_of_the_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named once, whatever the points call themselves."""
    monkeypatch.chdir(tmp_path)
    folders = {p.configured.master.folder for p in plans("name=a,b") if p.configured.master}
    assert len(folders) == 1
    assert next(iter(folders)).is_relative_to(tmp_path)


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1)


@given(TEXT | st.sampled_from(["${now:%Y}", "\\${a}", "it's", 'say "no"', "a\\", "a\\'", "{", "a=b,c"]))
def test_any_text_can_be_assigned(text: str) -> None:
    parsed = OverridesParser.create().parse_override(config.assignment("a.b", text))
    assert OmegaConf.create({"a": parsed.value()}).a == text


# -- places for jobs ---------------------------------------------------------------------------------------------


def test_gpus_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,GPU-1f, 7")
    lanes = Lanes(at_once=2, gpus_per_job=2)
    assert list(lanes.problems()) == []
    assert lanes.environments() == [{"CUDA_VISIBLE_DEVICES": "4,5"}, {"CUDA_VISIBLE_DEVICES": "GPU-1f,7"}]
    assert Lanes(at_once=3).environments() == [{}, {}, {}]
    [problem] = Lanes(at_once=3, gpus_per_job=2).problems()
    assert problem.where == "hydra.launcher.gpus_per_job"
    assert "4, 5, GPU-1f, 7" in problem.hint


@pytest.mark.parametrize("lanes", [Lanes(at_once=0), Lanes(gpus_per_job=-1), Lanes(gpus_per_job=1)])
def test_lanes_that_cannot_be(lanes: Lanes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert len(list(lanes.problems())) == 1


def test_secrets_do_not_stay_in_what_hydra_has_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "sk-planted-secret")
    saved = tmp_path / "multirun.yaml"
    saved.write_text("hydra: {overrides: {task: ['learner.text=sk-planted-secret', 'seed=0,1']}}\n")
    _hide_secrets(saved)
    assert saved.read_text() == "hydra: {overrides: {task: ['learner.text=${oc.env:HF_TOKEN}', 'seed=0,1']}}\n"
    _hide_secrets(tmp_path / "none.yaml")
    assert [p.name for p in tmp_path.iterdir()] == ["multirun.yaml"]
