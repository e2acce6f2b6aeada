"""A user's scoring function: what it may return, how its file is loaded, and what a plan says about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.config import RootConfig
from pipeline.context import Context
from pipeline.metrics import summarise
from pipeline.plan import Facts
from stages.records import RewardBatch, Status
from stages.reward.function import FunctionReward, FunctionRewardConfig
from tests.builders import rollout_batch

SIGNATURE = "data_source, solution_str, ground_truth, extra_info"


@contextmanager
def opened(ctx: Context, path: Path, **settings: Any) -> Iterator[FunctionReward]:
    reward = FunctionReward(FunctionRewardConfig(path=str(path), **settings))
    try:
        reward.open(ctx)
        yield reward
    finally:
        reward.close()


def score(
    ctx: Context, path: Path, responses: list[str], answers: list[Any] | None = None, **settings: Any
) -> RewardBatch:
    n = len(responses)
    with opened(ctx, path, **settings) as reward:
        return reward.run(rollout_batch([[1]] * n, [[1]] * n, responses=responses, answers=answers or ["x"] * n))


def f32(values: Any) -> np.ndarray:
    return np.asarray(values, np.float32)


def texts(rewards: RewardBatch) -> list[str]:
    return [rewards.reason.text(i) for i in range(len(rewards))]


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def write(text: str, name: str = "score.py") -> Path:
        path = tmp_path / "user" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    return write


@pytest.fixture
def ctx(make_context: Callable[..., Context]) -> Context:
    return make_context("reward")


def test_it_is_called_as_verl_calls_it(ctx: Context, write: Callable[..., Path]) -> None:
    path = write("def judge(**given):\n    print(sorted(given.items()))\n    return 1\n")
    with opened(ctx, path, name="judge", kwargs={"bonus": 2}, target="sort") as reward:
        reward.run(
            rollout_batch(
                [[1]], [[1]], responses=["it is 5"], answers=[{"sort": "5"}], data_source="digits", extra=[{"index": 3}]
            )
        )
    given = {
        "bonus": 2,
        "data_source": "digits",
        "extra_info": {"index": 3},
        "ground_truth": "5",
        "solution_str": "it is 5",
    }
    assert str(sorted(given.items())) in (ctx.run_dir / "run.log").read_text()


ALLOWED: list[tuple[str, float, float, dict[str, float]]] = [
    ("0.25", 0.25, 0, {}),
    ("1", 1, 1, {}),
    ("True", 1, 1, {}),
    ("np.float32(0.5)", 0.5, 0, {}),
    ("np.bool_(True)", 1, 1, {}),
    ("{'score': 0.5}", 0.5, 0, {}),
    ("{'score': -1.0, 'acc': True, 'pred': 'five'}", -1, 1, {}),
    ("{'score': 2, 'acc': 0, 'form': 0.5, 'tone': True, 'note': None}", 2, 0, {"form": 0.5, "tone": 1}),
]


def test_what_it_may_return(ctx: Context, write: Callable[..., Path]) -> None:
    path = write(f"import numpy as np\ndef compute_score({SIGNATURE}):\n    return eval(solution_str)\n")
    rewards = score(ctx, path, [value for value, *_ in ALLOWED])
    assert texts(rewards) == [""] * len(ALLOWED)
    assert rewards.score.tolist() == [score for _, score, _, _ in ALLOWED]
    assert rewards.accuracy.tolist() == [accuracy for _, _, accuracy, _ in ALLOWED]
    names = rewards.part_names
    parts = [{n: v for n, v in zip(names, row, strict=True) if not np.isnan(v)} for row in rewards.parts.tolist()]
    assert parts == [parts for *_, parts in ALLOWED]


RETURNS = {
    "none": ("None", "compute_score abstained on row 0"),
    "inner_none": ("{'score': None}", "compute_score abstained on row 0"),
    "nan": ("float('nan')", "compute_score returned nan (float) for row 0, not a finite number"),
    "inf": ("-float('inf')", "compute_score returned -inf (float) for row 0, not a finite number"),
    "too_large": ("1e39", "compute_score returned 1e+39 (float) for row 0, not a finite number"),
    "text": ("'1'", "compute_score returned '1' (str) for row 0, not a finite number"),
    "tuple": ("(1, 2)", "compute_score returned (1, 2) (tuple) for row 0, not a finite number"),
    "array": ("np.ones(2)", "compute_score returned array([1., 1.]) (ndarray) for row 0, not a finite number"),
    "no_score": ("{'acc': 1}", "compute_score returned an object without 'score' for row 0; it has: acc"),
    "bad_acc": ("{'score': 1, 'acc': 'yes'}", "compute_score returned acc 'yes' (str) for row 0, not a number in 0..1"),
    "large_acc": ("{'score': 1, 'acc': 7}", "compute_score returned acc 7 (int) for row 0, not a number in 0..1"),
}


def test_what_it_may_not_return_leaves_the_row_unscored(ctx: Context, write: Callable[..., Path]) -> None:
    """modelscope/ms-swift issue 8123: one None or NaN must not reach the statistics of the others."""
    cases = "".join(f"    if solution_str == '{k}': return {v}\n" for k, (v, _) in RETURNS.items())
    path = write(f"import numpy as np\ndef compute_score({SIGNATURE}):\n{cases}    return 1\n")
    rewards = score(ctx, path, ["fine", *RETURNS, "fine"])
    expected = ["", *(r.replace("row 0", f"row {i}") for i, (_, r) in enumerate(RETURNS.values(), 1)), ""]
    assert texts(rewards) == expected
    assert rewards.status.tolist() == [0] + [Status.UNSCORED] * len(RETURNS) + [0]
    np.testing.assert_array_equal(np.isnan(rewards.score), rewards.status == Status.UNSCORED)
    metrics = summarise(ctx.meter.drain())
    assert (metrics["reward/mean"], metrics["reward/unscored"]) == (1.0, len(RETURNS))


def test_an_abstention_leaves_the_mean_of_the_others(ctx: Context, write: Callable[..., Path]) -> None:
    path = write(f"def compute_score({SIGNATURE}):\n    return ground_truth\n")
    score(ctx, path, ["", "", "", ""], answers=[1, None, 0, 1])
    assert summarise(ctx.meter.drain())["reward/mean"] == pytest.approx(2 / 3)


def test_parts_that_only_some_rows_have(ctx: Context, write: Callable[..., Path]) -> None:
    path = write(f"def compute_score({SIGNATURE}):\n    return {{'score': 0, solution_str: 3}}\n")
    rewards = score(ctx, path, ["tone", "form"])
    assert rewards.part_names == ("form", "tone")
    np.testing.assert_array_equal(rewards.parts, f32([[np.nan, 3], [3, np.nan]]))
    assert summarise(ctx.meter.drain())["reward/form/mean"] == 3


BREAKS = {
    "while True: pass": "timed out after 0.7 s",
    "import os; os._exit(4)": "worker died (process 'reward (function)' ended with exit code 4)",
    "raise ValueError('odd')": "raised ValueError: odd",
    "raise ValueError('\\ud800')": "raised ValueError: ?",
    "raise ValueError('x' * 10000)": ("raised ValueError: " + "x" * 1000)[:500],
    "return ground_truth['a']": "raised TypeError: string indices must be integers, not 'str'",
    "raise RuntimeError('No CUDA GPUs')": "raised RuntimeError: No CUDA GPUs (reward workers are CPU only: the GPU is "
    "the policy's; a model that scores is reward=model)",
}


def test_a_function_that_breaks_costs_its_row_only(ctx: Context, write: Callable[..., Path]) -> None:
    cases = "".join(f"    if solution_str == {body!r}:\n        {body}\n" for body in BREAKS)
    path = write(f"def compute_score({SIGNATURE}):\n{cases}    return 1\n")
    rows = [r for body in BREAKS for r in ("fine", body)]
    rewards = score(ctx, path, rows, timeout_s=0.7)
    assert rewards.status.tolist() == [Status.OK, Status.UNSCORED] * len(BREAKS)
    assert texts(rewards) == [r for reason in BREAKS.values() for r in ("", reason)]


def test_workers_see_no_gpu(ctx: Context, write: Callable[..., Path]) -> None:
    path = write(
        "import os\nSEEN = os.environ['CUDA_VISIBLE_DEVICES']\n"
        f"def compute_score({SIGNATURE}):\n    return SEEN == ''\n"
    )
    assert score(ctx, path, ["a"]).score.tolist() == [1]


def test_coroutine_functions_share_one_event_loop(ctx: Context, write: Callable[..., Path]) -> None:
    path = write(
        "import asyncio\nloops = set()\n"
        f"async def compute_score({SIGNATURE}):\n"
        "    await asyncio.sleep(0)\n    loops.add(id(asyncio.get_running_loop()))\n    return len(loops)\n"
    )
    assert score(ctx, path, ["a", "b", "c"]).score.tolist() == [1, 1, 1]


def test_correct_at_sets_what_counts_as_right(ctx: Context, write: Callable[..., Path]) -> None:
    path = write(f"def compute_score({SIGNATURE}):\n    return float(solution_str)\n")
    assert score(ctx, path, ["0.4", "0.5", "0.6"], correct_at=0.5).accuracy.tolist() == [0, 1, 1]


# -- how the file is loaded (verl issue 3150) ----------------------------------------------------------------

LOADED = {
    "a helper class, a dataclass and a lambda": (
        "import dataclasses, pickle\nclass Helper:\n    add = staticmethod(lambda a: a + 1)\n"
        "@dataclasses.dataclass\nclass Part:\n    value: int = 1\n"
        f"def compute_score({SIGNATURE}):\n    return Helper.add(pickle.loads(pickle.dumps(Part())).value)\n"
    ),
    "a relative import": f"from .neighbour import TWO\ndef compute_score({SIGNATURE}):\n    return TWO\n",
    "a plain import": f"import neighbour\ndef compute_score({SIGNATURE}):\n    return neighbour.TWO\n",
    "the function of a neighbour": "from .neighbour import compute_score\n",
    "a lambda": f"compute_score = lambda {SIGNATURE}: 2\n",
    "a callable object": f"class C:\n    def __call__(self, {SIGNATURE}):\n        return 2\ncompute_score = C()\n",
}


NAMES = ["json.py", "score.py", "my-score.v2.py"]


@pytest.mark.parametrize(("text", "name"), list(zip(LOADED.values(), NAMES * 2, strict=True)), ids=LOADED)
def test_files_that_work(ctx: Context, write: Callable[..., Path], text: str, name: str) -> None:
    write(f"TWO = 2\ndef compute_score({SIGNATURE}):\n    return TWO\n", "neighbour.py")
    path = write(text, name)
    assert problems(path) == []
    assert score(ctx, path, ["a", "b"]).score.tolist() == [2, 2]


def test_a_file_called_json_does_not_hide_the_standard_library(ctx: Context, write: Callable[..., Path]) -> None:
    path = write(f"import json\ndef compute_score({SIGNATURE}):\n    return json.loads('7')\n", "json.py")
    assert score(ctx, path, ["a"]).score.tolist() == [7]


def test_the_working_folder_hides_nothing_either(
    ctx: Context, write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(f"def compute_score({SIGNATURE}):\n    return 7\n", "json.py")
    monkeypatch.chdir(path.parent)
    assert score(ctx, Path("json.py"), ["a"]).score.tolist() == [7]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import no_such_thing\n", "does not run: ModuleNotFoundError: No module named 'no_such_thing'"),
        ("raise SystemExit(3)\n", "does not run: SystemExit: 3"),
        ("from .nowhere import x\n", "does not run: ModuleNotFoundError"),
        ("compute_score = 5\n", "defines no function 'compute_score'"),
    ],
)
def test_a_file_that_does_not_run_is_an_error_of_open(
    ctx: Context, write: Callable[..., Path], text: str, says: str
) -> None:
    with pytest.raises(ImportError, match=says), opened(ctx, write(text)):
        pass


@pytest.mark.slow
def test_a_scorer_of_verl_works_unchanged(ctx: Context, write: Callable[..., Path]) -> None:
    path = write(
        "from verl.utils.reward_score import gsm8k\n"
        f"def compute_score({SIGNATURE}):\n    return gsm8k.compute_score(solution_str, ground_truth)\n"
    )
    responses = ["so\n#### 1,234", "#### 18", "it is 18", "#### 17"]
    rewards = score(ctx, path, responses, ["1234", "18", "18", "18"])
    assert rewards.score.tolist() == [1, 1, 0, 0]
    assert texts(rewards) == [""] * 4


# -- the plan ------------------------------------------------------------------------------------------------


def problems(path: Path, **settings: Any) -> list[str]:
    facts = Facts(key="judge", root=RootConfig())
    return [str(p) for p in FunctionReward(FunctionRewardConfig(path=str(path), **settings)).check(facts)]


def test_a_missing_file_is_a_problem_of_the_plan(tmp_path: Path) -> None:
    [problem] = problems(tmp_path / "none.py")
    assert problem.startswith("judge.path: ")
    assert "none.py' is not a file" in problem


@pytest.mark.parametrize(
    ("text", "settings", "says"),
    [
        ("def compute_score(:\n", {}, "is not Python"),
        ("def other(): pass\nclass Thing: pass\n", {}, "it defines: other, Thing"),
        ("", {"name": "judge"}, "defines no 'judge'"),
        ("def other():\n    def compute_score(): pass\nfor i in []: pass\n", {}, "it defines: other"),
        ("def compute_score(solution_str, ground_truth): pass\n", {}, "does not take data_source, extra_info"),
        ("compute_score = lambda solution_str: 1\n", {}, "does not take data_source, extra_info, ground_truth"),
        (f"def compute_score({SIGNATURE}): pass\n", {"kwargs": {"bonus": 1}}, "does not take bonus"),
        (f"def compute_score({SIGNATURE}, bonus): pass\n", {}, "needs bonus, which nothing gives"),
        (f"def compute_score({SIGNATURE}, *, bonus): pass\n", {}, "needs bonus, which nothing gives"),
        ("def compute_score(a, /, **rest): pass\n", {}, "needs a, which nothing gives"),
    ],
)
def test_what_a_plan_finds_without_running_the_file(
    write: Callable[..., Path], text: str, settings: dict[str, Any], says: str
) -> None:
    [problem] = problems(write(text), **settings)
    assert says in problem


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("def compute_score(**given): pass\n", {"kwargs": {"bonus": 1}}),
        (f"def compute_score({SIGNATURE}, bonus): pass\n", {"kwargs": {"bonus": 1}}),
        (f"def compute_score({SIGNATURE}=None, bonus=1, *, more=2): pass\n", {}),
        ("import functools\n@functools.cache\ndef compute_score(*a): pass\n", {}),
        ("from somewhere import *\n", {}),
        ("from somewhere import judge as compute_score\n", {}),
        ("if True:\n    def compute_score(**given): pass\n", {}),
        ("try:\n    import a\nexcept ImportError:\n    def compute_score(**given): pass\n", {}),
        ("one, compute_score = 1, print\n", {}),
        ("raise SystemExit('planning must not run this')\ndef compute_score(**given): pass\n", {}),
    ],
)
def test_what_a_plan_lets_pass(write: Callable[..., Path], text: str, settings: dict[str, Any]) -> None:
    assert problems(write(text), **settings) == []


def test_a_reward_that_scores_nothing_is_an_error(
    make_context: Callable[..., Context], write: Callable[..., Path]
) -> None:
    """A row that raises is data; if no row was ever scored, the reward is broken, and a run would learn nothing."""
    path = write(f"def compute_score({SIGNATURE}):\n    return lenght(solution_str)\n")
    few, many = (rollout_batch([[1]] * n, [[1]] * n, responses=["a"] * n, answers=["x"] * n) for n in (10, 60))
    with opened(make_context("reward"), path) as reward:
        assert (reward.run(few).status == Status.UNSCORED).all()
        with pytest.raises(ValueError, match=r"none of the first 70 rows could be scored; .*lenght"):
            reward.run(many)
    sometimes = write(f"def compute_score({SIGNATURE}):\n    return 1.0 if solution_str == 'b' else lenght()\n")
    one = rollout_batch([[1]], [[1]], responses=["b"], answers=["x"])
    with opened(make_context("reward"), sometimes) as reward:
        assert reward.run(one).score.tolist() == [1.0]
        assert (reward.run(many).status == Status.UNSCORED).all()
