"""From a verl user's file to a recipe: what is in it, what the report says, and that it plans."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from importers.verl import bring
from importers.verl.recipe import Kind, classify, composed, same_as
from importers.verl.source import defaults, leaves, read
from pipeline import plan
from pipeline.config import parse
from pipeline.errors import PlanError
from tests.importers.verl_files import DAPO, GRPO, MODEL, PPO, REMOTE, SCRIPTS

Write = Callable[..., Path]


def recipe(path: Path) -> dict[str, Any]:
    return yaml.safe_load(bring(path, "mine").text)


def flat(made: dict[str, Any]) -> dict[str, Any]:
    out = {}
    for key in leaves({k: v for k, v in made.items() if k != "defaults"}):
        value: Any = made
        for name in key.split("."):
            value = value[name]
        out[key] = value
    return out


def choices(made: dict[str, Any]) -> dict[str, Any]:
    pairs = [next(iter(d.items())) for d in made["defaults"] if d != "_self_"]
    return {k.removeprefix("override /"): v for k, v in pairs}


def common(folder: Path) -> dict[str, Any]:
    return {
        "model.path": str(MODEL),
        "loader.path": f"{folder}/train.parquet",
        "loader.fields.ground_truth": "reward_model.ground_truth",
        "loader.max_prompt_tokens": 32,
        "eval_loader.path": f"{folder}/test.parquet",
        "eval_loader.fields.ground_truth": "reward_model.ground_truth",
        "eval_loader.max_prompt_tokens": 32,
        "eval_loader.batch_size": 0,
        "eval_loader.purpose": "eval",
        "eval_loader.shuffle": False,
        "eval_loader.sampling.temperature": 0,
        "model.dtype": "bfloat16",
        "trainer.weight_decay": 0.01,
    }


PARQUET = {"loader": "parquet", "loader@eval_loader": "parquet", "task": None}


def test_grpo_with_a_kl_loss(folder: Path, write: Write) -> None:
    made = recipe(write(GRPO))
    assert choices(made) == {**PARQUET, "pipeline": "grpo", "rollout": "hf", "reward": "function"}
    assert flat(made) == {
        **common(folder),
        "name": "qwen-0.5b--grpo",
        "run.steps": 6,  # 3 epochs of 40 // 16 batches
        "eval.every": 5,
        "loader.batch_size": 16,
        "eval_loader.sampling.n": 1,
        "rollout.n": 5,
        "rollout.max_new_tokens": 8,
        "reward.path": "importers/verl/default_reward.py",
        "trainer.lr": 3e-6,
        "trainer.mini_batch": 40,  # 8 prompts of 5 rows
        "trainer.micro_tokens": 160,  # 4 rows of 32 + 8 tokens
    }


def test_ppo_with_a_critic(folder: Path, write: Write) -> None:
    made = recipe(write(PPO))
    assert choices(made) == {**PARQUET, "pipeline": "ppo", "rollout": "vllm_async", "reward": "function"}
    assert flat(made) == {
        **{k: v for k, v in common(folder).items() if k != "model.dtype"},
        "name": "mine",
        "seed": 7,
        "run.steps": 4,
        "eval.every": 0,
        "loader.path": [f"{folder}/train.parquet", f"{folder}/more.parquet"],
        "loader.batch_size": 8,
        "loader.shuffle": False,
        "eval_loader.sampling.top_k": 0,
        "rollout.n": 1,
        "rollout.temperature": 0.8,
        "rollout.top_k": 40,
        "rollout.max_new_tokens": 16,
        "reward.path": f"{folder}/reward.py",
        "reward.name": "judge",
        "reward.kwargs.bonus": 2,
        "advantage.gamma": 0.99,
        "advantage.lam": 0.95,
        "trainer.lr": 1e-6,
        "trainer.epochs": 2,
        "trainer.micro_tokens": 2048,
        "critic.lr": 2e-5,
        "critic.weight_decay": 0.01,
        "critic.epochs": 2,
        "critic.micro_tokens": 32768,
        "critic.cliprange_value": 0.3,
    }


def test_a_higher_clip_and_a_loss_that_divides_by_the_width(folder: Path, write: Write) -> None:
    made = recipe(write(DAPO))
    assert choices(made) == {**PARQUET, "pipeline": "grpo", "rollout": "vllm_async", "reward": "function"}
    assert flat(made) == {
        **{k: v for k, v in common(folder).items() if k != "eval_loader.sampling.temperature"},
        "name": "mine",
        "run.steps": 2,
        "eval.every": 0,
        "loader.batch_size": 8,
        "eval_loader.sampling.n": 2,
        "eval_loader.sampling.top_p": 0.7,
        "rollout.n": 4,
        "rollout.max_new_tokens": 16,
        "reward.path": "importers/verl/default_reward.py",
        "advantage.norm_adv_by_std_in_grpo": False,
        "trainer.lr": 1e-6,
        "trainer.clip_ratio_high": 0.28,
        "trainer.clip_ratio_c": 10.0,
        "trainer.loss_agg_mode": "seq-mean-token-sum-norm",
        "trainer.loss_scale_factor": 16,
    }


def test_a_reward_that_asks_a_server(folder: Path, write: Write) -> None:
    """verl hands token-mean also to a loss whose own aggregation is another."""
    made = recipe(write(REMOTE))
    assert flat(made) == {
        **common(folder),
        "name": "mine",
        "run.steps": 2,
        "eval.every": 0,
        "loader.batch_size": 8,
        "eval_loader.sampling.n": 1,
        "rollout.n": 2,
        "rollout.max_new_tokens": 8,
        "reward.path": f"{folder}/reward.py",
        "reward.name": "judge",
        "reward.workers": 3,
        "reward.kwargs.url": "http://127.0.0.1:9/score",
        "advantage.estimator": "rloo",
        "trainer.lr": 1e-6,
        "trainer.policy_loss": "gspo",
        "trainer.loss_agg_mode": "token-mean",
    }


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_recipe_plans_restates_nothing_and_tells_every_key(name: str, folder: Path, write: Write) -> None:
    path = write(SCRIPTS[name])
    brought = bring(path, "mine")
    made = yaml.safe_load(brought.text)
    base = composed({k: v for k, v in choices(made).items() if v is not None})
    assert [k for k, v in flat(made).items() if same_as(base, k, v)] == []

    written = path.parent / "imported" / "experiment" / "mine.yaml"
    written.parent.mkdir(parents=True)
    written.write_text(brought.text)
    planned = plan.make(parse(["--config-dir", str(written.parent.parent), "experiment=mine", "mode=plan"]))
    assert [p for p in planned.problems if "not installed" not in p.what] == []
    plain = planned.configured.plain()
    for key, value in flat(made).items():
        part: Any = plain
        for step in key.split("."):
            part = part[step]
        assert part == value, key

    c = read(path)
    for given in c.given.values():
        shown = " ".join(given.raw.split())
        told = [n for n in brought.report.splitlines() if n == f"  {shown}" or n.startswith(f"  {shown}  ->  ")]
        assert len(told) == 1, given.key
    comments = [n for n in brought.text.splitlines() if n.startswith("#")]
    assert all(len(n) <= 135 for n in comments if " " in n.strip("# ")[:120])


def kinds(path: Path) -> dict[str, Kind]:
    c = read(path)
    return {k: classify(c, g).kind for k, g in c.given.items()}


def test_kinds_of_a_script(folder: Path, write: Write) -> None:
    found = kinds(write(PPO))
    assert {k for k, v in found.items() if v is Kind.none} == {
        "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio",
        "actor_rollout_ref.actor.grad_clip",
        "algorithm.use_kl_in_reward",
        "algorithm.kl_ctrl.kl_coef",
        "trainer.val_before_train",
    }
    assert {k for k, v in found.items() if v is Kind.differs} == {"data.seed"}
    assert Kind.unknown not in found.values()


def test_a_clip_ratio_that_verl_does_not_read_is_not_carried_over(folder: Path, write: Write) -> None:
    text = "data.train_files=x data.val_files=y trainer.total_training_steps=1 actor_rollout_ref.actor.clip_ratio="
    path = write(f"python3 -m verl.trainer.main_ppo {text}0.3")
    assert kinds(path)["actor_rollout_ref.actor.clip_ratio"] is Kind.differs
    assert not {"clip_ratio", "clip_ratio_low", "clip_ratio_high"} & recipe(path)["trainer"].keys()
    both = "actor_rollout_ref.actor.clip_ratio_low=null actor_rollout_ref.actor.clip_ratio_high=null"
    path = write(f"python3 -m verl.trainer.main_ppo {text}0.3 {both}")
    assert kinds(path)["actor_rollout_ref.actor.clip_ratio"] is Kind.mapped
    assert recipe(path)["trainer"]["clip_ratio"] == 0.3


def test_a_misspelt_key_has_a_near_match(folder: Path, write: Write) -> None:
    path = write(GRPO.replace("algorithm.use_kl", "actor_rollout_ref.rollout.temprature=2 +my.own=1 algorithm.use_kl"))
    report = bring(path, "mine").report
    assert "no key of verl's configuration 0.9.1 (2):" in report
    assert "did you mean actor_rollout_ref.rollout.temperature?" in report
    assert "+my.own=1\n      nothing in it is like it; it was added with '+', for code of its own" in report


def test_a_key_below_a_value_replaces_nothing(folder: Path, write: Write) -> None:
    path = write(GRPO.replace("trainer.nnodes=1", "+data.shuffle.x=1 trainer.nnodes=1"))
    assert kinds(path)["data.shuffle.x"] is Kind.unknown
    assert flat(recipe(path)) == flat(recipe(write(GRPO, "plain.sh")))


def test_yaml_as_verl_has_it(folder: Path, write: Write) -> None:
    text = f"""
    defaults: [ppo_trainer, _self_]
    data: {{train_files: [{folder}/train.parquet], val_files: '{folder}/test.parquet', train_batch_size: 4}}
    algorithm: {{adv_estimator: grpo}}
    actor_rollout_ref:
      model: {{path: '{MODEL}', override_config: {{attn_implementation: eager}}}}
      rollout: {{name: hf, n: 3, temperature: 0.7, response_length: 12}}
      actor: {{ppo_mini_batch_size: 2, optim: {{lr: 1e-5, betas: [0.9, 0.95]}}}}
    trainer:
      total_training_steps: 9
      experiment_name: '${{algorithm.adv_estimator}}-n${{actor_rollout_ref.rollout.n}}'
    """
    found = flat(recipe(write(text, "overrides.yaml")))
    assert found["name"] == "grpo-n3"
    assert (found["rollout.n"], found["rollout.temperature"], found["rollout.max_new_tokens"]) == (3, 0.7, 12)
    assert (found["trainer.mini_batch"], found["trainer.lr"], found["trainer.beta2"]) == (6, 1e-5, 0.95)
    assert found["loader.path"] == f"{folder}/train.parquet"
    listed = write("- algorithm.adv_estimator=grpo\n- actor_rollout_ref.rollout.n=3\n", "list.yaml")
    assert kinds(listed) == {"algorithm.adv_estimator": Kind.mapped, "actor_rollout_ref.rollout.n": Kind.mapped}


def test_a_whole_configuration_is_told_by_what_is_not_verls_default(folder: Path, write: Write) -> None:
    cfg: Any = OmegaConf.create(OmegaConf.to_container(defaults()[0], resolve=False))
    cfg.actor_rollout_ref.rollout.n = 4
    cfg.actor_rollout_ref.rollout.name = "hf"
    report = bring(write(OmegaConf.to_yaml(cfg), "config.yaml"), "mine").report
    assert report.splitlines()[0].endswith("keys have verl's own default values.")
    assert "actor_rollout_ref.rollout.n=4  ->  rollout.n=4" in report
    assert len(report.splitlines()) < 40


def test_what_the_environment_holds_is_not_shown(folder: Path, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "s3cret-value")
    shell = GRPO.replace(
        "trainer.nnodes=1", "+ray_kwargs.ray_init.runtime_env.env_vars.KEY=$MY_API_KEY trainer.nnodes=1"
    )
    yaml_text = "ray_kwargs: {ray_init: {runtime_env: {env_vars: {KEY: '${oc.env:MY_API_KEY}'}}}}\n"
    for path in (write(shell), write(yaml_text, "x.yaml")):
        brought = bring(path, "mine")
        assert "s3cret-value" not in brought.text + brought.report
        assert "MY_API_KEY" in brought.report


def test_a_text_with_an_interpolation_of_its_own_stays_text(folder: Path, write: Write) -> None:
    path = write(
        f"python3 -m verl.trainer.main_ppo data.train_files='{folder}/a\\${{b}}.parquet' trainer.total_training_steps=1"
    )
    assert "a\\${b}.parquet" in bring(path, "mine").text


def test_files_that_are_not_here_leave_the_steps_open(
    folder: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATA_DIR", "/nowhere/data")
    brought = bring(write(GRPO), "mine")
    assert "3 x the batches of files that are not here: give run.steps" in brought.report
    file = write(brought.text, "mine.yaml")
    (file.parent / "own" / "experiment").mkdir(parents=True)
    file.rename(file.parent / "own" / "experiment" / "mine.yaml")
    line = ["--config-dir", str(file.parent / "own"), "experiment=mine", "mode=plan"]
    data = [f"loader.path={folder}/train.parquet", f"eval_loader.path={folder}/test.parquet"]
    with pytest.raises(PlanError) as e:
        plan.make(parse([*line, *data]))
    assert [p.where for p in e.value.problems if p.level == "error"] == ["run.steps"]
    assert plan.make(parse([*line, *data, "run.steps=2"])).root.run.steps == 2


@pytest.mark.parametrize(
    ("text", "name", "where", "what"),
    [
        ("python3 train.py a=1\n", "x.sh", "import.verl", "has no command line of verl.trainer.main_ppo"),
        ("python3 -m recipe.dapo.main_dapo a=1\n", "x.sh", "import.verl", "has no command line of"),
        ("python3 -m verl.trainer.main_ppo a=1\n" * 2, "x.sh", "import.verl", "has 2 command lines"),
        ("python3 -m verl.trainer.main_ppo 'a=1\n", "x.sh", "import.verl", "is never closed"),
        ("python3 -m verl.trainer.main_ppo data.train_files=$D\n", "x.sh", "data.train_files", "$D is set neither"),
        ("python3 -m verl.trainer.main_ppo a=[1\n", "x.sh", "a=[1", "is no override that Hydra, and so verl, can read"),
        (
            "python3 -m verl.trainer.main_ppo trainer.experiment_name='a b, c'\n",
            "x.sh",
            "trainer.experiment_name='a b, c'",
            "it is several values, which only a sweep can have",
        ),
        ("python3 -m verl.trainer.main_ppo $(more)\n", "x.sh", "$(more)", "$(more) is the output of a command"),
        (
            "python3 -m verl.trainer.main_ppo --config-name=sft\n",
            "x.sh",
            "--config-name",
            "verl has no configuration 'sft'",
        ),
        ("python3 -m verl.trainer.main_ppo model_engine=x\n", "x.sh", "model_engine", "verl has no engine 'x'"),
        ("a: [1\n", "x.yaml", "import.verl", "is not YAML"),
        ("just text\n", "x.yaml", "import.verl", "holds no sections"),
        ("- 1\n- 2\n", "x.yaml", "import.verl", "holds no sections"),
        (
            "data: {train_files: '${nowhere.x}'}\n",
            "x.yaml",
            "data.train_files",
            "Interpolation key 'nowhere.x' not found",
        ),
    ],
)
def test_files_that_cannot_be_read(write: Write, text: str, name: str, where: str, what: str) -> None:
    with pytest.raises(PlanError) as e:
        bring(write(text, name), "mine")
    problem = e.value.problems[0]
    assert problem.where == where
    assert what in problem.what


def test_lines_that_never_reach_verl_are_told(folder: Path, write: Write) -> None:
    text = "python3 -m verl.trainer.main_ppo data.train_files=x data.val_files=y trainer.total_training_steps=3 \\\n"
    path = write(f"{text}  # data.shuffle=False \\\n  data.train_batch_size=7\n")
    report = bring(path, "mine").report
    assert "line 3: data.train_batch_size=7 is not part of the command" in report
    assert "batch_size=7" not in bring(path, "mine").text.partition("defaults:")[2]
