"""Which runs a comparison is, in which order they are started, and what is wrong with it before any starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline import entry, quoting
from pipeline.compare import work
from pipeline.compare.cells import cells, command, expand, jobs
from pipeline.config import AxisSettings, CommandLine, CompareSettings, parse
from tests.pipeline.conftest import PLUGINS, TOY

ONE = ("compare.axis=double", "compare.options=[whole,streaming]")
TWO = (*ONE, "compare.second.axis=runner", "compare.second.options=[sync,overlap]")


def line(*overrides: str, mode: str = "mode=compare") -> CommandLine:
    return parse([*TOY, PLUGINS, mode, *overrides])


def planned(capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    """What a person reads of a comparison that cannot run."""
    assert entry.plan_or_explain(line(*overrides)) is None
    return capsys.readouterr().err


def two(repeats: int = 2) -> CompareSettings:
    second = AxisSettings(axis="runner", options=["sync", "overlap"])
    return CompareSettings(axis="double", options=["whole", "streaming"], second=second, repeats=repeats)


def test_cells_are_every_option_with_every_other_and_the_first_is_the_first_of_each() -> None:
    found = cells(two())
    assert [c.name for c in found] == ["whole, sync", "whole, overlap", "streaming, sync", "streaming, overlap"]
    assert [c.number for c in found] == [0, 1, 2, 3]
    assert found[3].overrides == ("double=streaming", "runner=overlap")


@pytest.mark.parametrize("option", ["a b", "", "[1]", "${name}", "it's", "a=b", "ünï"])
def test_any_text_can_be_an_option(option: str) -> None:
    [override] = cells(CompareSettings(axis="source.note", options=[option]))[0].overrides
    [parsed], problems = quoting.parse([override])
    assert not problems
    expected = option.replace("${", r"\${")  # no interpolation
    assert str(getattr(parsed.value(), "text", parsed.value())) == expected


def test_rounds_go_to_and_fro_so_that_a_machine_that_slows_down_hits_all_alike() -> None:
    order = [(cell.number, repeat) for cell, repeat, _ in jobs(line(*TWO), two(repeats=4), Path("/x"))]
    assert [n for n, _ in order] == [0, 1, 2, 3, 3, 2, 1, 0, 0, 1, 2, 3, 3, 2, 1, 0]
    assert [r for _, r in order] == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    places = {n: [at for at, (number, _) in enumerate(order) if number == n] for n in range(4)}
    assert {sum(p) / len(p) for p in places.values()} == {7.5}


def test_each_run_has_a_directory_of_its_own_and_the_users_settings() -> None:
    given = line(*TWO, "seed=5", "hydra.run.dir=/x", "compare.repeats=2")
    made = [job for *_, job in jobs(given, two(), Path("/x"))]
    assert len({job.folder for job in made}) == 8
    assert made[1].folder == Path("/x/runs/1-whole-overlap-1")
    assert [job.number for job in made] == list(range(8))
    arguments = made[1].arguments
    assert {"seed=5", "double=whole", "runner=overlap", "run.only_steps=true", "run.keep_records=[1]"} <= {*arguments}
    assert arguments[-1] == "hydra.run.dir='/x/runs/1-whole-overlap-1'"
    assert not [a for a in arguments if a.startswith(("mode=", "compare."))]


def test_what_repeats_a_cell_names_no_directory_and_whole_runs_are_whole() -> None:
    settings = two()
    repeated = command(line(*TWO, "hydra.run.dir=/x"), settings, cells(settings)[0])
    assert repeated[:2] == ("--config-dir", str(Path(TOY[1]).resolve()))
    assert not any(a.startswith("hydra.") for a in repeated)
    settings.whole_runs = True
    assert "run.only_steps=true" not in command(line(*TWO), settings, cells(settings)[0])


def test_every_cell_is_a_command_line_of_its_own() -> None:
    lines, problems = expand(line(*TWO))
    assert not problems
    assert [made.overrides[-2:] for made in lines] == [c.overrides for c in cells(two())]
    plans = entry.plan_or_explain(line(*TWO))
    assert plans is not None
    assert [(p.nodes["double"].cls.backend, p.runner.cls.backend) for p in plans] == [
        ("whole", "sync"),
        ("whole", "overlap"),
        ("streaming", "sync"),
        ("streaming", "overlap"),
    ]
    assert all(entry.is_comparison(p) and entry.is_execution(p) for p in plans)
    assert all(p.root.run.only_steps and p.root.run.keep_records == [1] for p in plans)


CASES = {
    ("compare.options=[a,b]",): "compare.axis: must be given",
    ("compare.axis=duble", "compare.options=[a,b]"): (
        "compare.axis: there is no group and no setting 'duble'\n    did you mean 'double'? groups: double, "
    ),
    ("compare.axis=source.gruops", "compare.options=[2,4]"): (
        "compare.axis: there is no group and no setting 'source.gruops'\n    did you mean 'source.groups'? in 'source' "
    ),
    (*ONE, "run.steps=0", "compare.warmup=0"): "run.steps: 0, and the first 0 (compare.warmup) are not counted",
    ("compare.axis=run", "compare.options=[a,b]"): "compare.axis: there is no group and no setting 'run'",
    ("compare.axis=placement", "compare.options=[a,b]"): "compare.axis: 'placement' holds several values",
    ("compare.axis=compare.repeats", "compare.options=[1,2]"): "says what is done and not what is run",
    ("compare.axis=hydra/launcher", "compare.options=[1,2]"): "says what is done and not what is run",
    ("compare.axis=double", "compare.options=[whole,streming]"): (
        "compare.options: there is no 'streming' in the group 'double'\n    did you mean 'streaming'?"
    ),
    ("compare.axis=double", "compare.options=[whole,whole]"): "compare.options: 'whole' stands there 2 times",
    ("compare.axis=double", "compare.options=[whole]"): (
        "compare.options: 1 option, and a comparison needs two or more\n    of the group 'double': "
    ),
    ("compare.axis=double",): "compare.options: no options, and a comparison needs two or more",
    (*ONE, "double=whole"): "double: is given, and compare.axis compares it",
    (*ONE, "compare.second.axis=double", "compare.second.options=[whole,streaming]"): (
        "compare.second.axis: 'double' is the first axis too"
    ),
    (*ONE, "compare.second.options=[sync,overlap]"): "compare.second.axis: must be given",
    (*ONE, "run.steps=1"): "run.steps: 1, and the first 1 (compare.warmup) are not counted: none would be",
    ("compare.axis=run.steps", "compare.options=[1,5]", "compare.warmup=2"): (
        "run.steps: 1, and the first 2 (compare.warmup) are not counted: none would be\n"
        "    more than 2; or a smaller compare.warmup\n    at the point run.steps=1"
    ),
    (*ONE, "compare.repeats=0"): "compare.repeats: 0 is not allowed",
    (*ONE, "compare.repetas=3"): "compare.repetas: no such setting\n    did you mean 'repeats'?",
    ("compare.axis=source.groups", "compare.options=[2,x]"): (
        "source.groups: 'x' is not a whole number\n    must be a whole number >= 0 (groups a step), such as "
        "source.groups=3\n    at the point source.groups=x"
    ),
    ("compare.axis=double.limit", "compare.options=[2,100]"): (
        "double.limit: 2 is less than the 6 rows of a step\n    at the point double.limit=2"
    ),
    ("compare.axis=placement.nobody", "compare.options=[local,process]"): "placement.nobody: there is no node 'nobody'",
}


@pytest.mark.parametrize("overrides", CASES, ids=" ".join)
def test_what_cannot_be_compared_is_told_before_anything_starts(
    overrides: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    told = planned(capsys, *overrides)
    assert CASES[overrides] in told
    assert told.endswith("Nothing was started and nothing was written.\n")


def test_everything_wrong_is_told_at_once_with_the_cell_it_is_wrong_in(capsys: pytest.CaptureFixture[str]) -> None:
    told = planned(
        capsys,
        *("compare.axis=scale", "compare.options=[exact,rough,rouhg]", "scorer.x=1", "+seeed=3"),
        "learner.lr=-1",
    )
    assert told.startswith("The configuration cannot run: ")
    for found in (
        "compare.options: there is no 'rouhg' in the group 'scale'\n    did you mean 'rough'?",
        "scorer.x: no such setting",
        "seeed: no such setting",
        "learner.lr: -1.0 is not allowed",
        "scale.factor: must be given\n    times\n    at the point scale=rough",
    ):
        assert found in told, found


def test_an_axis_may_be_a_placement_or_any_setting() -> None:
    for axis, options in (("placement.scorer", "[local,process]"), ("learner.lr", "[1e-3,0.1]"), ("seed", "[0,1]")):
        plans = entry.plan_or_explain(line(f"compare.axis={axis}", f"compare.options={options}"))
        assert plans is not None
        assert len(plans) == 2


def test_steps_may_be_the_axis_whatever_they_are_elsewhere() -> None:
    assert (
        entry.plan_or_explain(line("compare.axis=run.steps", "compare.options=[4,5]", "compare.warmup=3")) is not None
    )


def test_what_cannot_be_written_ends_the_comparison_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    settings = CompareSettings(axis="double", options=["whole", "streaming"])
    assert work.compare(line(*ONE), settings, 3, tmp_path / "file" / "x") == 1
    told = capsys.readouterr().err
    assert f"the comparison cannot go on: '{tmp_path}/file/x' cannot be written: a part of its path is a file" in told


def test_a_sweep_of_comparisons_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.plan_or_explain(parse(["-m", *TOY, PLUGINS, "mode=compare", *ONE, "seed=0,1"])) is None
    told = capsys.readouterr().err
    assert "mode: compare starts its own runs, which a sweep cannot sweep over" in told
    assert "The configuration cannot run: 1 problem." in told


@pytest.mark.parametrize("mode", ["mode=run", "mode=plan"])
def test_settings_of_a_comparison_without_one_are_refused(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.plan_or_explain(line("compare.repeats=3", mode=mode)) is None
    assert "compare.repeats: only mode=compare reads it, and this is none" in capsys.readouterr().err
    assert entry.plan_or_explain(line("compare.repeats=3", "seed=x", mode=mode)) is None
    told = capsys.readouterr().err
    assert "2 problems" in told
    assert "compare.repeats: only mode=compare reads it, and this is none" in told


def test_a_recipe_may_say_what_is_compared_but_not_that_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "conf"
    (folder / "experiment").mkdir(parents=True)
    for name, more in (("what", ""), ("that", "mode: compare\n")):
        text = f"# @package _global_\n{more}compare: {{axis: runner, options: [sync, overlap]}}\n"
        (folder / "experiment" / f"{name}.yaml").write_text(text)
    args = ["--config-dir", str(folder), "pipeline=grpo"]

    plans = entry.plan_or_explain(parse([*args, "experiment=what", "mode=compare"]))
    assert plans is not None
    assert [p.runner.cls.backend for p in plans] == ["sync", "overlap"]
    assert entry.plan_or_explain(parse([*args, "experiment=what"])) is not None, "the recipe runs without it too"
    assert entry.plan_or_explain(parse([*args, "experiment=that"])) is None
    assert "mode: compare is asked for by a recipe\n    give mode=compare in words" in capsys.readouterr().err


def test_a_directory_that_holds_something_is_not_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    told = planned(capsys, *ONE, f"hydra.run.dir={tmp_path}")
    assert f"hydra.run.dir: '{tmp_path}' exists and is not empty" in told
