"""Area I of the bug bank (Hydra and OmegaConf): each case is a kind, and a test.

| case | kind | tests, here where no file is named |
|---|---|---|
| 123 | a misspelt key is taken | tests/conf/cases.py: settings and options that are not there |
| 124 | '=' in a value | tests/conf/test_values.py, tests/pipeline/test_quoting.py; names of our own folders: here |
| 125 | characters of the grammar | tests/conf/test_values.py: any text; from a file: here |
| 126 | is of area A | |
| 127 | folders of jobs | tests/pipeline/test_sweep_points.py: one flat directory of its own |
| 128 | an interpolation multiplies a sweep | tests/pipeline/test_sweep_points.py; of settings: here |
| 129 | what is shipped composes, with and without -m | here; tests/conf/test_sweeps.py |
| 130 | items of a list | tests/conf/test_values.py; from a file: here |
| 131 | a section that is given as a whole keeps old keys | here |
| 132 | another working directory | here (no wheel is published: docs/design.md, section 2) |
| 133 | failed jobs of a sweep | tests/e2e/test_sweeps.py, tests/pipeline/test_sweep_jobs.py |
| 134 | a launcher in a recipe | tests/pipeline/test_sweep_points.py: a launcher in a recipe that is swept is refused |
| 135 | numbers that become text, and text that becomes a number | here; tests/pipeline/test_texts.py |

Others of the same kinds follow below them.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from pipeline import config, plan, quoting
from pipeline.config import load, parse
from pipeline.errors import PlanError
from pipeline.plan import Plan
from pipeline.sweep.points import expand
from tests.conf.cases import ROLLOUTS
from tests.conf.test_plans import commands, files, names
from tests.conf.test_values import ROOT, planned, value

__all__ = ["files"]

FUNCTION = ("reward=function", "reward.path=reward.py")
ODD = [
    "% @ * # , : { $ ' \"",
    "</s>",
    "\\n",
    "é ☃",
    "a=b",
    "~",
    "null",
    "yes",
    "1E234",
    "007",
    "0x10",
    "1_000",
    ".5",
    "",
]


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def told(*overrides: str) -> dict[str, str]:
    """Errors by where they are."""
    with pytest.raises(PlanError) as caught:
        planned(*overrides)
    return {p.where: f"{p.what}; {p.hint}" for p in caught.value.problems if p.level == "error"}


def with_recipe(folder: Path, text: str) -> Plan:
    """Planned with a recipe of one's own."""
    (folder / "conf" / "experiment").mkdir(parents=True, exist_ok=True)
    (folder / "conf" / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{text}", "utf-8")
    return plan.make(parse(["--config-dir", str(folder / "conf"), "experiment=mine", "mode=plan"]))


# -- 124, 125: any text ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "a-b_c.1", "é"])
def test_124_names_of_our_own_need_no_quotes(name: str) -> None:
    """A directory of a run can be given back as an override, whatever the run is called."""
    folder = planned(f"name='{name}'").configured.run_dir
    plain = re.fullmatch(r"[\w/.-]+", str(folder))
    assert plain
    assert (quoting.parse([f"hydra.run.dir={folder}"])[1] == []) is name.isascii()


@pytest.mark.parametrize("pattern", ODD)
def test_125_any_text_from_a_file(pattern: str, tmp_path: Path) -> None:
    """In YAML's own quotes."""
    quoted = "'" + pattern.replace("'", "''") + "'"
    made = with_recipe(tmp_path, f"loader: {{system_prompt: {quoted}}}\n")
    assert value(made, "loader.system_prompt") == pattern


# -- 128, 129: what is shipped, swept --------------------------------------------------------------------------------


def test_128_an_interpolation_follows_each_point() -> None:
    lines, problems = expand(parse(["-m", "trainer.lr=1e-3,2e-3", "critic.lr=${trainer.lr}", "mode=plan"]))
    assert not problems
    made = [plan.make(line) for line in lines]
    assert [(value(m, "trainer.lr"), value(m, "critic.lr")) for m in made] == [(1e-3, 1e-3), (2e-3, 2e-3)]


def test_129_every_recipe_can_be_swept(files: dict[str, str]) -> None:
    """All of them in one sweep, and so beside each other in one process."""
    given = commands("gsm8k", files)[0][1:2]  # the model
    recipes = [n for n in names("experiment") if n != "gsm8k"]
    lines, problems = expand(parse(["-m", f"experiment={','.join(recipes)}", *given, "mode=plan"]))
    assert not problems
    assert [plan.make(line).root.name for line in lines] == recipes


def test_129_hydra_shows_every_recipe_resolved(files: dict[str, str], tmp_path: Path) -> None:
    """`--cfg job --resolve`, each in one process after the other, from another folder than the checkout's."""
    lines = [["--cfg", "job", "--resolve", *commands(n, files)[0]] for n in names("experiment")]
    script = "import sys; sys.path.insert(0, sys.argv[1]); import json, run\nfor line in json.loads(sys.argv[2]):\n"
    script += "    sys.argv = ['run.py', *line]; assert run.main(line) == 0; print('=====')\n"
    ended = subprocess.run(
        [sys.executable, "-c", script, str(ROOT), json.dumps(lines)], cwd=tmp_path, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    shown = [OmegaConf.create(text) for text in ended.stdout.split("=====\n")[:-1]]
    assert [s.name for s in shown] == names("experiment")
    assert "${" not in ended.stdout


# -- 130, 131: lists and sections --------------------------------------------------------------------------------------


def test_130_an_item_is_changed_and_no_other(tmp_path: Path) -> None:
    chain = "graph.evaluate"
    assert value(
        planned(
            "+loader@other=mmap",
            "other={path: data/digits/heldout.jsonl, purpose: eval, batch_size: 0}",
            "~eval_loader",
            f"{chain}.0=other",
        ),
        chain,
    ) == ["other", "tokenizer_cache", "rollout", "reward"]
    assert "there is no item 5" in told(f"{chain}.5=reward")[f"{chain}.5"]
    assert "null is not text" in told(f"{chain}=[eval_loader,null]")[f"{chain}.1"]


def test_130_an_index_in_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError) as caught:
        with_recipe(tmp_path, "advantage: {reward_weights: {1: 0.5}}\n")
    assert any("advantage" in p.where or "experiment" in p.where for p in caught.value.problems)


def test_131_a_section_is_merged_and_what_is_not_its_own_is_refused() -> None:
    assert told("reward={kind: model}", "reward.path=m").keys() == {"reward.kind", "reward.path"}
    made = planned("reward={weights: {exact: 0, contains: 1}}")
    assert value(made, "reward.weights.contains") == 1
    assert value(made, "reward.target") == "sort", "what the task says of the rest stays"


def test_131_nothing_of_the_old_option_stays() -> None:
    """The settings of `rule` are gone with it."""
    made = planned("reward=function", "reward.path=data/verl/sort_digits.py")
    assert {"pattern", "weights", "min_tokens"}.isdisjoint(value(made, "reward"))


# -- 132: another working directory -----------------------------------------------------------------------------------


def test_132_the_plan_is_the_same_from_the_root_folder(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "run.py"), "mode=plan", "plan.format=json"]
    here, there = (subprocess.run(command, cwd=cwd, capture_output=True, text=True) for cwd in (ROOT, "/"))
    assert (here.returncode, there.returncode) == (0, 0), there.stderr

    def steady(text: str) -> str:
        return re.sub(r'"free": \d+', "", text)

    assert steady(there.stdout) == steady(here.stdout)
    assert '"path": "data/digits/train.jsonl"' in there.stdout


# -- 135: numbers and text ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("written", ["1e-6", '"1e-6"', "1.0e-6", "0.000001", "1E-6", "'1e-06'"])
def test_135_a_rate_is_a_number_however_it_is_written(written: str, tmp_path: Path) -> None:
    made = with_recipe(tmp_path, f"trainer: {{lr: {written}}}\n")
    assert value(made, "trainer.lr") == 1e-6
    assert isinstance(value(made, "trainer.lr"), float)


@pytest.mark.parametrize(
    "word", ["1E234", "007", "1_000", "0x10", ".5", "1.50", "on", "no", "true", "2024-01-01", "1:30"]
)
def test_135_text_stays_text_and_a_saved_configuration_is_read_the_same(word: str, tmp_path: Path) -> None:
    """config.yaml of a run, by OmegaConf and by PyYAML; and again as a recipe."""
    made = with_recipe(tmp_path, f"name: {word.replace(':', '-')}\nreward: {{target: {word}}}\n")
    text = config.to_yaml(made.configured.plain())
    (tmp_path / "config.yaml").write_text(text)
    for back in (OmegaConf.to_container(OmegaConf.load(tmp_path / "config.yaml")), yaml.safe_load(text)):
        assert back["reward"]["target"] == word  # type: ignore[index]
    known = {k: v for k, v in made.configured.plain().items() if k != "mode"}
    again = with_recipe(tmp_path / "again", config.to_yaml(known))
    assert again.configured.plain() == made.configured.plain()


@pytest.mark.parametrize("word", ["1E3", "1_0", ".5"])
def test_135_a_file_may_be_named_like_a_number(word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the command line, in a list there, inside of a section, and in a file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / word).write_text((ROOT / "data" / "digits" / "train.jsonl").read_text())
    assert value(planned(f"loader.path={word}"), "loader.path") == word
    assert value(planned(f"loader.path=[{word}]"), "loader.path") == [word]
    assert value(planned(f"loader={{path: {word}}}"), "loader.path") == word
    assert value(with_recipe(tmp_path, f"loader: {{path: {word}}}\n"), "loader.path") == word


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("run: {steps: 010}", "'010', in "),
        ("run: {steps: 1:30}", "is 90 in YAML, and does not look like it; write 90"),
        ("reward: {timeout_s: 1:30}", "is 90 in YAML"),
        ("loader: {shuffle: 2}", "2 is not true or false"),
        ("trainer: {lr: .inf}", "inf is not allowed; must be > 0, and finite"),
        ("trainer: {lr: 1e400}", "inf is not allowed"),
        ("trainer: {lr: .nan}", "nan is not allowed"),
        ("rollout: {n: 1e1}", "10.0 is not a whole number"),
        ("rollout: {n: true}", "true is not a whole number"),
        ("rollout: {n: ~}", "null is not a whole number"),
        ("seed: 2023-01-01", "is not a whole number"),
        ("rollout: {typo: 1}", "no such setting, and"),
        ("rollout: {temprature: 1}", "did you mean 'temperature'?"),
        ("rolout: {n: 1}", "rolout"),
    ],
)
def test_135_a_file_that_does_not_mean_what_it_looks_like(text: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError) as caught:
        with_recipe(tmp_path, text + "\n")
    assert problem in "\n".join(f"{p.what}; {p.hint}" for p in caught.value.problems)


def test_135_what_a_file_says_and_does_not_count_is_no_problem(tmp_path: Path) -> None:
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    (tmp_path / "conf" / "experiment" / "mine.yaml").write_text("# @package _global_\nrun: {steps: 010}\n")
    made = plan.make(parse(["--config-dir", str(tmp_path / "conf"), "experiment=mine", "run.steps=9", "mode=plan"]))
    assert made.root.run.steps == 9


# -- others of the same kinds ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("rоllout.n=4", "'о' is CYRILLIC SMALL LETTER O"),
        ("rollout.n =4", "there is a space beside it"),
        ("rollout..n=4", "is no config path"),
        ("rollout.n.=4", "is no config path"),
        (f"{'a' * 5000}=1", "is longer than 200 characters"),
        (f"{'a.' * 300}b=1", "is longer than 200 characters"),
        (f"rollout.n={'9' * 400}", "less than 2**63"),
        (f"rollout.n={'9' * 5000}", "it has too many digits"),
        (f"rollout={'x' * 5000}", ROLLOUTS),
        ("rollout.n=1e3", "1000.0 is not a whole number"),
        ("rollout.n=0x10", "'0x10' is not a whole number"),
        ("rollout.n=0o17", "'0o17' is not a whole number"),
        ("rollout.n=1/2", "'1/2' is not a whole number"),
        ("trainer.lr=1e400", "inf is not allowed; must be > 0, and finite"),
        ("trainer.lr=-inf", "-inf is not allowed"),
        ("advantage.reward_weights=[1,inf]", "inf is not allowed"),
        ("loader.shuffle=2", "2 is not true or false"),
        ("loader.shuffle='2'", "'2' is not true or false"),
        ("loader={shuffle: -1}", "-1 is not true or false"),
        ("~seed", "can be set but not removed; leave '~seed' out"),
        ("~run", "can be set but not removed"),
        ("+seed.x=3", "is not a whole number"),
        ("+rollout.n=4", "is there already; leave the '+' out"),
        ("rollout=''", "there is no '' in the group 'rollout'"),
        ("rollout=[hf,torch]", "is no option of the group 'rollout'"),
        ("rollout={n: 4, typo: 1}", "no such setting; allowed: batch_rows"),
        ("experiment=null", "'~experiment' leaves it out"),
        ("experiment=rloo/x", "did you mean 'rloo'?"),
        ("+experiment=rloo", "is chosen already"),
        ("+experiment@x=rloo", "changes the choice of 'pipeline@x.pipeline'"),
        ("+reward@run=rule", "'run' is no name for a node or component"),
        ("+reward@hydra=rule", "'hydra' is no name"),
        ("+reward@_global_=rule", "'_global_' is no name"),
        ("+reward@a.b=rule", "'a.b' is no name"),
        ("loader=[mmap]x", "'[' ']' must stand in quotes"),
    ],
)
def test_what_nobody_can_mean_is_one_problem_in_words(override: str, problem: str) -> None:
    found = told(override)
    assert len(found) == 1, found
    assert problem in next(iter(found.values()))
    assert all(len(where) < 300 for where in found)


@pytest.mark.parametrize(
    ("overrides", "path", "expected"),
    [
        (("rollout.n=1_6",), "rollout.n", 16),
        (("rollout.n=+4",), "rollout.n", 4),
        (("rollout.n='4'",), "rollout.n", 4),
        (("trainer.lr=.5",), "trainer.lr", 0.5),
        (("loader.shuffle=0",), "loader.shuffle", False),
        (("loader.shuffle=oFF",), "loader.shuffle", False),
        (("loader.system_prompt=",), "loader.system_prompt", ""),
        (("loader.system_prompt=null",), "loader.system_prompt", None),
        (("loader.system_prompt='${name}'",), "loader.system_prompt", "ppo"),
        ((r"loader.system_prompt='\${name}'",), "loader.system_prompt", "${name}"),
        ((f"loader.system_prompt={'x' * 100_000}",), "loader.system_prompt", "x" * 100_000),
        (("reward={pattern: 1E234, weights: {regex: 1}}",), "reward.pattern", "1E234"),
        (("reward={target: copy}", "reward.target=sort"), "reward.target", "sort"),
        (("reward.target=sort", "reward={target: copy}"), "reward.target", "copy"),
        (("seed=1", "++seed=2"), "seed", 2),
        (("experiment=[quickstart,rloo]",), "advantage.estimator", "rloo"),
        (("experiment=[quickstart,rloo]",), "run.steps", 10),
        (("experiment=[rloo,quickstart]",), "name", "quickstart"),
        (("experiment=quickstart", "experiment=rloo"), "name", "rloo"),
        (("~experiment",), "name", "ppo"),
        (("rollout=[hf]",), "rollout.batch_rows", 256),
        (("rollout={}",), "rollout.n", 8),
        (("graph={}",), "graph.publish.rollout", "trainer"),
    ],
)
def test_the_right_value(overrides: tuple[str, ...], path: str, expected: Any) -> None:
    if expected is None:
        assert "null is not text" in told(*overrides)[path]
        return
    made = planned("trainer.mini_batch=0", *overrides)
    assert value(made, path) == expected
    assert type(value(made, path)) is type(expected)


def test_a_dict_of_ones_own_takes_any_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without '+', deep, and kept with the type that it has; elsewhere a new key stays an error."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.py").write_text("def compute_score(a=0, b=0, **rest): return 1.0\n")
    made = planned(*FUNCTION, "reward.kwargs.a=1e3", "reward.kwargs.b={c: {d: on}}", "+reward.kwargs.e=[1,x]")
    assert value(made, "reward.kwargs") == {"a": 1000.0, "b": {"c": {"d": "on"}}, "e": [1, "x"]}
    assert value(planned(*FUNCTION, "reward.kwargs={a: 1}"), "reward.kwargs") == {"a": 1}
    assert told(*FUNCTION, "reward.kwarg.a=1").keys() == {"reward.kwarg.a"}


def test_an_option_and_a_section_under_one_key_both_count() -> None:
    made = planned("reward=function", "reward={path: data/verl/sort_digits.py}")
    assert made.nodes["reward"].cls.backend == "function"
    assert value(made, "reward.path") == "data/verl/sort_digits.py"
    assert not [p for p in made.problems if "times" in p.what]


def test_a_recipe_may_build_on_another(tmp_path: Path) -> None:
    made = with_recipe(tmp_path, "defaults:\n  - rloo\n  - _self_\nname: mine\nrun: {steps: 3}\n")
    assert (made.root.name, made.root.run.steps, value(made, "advantage.estimator")) == ("mine", 3, "rloo")


def test_overrides_give_the_same_in_any_order() -> None:
    """But for two of the same key: choices come first, wherever they stand."""
    given = [
        "rollout.batch_rows=16",
        "rollout=hf",
        "reward={target: copy}",
        "experiment=rloo",
        "seed=3",
        "pipeline=grpo",
    ]
    one, other = (planned(*order).configured.plain() for order in (given, given[::-1]))
    assert one == other
    assert (one["rollout"]["batch_rows"], one["reward"]["target"], one["seed"]) == (16, "copy", 3)


def test_a_flag_between_overrides_is_told() -> None:
    with pytest.raises(PlanError, match="let flags come before all of them, or after"):
        parse(["seed=1", "--config-dir", str(ROOT / "conf"), "run.steps=2"])


def test_a_plan_of_absurd_sizes_does_not_take_forever() -> None:
    """Divisors of the rows of a step are looked for when a mini-batch does not fit."""
    assert "nearest that do" in told("rollout.n=1000000000000", "trainer.mini_batch=7")["trainer.mini_batch"]


# -- two limits for one thing ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loader", "cache", "truncation", "level", "text"),
    [
        (
            64,
            32,
            "error",
            "error",
            "32 is less than the loader's limit, 64: a prompt of 33 to 64 tokens would end the run",
        ),
        (64, 32, "left", "warning", "prompts of 33 to 64 tokens are cut"),
        (32, 64, "error", "warning", "64 is more than the loader's limit, 32"),
        (64, 64, "error", "", ""),
        (64, 0, "error", "", ""),
        (0, 64, "error", "", ""),
    ],
)
def test_limits_of_loader_and_cache(loader: int, cache: int, truncation: str, level: str, text: str) -> None:
    given = (f"loader.max_prompt_tokens={loader}", f"tokenizer_cache.max_prompt_tokens={cache}")
    configured, problems = load(parse(["mode=plan", *given, f"tokenizer_cache.truncation={truncation}"]))
    try:
        found = plan.check(configured, problems).problems
    except PlanError as e:
        found = e.problems
    assert [p.level for p in found] == ([level] if level else [])
    assert all(p.where == "tokenizer_cache.max_prompt_tokens" and text in p.what for p in found)
