"""What users get wrong on a command line, and what they must be told: a table that tests run alone and by threes.

`python -m tests.conf.cases` prints all of it, as a user sees it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import run
from pipeline import config, registry

ROOT = Path(__file__).resolve().parents[2]
MINE = ("--config-dir", "mine/conf")


@dataclass(frozen=True)
class Case:
    """A command line, and pieces of what must be told: the config path, the value, what is allowed, what to do.

    `problems`: how many it has in all. One that stands `alone` cannot be put beside others: it takes a part away that
    others need, or what is wrong is that the others are there.
    """

    args: tuple[str, ...]
    told: tuple[str, ...]
    problems: int = 1
    alone: bool = False


def bad(*args: str, told: tuple[str, ...], problems: int = 1, alone: bool = False) -> Case:
    return Case(args, told, problems, alone)


ROLLOUTS = ", ".join(sorted(p.stem for p in (ROOT / "conf" / "rollout").glob("*.yaml")))
"""Whoever adds a backend changes no test."""
ROLLOUT_SETTINGS = "allowed: batch_rows, max_new_tokens, min_p, n, prefill_tokens, temperature, top_k, top_p"

CASES: dict[str, Case] = {
    # -- settings and options that are not there ---------------------------------------------------------------
    "misspelt setting": bad(
        "rollout.temprature=0.7",
        told=("rollout.temprature: no such setting", "did you mean 'temperature'?", ROLLOUT_SETTINGS),
    ),
    "unknown setting added": bad("+rollout.typo=1", told=("rollout.typo: no such setting", ROLLOUT_SETTINGS)),
    "unknown setting forced": bad(
        "++sampler.topk=3", told=("sampler.topk: no such setting", "did you mean rollout.top_k?")
    ),
    "setting of another part": bad(
        "sampler.top_k=3",
        told=("sampler.top_k: no such setting", "did you mean rollout.top_k? allowed here: (nothing)"),
    ),
    "setting of the run": bad("run.stepps=3", told=("run.stepps: no such setting", "did you mean 'steps'?")),
    "new key at the top": bad("+sede=3", told=("sede: no such setting", "did you mean 'seed'?", "+GROUP@sede=OPTION")),
    "part that is not there": bad(
        "reference.lr=1",
        told=("reference.lr: there is no 'reference' in this pipeline", "configured: advantage, compare, critic"),
    ),
    "inside a single value": bad(
        "rollout.n.x=3", told=("rollout.n.x: no such setting: 'rollout.n' is a single value", "rollout.n=3")
    ),
    "a section replaced by another's": bad(
        "critic={kind: model}", told=("critic.kind: no such setting", "allowed: beta1, beta2, clip_grad")
    ),
    "misspelt option": bad(
        "rollout=vlm",
        told=("rollout: there is no 'vlm' in the group 'rollout'", "did you mean 'vllm_async'?", ROLLOUTS),
    ),
    "misspelt option and its settings": bad(
        "rollout=vllm_asynk",
        "rollout.max_model_len=64",
        "rollout.lenth=3",
        told=("there is no 'vllm_asynk'", "did you mean 'vllm_async'?", "rollout.lenth: no such setting"),
        problems=2,
    ),
    "misspelt group": bad(
        "rolout=hf", told=("rolout: there is no 'rolout' in this pipeline", "did you mean 'rollout'?")
    ),
    "misspelt recipe": bad(
        "experiment=gsm8kk",
        told=("experiment: there is no 'gsm8kk' in the group 'experiment'", "did you mean 'gsm8k'?"),
    ),
    "misspelt pipeline": bad(
        "pipeline=gpro", told=("pipeline: there is no 'gpro' in the group", "did you mean 'grpo'? allowed: grpo, ppo")
    ),
    "no option": bad("rollout=null", told=("rollout: 'null' is no option of the group", ROLLOUTS, "'~rollout'")),
    "option added twice": bad(
        "+rollout=hf", told=("rollout: is chosen already", "rollout=hf, without '+'", "+rollout@NAME=hf")
    ),
    "second node without a plus": bad(
        "reward@judge=rule", told=("reward@judge: nothing is chosen under this name", "+reward@judge=rule")
    ),
    "second node of no group": bad(
        "+rewrad@judge=rule", told=("rewrad: there is no group 'rewrad'", "did you mean 'reward'?")
    ),
    "setting of Hydra": bad("hydra.run.dirr=x", told=("hydra.run.dirr: no such setting", "did you mean 'dir'?")),
    # -- values --------------------------------------------------------------------------------------------------
    "out of range": bad("rollout.temperature=-1", told=("rollout.temperature: -1.0 is not allowed", "must be >= 0")),
    "out of two limits": bad("rollout.top_p=1.5", told=("rollout.top_p: 1.5 is not allowed", "must be > 0 and <= 1")),
    "not a number": bad(
        "rollout.temperature=warm",
        told=("rollout.temperature: 'warm' is not a number", "a number >= 0 (0 is greedy), such as", "temperature=1.0"),
    ),
    "not whole": bad("rollout.n=2.5", told=("rollout.n: 2.5 is not a whole number", ">= 1 (samples a prompt)")),
    "not a truth": bad(
        "loader.shuffle=maybe", told=("loader.shuffle: 'maybe' is not true or false", "yes, no, on and off too")
    ),
    "null": bad("seed=null", told=("seed: null is not a whole number", "must be a whole number >= 0", "seed=0")),
    "not a number in a list": bad(
        "advantage.reward_weights=[1,x]", told=("advantage.reward_weights.1: 'x' is not a number", "for gdpo")
    ),
    "item that is not there": bad(
        "advantage.reward_weights.5=1",
        told=("advantage.reward_weights.5: there is no item 5", "the list has 0", "advantage.reward_weights=[...]"),
    ),
    "misspelt word": bad("run.device=gpu", told=("run.device: 'gpu' is not allowed", "allowed: auto, cpu, cuda")),
    "misspelt mode": bad("mode=rum", told=("mode: 'rum' is not allowed", "did you mean 'run'?")),
    "misspelt placement": bad(
        "placement.reward=proces", told=("placement.reward: 'proces' is not allowed", "did you mean 'process'?")
    ),
    "placement of no node": bad(
        "placement.rewards=process", told=("placement.rewards: there is no node 'rewards'", "did you mean 'reward'?")
    ),
    "a value for a section": bad("eval=3", told=("eval: is a section, and '3' is a single value", "its keys: every")),
    "name with a slash": bad("name=a/b", told=("name: 'a/b' holds '/'", "letters, digits, '.', '_' and '-'")),
    "long name": bad(f"name={'n' * 300}", told=("name: 'nnn", "is longer than 100 bytes")),
    "setting removed": bad("~rollout.n", told=("rollout.n: is a setting, which can be set but not removed", "n=8")),
    # -- how values are written ------------------------------------------------------------------------------------
    "equals sign": bad(
        "loader.path=a=b", told=("loader.path: the value 'a=b' cannot be read: '=' must", "'loader.path=\"a=b\"'")
    ),
    "comma": bad(
        "loader.path=a,b",
        told=("loader.path: 'a,b' are several values", "the flag -m", "[a,b]", "'loader.path=\"a,b\"'"),
    ),
    "brace": bad("model.path={a", told=("model.path: the value '{a' cannot be read: '{' must", "'model.path=\"{a\"'")),
    "single quote": bad("reward.pattern=it's", told=("reward.pattern: the value", '"\'" must stand in quotes')),
    "double quote": bad('reward.pattern=a"b', told=("reward.pattern: the value", '\'reward.pattern="a\\"b"\'')),
    "newline": bad("name=a\nb", told=(r"name: the value 'a\nb' cannot be read", "$'name=\"a\\nb\"'")),
    "tilde": bad("model.path=~/x", told=("model.path: the value '~/x' cannot be read: '~' must", '"~/x"\'')),
    "hash": bad("eval_loader.path=a#b", told=("eval_loader.path: the value 'a#b'", "'#' must", '"a#b"\'')),
    "list that does not end": bad(
        "plugins=[a", told=("plugins: the value '[a' cannot be read", "a list is written 'plugins=[a,b]'")
    ),
    "nothing behind a dollar": bad(
        "model.path=${nowhere}",
        told=("model.path: Interpolation key 'nowhere' not found", r"write '\${'", "(its value is ${nowhere})"),
    ),
    "no variable": bad(
        "model.path=${oc.env:NO_SUCH_VARIABLE}", told=("model.path: ", "Environment variable 'NO_SUCH_VARIABLE'")
    ),
    "no value": bad("rollout.n", told=("rollout.n: has no value", "write rollout.n=VALUE")),
    "no path": bad("=3", told=("=3: is no override", "PATH=VALUE")),
    "sweep without the flag": bad("seed=1,2", told=("seed: '1,2' are several values", "a sweep needs the flag -m")),
    # -- the graph -------------------------------------------------------------------------------------------------
    "node taken out": bad(
        "~graph.forward.reward",
        told=(
            "graph.forward.advantage.rewards: 'reward' is not a node of graph.forward",
            "'graph.forward.reward={rollouts: rollout}'",
        ),
        alone=True,
    ),
    "misspelt node taken out": bad(
        "~graph.forward.rewrad", told=("graph.forward.rewrad: no such setting", "did you mean 'reward'?")
    ),
    "cycle": bad(
        "graph.forward.critic.rollouts=advantage",
        told=(
            "graph.forward: has a cycle: ",
            "graph.forward.critic.rollouts=advantage",
            "graph.forward.critic.rollouts: takes a RolloutBatch, but 'advantage' makes a AdvantageBatch",
        ),
        problems=2,
        alone=True,
    ),
    "not wired": bad(
        "+reward@judge=rule", told=("judge: is configured but not wired", "graph.forward", "remove it with '~judge'")
    ),
    "wrong record": bad(
        "graph.forward.advantage.rewards=rollout",
        told=(
            "graph.forward.advantage.rewards: takes a RewardBatch, but 'rollout' makes a RolloutBatch",
            "nodes that make one: reward",
        ),
        alone=True,
    ),
    "unknown input": bad(
        "graph.forward.reward.rollout=rollout",
        told=("graph.forward.reward.rollout: 'reward' has no input 'rollout'", "did you mean 'rollouts'?"),
        alone=True,
    ),
    "unknown producer": bad(
        "graph.learn.trainer.old=trianer",
        told=("graph.learn.trainer.old: 'trianer' is not a node", "did you mean 'trainer'?"),
        alone=True,
    ),
    "unfed input": bad(
        "~graph.learn.trainer.old",
        told=("graph.learn.trainer.old: nothing feeds this input, which takes a LogProbBatch", "make one: trainer"),
        alone=True,
    ),
    "cannot publish": bad(
        "graph.publish.rollout=reward",
        told=("graph.publish.rollout: 'reward' (rule) has no method 'publish'", "trainer"),
    ),
    "no edge": bad(
        "graph.forward.reward.rollouts=[rollout]", told=("graph.forward.reward.rollouts: ['rollout'] is not text",)
    ),
    "no graph": bad("graph=3", told=("graph: is a section, and '3' is a single value", "forward, learn"), alone=True),
    "option taken out": bad(
        "~reward", told=("reward: has settings (target), and no option", "choose one: reward=function"), alone=True
    ),
    "runner taken out": bad("~runner", told=("runner: is missing", "choose one of: runner=overlap, runner=sync")),
    # -- what does not fit together ----------------------------------------------------------------------------------
    "no such file": bad(
        "loader.path=data/digits/trian.jsonl", told=("loader.path: ", "trian.jsonl", "mean 'train.jsonl'?")
    ),
    "model without a tokenizer": bad(
        "model.path=no_tokenizer", told=("model.path: ", "no_tokenizer has no tokenizer.json", "save_pretrained")
    ),
    "no such model": bad(
        "model.path=no_tokeniser", told=("model.path: there is no folder", "did you mean 'no_tokenizer'?")
    ),
    "rows not divisible": bad(
        "trainer.mini_batch=7",
        told=(
            "trainer.mini_batch: 7 rows do not divide the 512 rows of a step (64 prompts x 8 samples)",
            "nearest that do: 4 or 8; 0 takes all rows",
        ),
    ),
    "response longer than the model": bad(
        "rollout.max_new_tokens=500",
        told=("rollout.max_new_tokens: 500 new tokens after a prompt of 1 do not fit the model's 128", "at most 127"),
    ),
    "held-out response longer than the model": bad(
        "eval_loader.sampling.max_new_tokens=500",
        told=(
            "eval_loader.sampling.max_new_tokens: 500 new tokens after a prompt of 1 do not fit the model's 128",
            "at most 127 for such a prompt",
        ),
        alone=True,
    ),
    "loader's prompts longer than the model": bad(
        "loader.max_prompt_tokens=512",
        told=("rollout.max_new_tokens: 8 new tokens after a prompt of 512", "lower max_prompt_tokens, in loader or"),
        alone=True,
    ),
    "prompt and response longer than the model": bad(
        "tokenizer_cache.max_prompt_tokens=124",
        told=("rollout.max_new_tokens: 8 new tokens after a prompt of 124 do not fit", "at most 4 for such a prompt"),
    ),
    "sampler that the engine cannot use": bad(
        "sampler=flashinfer",
        "mode=plan",
        told=("rollout: rollout=torch needs 'logits_sampler', which sampler=flashinfer does not", "do: sampler=torch"),
    ),
    "misspelt estimator": bad(
        "advantage.estimator=gea",
        told=("advantage.estimator: verl has no advantage estimator 'gea'", "did you mean 'gae'?", "rloo"),
    ),
    "misspelt loss": bad(
        "trainer.policy_loss=vanila", told=("trainer.policy_loss: verl has no policy loss 'vanila'", "'vanilla'?")
    ),
    "estimator that nothing feeds": bad(
        "pipeline=grpo",
        "advantage.estimator=gae",
        told=("advantage.estimator: gae needs values, which nothing feeds", "a critic", "no more than is wired: gdpo"),
        alone=True,
    ),
    "held-out rows that are trained on": bad(
        "eval_loader.path=data/digits/train.jsonl", told=("eval_loader.path: shares rows with 'loader'", "another file")
    ),
    "same samples": bad("rollout.temperature=0", told=("rollout.n: 8 samples a prompt, but with temperature 0", "n=1")),
    # -- plug-ins and files of one's own ------------------------------------------------------------------------------
    "option file without a schema": bad(
        *MINE,
        "reward=loose",
        told=(
            "reward: its option file ",
            "mine/conf/reward/loose.yaml extends no schema",
            "/schema/reward/BACKEND@_here_",
        ),
        alone=True,
    ),
    "option file that is there already": bad(
        *MINE,
        "loader=standard",
        told=(
            "loader: loader/standard.yaml stands in two folders, and ",
            "mine/conf/loader/standard.yaml would not",
            "another name",
            "defaults: [OPTION, _self_]",
        ),
        alone=True,
    ),
    "option file of no stage": bad(
        *MINE,
        "reward=ghost",
        told=("mine/conf/reward/ghost.yaml extends /schema/reward/ghost", "registered: function", "plugins=[...]"),
        alone=True,
    ),
    "two stages of one name": bad(
        *MINE,
        "plugins=[first,second]",
        told=("reward=mine is registered twice: ", "mine/first.py:13 and ", "mine/second.py:15", "another name"),
        alone=True,
    ),
    "name of a stage of ours": bad(
        *MINE,
        "plugins=[ours]",
        told=("reward=rule is registered twice: ", "stages/reward/rule.py:", "mine/ours.py:13"),
        alone=True,
    ),
    "broken import": bad(
        *MINE,
        "plugins=[needs]",
        told=(
            "plugins: importing 'needs' failed: ModuleNotFoundError: No module named 'nobody_has_it'",
            "mine/needs.py:2",
        ),
        alone=True,
    ),
    "broken syntax": bad(*MINE, "plugins=[syntax]", told=("SyntaxError", "mine/syntax.py:3"), alone=True),
    "broken import deep inside": bad(
        *MINE, "plugins=[deep]", told=("JSONDecodeError", "raised at", "mine/deep.py:3"), alone=True
    ),
    "plug-in that is not there": bad(
        "plugins=[nowhere]",
        told=("No module named 'nowhere'", "there is no module of that name; looked in"),
        alone=True,
    ),
    "plug-in that breaks in a plan": bad(
        *MINE,
        "plugins=[clumsy]",
        "reward=clumsy",
        told=("reward: the stage itself broke while it was planned: ZeroDivisionError", "mine/clumsy.py:17"),
        alone=True,
    ),
    "broken import and another mistake": bad(
        *MINE,
        "plugins=[needs]",
        "rollout.n=0",
        told=("nobody_has_it", "rollout.n: 0 is not allowed"),
        problems=2,
        alone=True,
    ),
    "no such folder": bad("--config-dir", "nowhere", told=("--config-dir: there is no folder 'nowhere'",), alone=True),
    "unknown flag": bad("--sweep", told=("unrecognized arguments: --sweep", "flags: -m"), alone=True),
    "flag that cannot be planned": bad(
        "--config-name", "x", told=("--config-name: this flag", "experiment="), alone=True
    ),
    "two flags that ask for different things": bad(
        "-m", "--cfg", "job", told=("--multirun: --multirun and --cfg ask for different things", "give one"), alone=True
    ),
    "nothing to compare": bad(
        "mode=diff",
        told=("plan.a: must be given for mode=diff", "plan.b: must be given", "a run directory"),
        problems=2,
        alone=True,
    ),
}

STAGE = '''"""A reward of a user's own."""

from dataclasses import dataclass

from pipeline.registry import backend
from stages.reward import Reward, RewardConfig
from stages.records import RewardBatch, RolloutBatch

@dataclass(slots=True, kw_only=True)
class {cls}Config(RewardConfig):
    pass

@backend("reward", "{name}")
class {cls}(Reward):
    def __init__(self, cfg: {cls}Config): ...
    def run(self, rollouts: RolloutBatch) -> RewardBatch: ...
'''
OPTION = "defaults:\n  - /schema/reward/{name}@_here_\n  - _self_\n"


def lay_out(folder: Path) -> None:
    """The files that the cases name."""
    mine = folder / "mine"
    (mine / "conf" / "reward").mkdir(parents=True)
    for name in ("ghost", "clumsy"):
        (mine / "conf" / "reward" / f"{name}.yaml").write_text(OPTION.format(name=name))
    (mine / "conf" / "reward" / "loose.yaml").write_text("weights: {exact: 1}\n")
    (mine / "conf" / "loader").mkdir()
    (mine / "conf" / "loader" / "standard.yaml").write_text(
        "defaults:\n  - /schema/loader/standard@_here_\n  - _self_\n"
    )
    clumsy = STAGE.format(cls="Clumsy", name="clumsy") + "    def check(self, facts): return 1 // 0\n"
    for name, text in {
        "first": STAGE.format(cls="First", name="mine"),
        "second": "\n\n" + STAGE.format(cls="Second", name="mine"),
        "ours": STAGE.format(cls="Ours", name="rule"),
        "needs": "import json\nimport nobody_has_it\n",
        "syntax": "import json\n\ndef f(:\n    pass\n",
        "deep": "import json\n\nx = json.loads('{')\n",
        "clumsy": clumsy,
    }.items():
        (mine / f"{name}.py").write_text(text)
    shutil.copytree(ROOT / "data" / "base", folder / "no_tokenizer", ignore=shutil.ignore_patterns("tokenizer.json"))


@contextlib.contextmanager
def as_it_was():
    """What a command line registers, imports from here or looks for is forgotten afterwards."""
    path, backends = list(sys.path), dict(registry._entries)
    try:
        yield
    finally:
        here = str(Path.cwd())
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", "")).startswith(here):
                del sys.modules[name]
        sys.path[:] = path
        registry._entries.clear()
        registry._entries.update(backends)


def told(args: tuple[str, ...]) -> tuple[int, str]:
    """Exit status and standard error of a command line that cannot run."""
    err = io.StringIO()
    with as_it_was(), contextlib.redirect_stderr(err):
        status = run.main(args)
    return status, err.getvalue()


def main() -> None:
    config.prepare(config.parse([]))  # so that our own stages are not forgotten after the first
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        lay_out(Path(folder))
        for name, case in CASES.items():
            status, text = told(case.args)
            print(f"# {name}\n$ python run.py {' '.join(map(json.dumps, case.args))}\n{text}exit status {status}\n")
        os.chdir("/")


if __name__ == "__main__":
    main()
