"""Faults of other rewards, as public reports have them (../shared/cases/bug-bank.md, area F): they cannot occur here.

Each is tried as a kind, through the stages that meet in it: a reward, and where scores become numbers of the loss, the
advantages. There is no reward that asks a server: a user's function does, and what it does when that fails is 90.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.context import Context
from pipeline.metrics import summarise
from stages.model.hf import HfModel, HfModelConfig
from stages.records import AdvantageBatch, RewardBatch, RolloutBatch, Status
from stages.reward.function import FunctionReward, FunctionRewardConfig
from stages.reward.model import ModelReward, ModelRewardConfig
from tests.builders import log_prob_batch, reward_batch, rollout_batch, value_batch
from tests.processes import wait_gone
from tests.stages.learners import entry_of, opened
from tests.stages.reward.support import children
from tests.tiny_models import save_classifier
from tests.tiny_tokenizers import ASSISTANT, EOS, PAD, USER, write_tokenizer

CALL = "data_source, solution_str, ground_truth, extra_info"


@pytest.fixture
def ctx(make_context: Callable[..., Context]) -> Context:
    return make_context("reward")


@pytest.fixture
def function(tmp_path: Path, ctx: Context) -> Iterator[Callable[..., FunctionReward]]:
    """`function(text, name="score.py", **settings)`: an open reward of a user's file; no process is left of it."""
    before, made = children(), list[FunctionReward]()

    def make(text: str, name: str = "score.py", **settings: Any) -> FunctionReward:
        path = tmp_path / "user" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        reward = FunctionReward(FunctionRewardConfig(path=str(path), **settings))
        made.append(reward)
        reward.open(ctx)
        return reward

    yield make
    for reward in made:
        reward.close()
    assert wait_gone(list(children() - before), 3) == []


def rows(responses: Sequence[str], n: int = 1, answers: Sequence[Any] | None = None) -> RolloutBatch:
    prompts = len(responses) // n
    given = answers if answers is not None else ["1"] * prompts
    return rollout_batch([[1]] * prompts, [[7, 8]] * len(responses), n=n, responses=list(responses), answers=given)


def reasons(rewards: RewardBatch) -> list[str]:
    return [rewards.reason.text(i) for i in range(len(rewards))]


def advantages(
    make_context: Callable[..., Context], rollouts: RolloutBatch, rewards: RewardBatch, **settings: Any
) -> AdvantageBatch:
    """Of verl's estimator, after a critic that says 0."""
    stage = opened(entry_of("advantage", "verl"), make_context, **settings)
    out = stage.run(rollouts=rollouts, rewards=rewards, old=log_prob_batch(rollouts), values=value_batch(rollouts))
    stage.close()
    return out


# -- 85: rows that never end -------------------------------------------------------------------------------------

NEVER_ENDS = {
    "a loop": "while True: pass",
    "a power tower": "return 9**9**9",
    "a pattern": "import re; return bool(re.match('(a+)+$', 'a' * 60 + 'b'))",
    "deaf to signals": "import signal, time; [signal.signal(s, signal.SIG_IGN) for s in (2, 15)]; time.sleep(1000)",
    "a thread of its own": "import threading as t; t.Thread(target=t.Event().wait).start(); t.Event().wait()",
    "deaf programs": "import subprocess; subprocess.run(['sh', '-c', 'trap \"\" TERM INT; sleep 1000; sleep 1000'])",
    "catches all": "while True:\n            try: time.sleep(1)\n            except BaseException: pass",
}


def test_85_a_row_that_never_ends_costs_itself_alone(function: Callable[..., FunctionReward]) -> None:
    cases = "".join(f"    if solution_str == {name!r}:\n        {body}\n" for name, body in NEVER_ENDS.items())
    reward = function(f"import time\ndef compute_score({CALL}):\n{cases}    return 1\n", timeout_s=0.4, workers=3)
    given = [r for name in NEVER_ENDS for r in ("fine", name)]
    before = time.monotonic()
    rewards = reward.run(rows(given))
    assert time.monotonic() - before < 10
    assert reasons(rewards) == ["", "timed out after 0.4 s"] * len(NEVER_ENDS)
    assert rewards.status.tolist() == [Status.OK, Status.UNSCORED] * len(NEVER_ENDS)
    assert reasons(reward.run(rows(["fine", "a loop", "fine"]))) == ["", "timed out after 0.4 s", ""]


# -- 87: files that others cannot pickle or import ---------------------------------------------------------------

FILE = f"""
import json, pickle
from collections import OrderedDict
from dataclasses import dataclass
from .helper import weight
import helper

@dataclass
class Thing:
    value: float

double = lambda x: 2 * x

def compute_score({CALL}):
    assert json.loads("[1]") == [1] and OrderedDict
    thing = pickle.loads(pickle.dumps(Thing(0.25)))
    assert type(thing) is Thing and helper.weight == weight
    again = pickle.loads(pickle.dumps(compute_score))
    assert again is compute_score
    return double(thing.value) * weight
"""


@pytest.mark.parametrize("name", ["json.py", "my-file.v2.py", "class.py"])
def test_87_any_file_works_in_every_worker(function: Callable[..., FunctionReward], tmp_path: Path, name: str) -> None:
    (tmp_path / "user").mkdir()
    (tmp_path / "user" / "helper.py").write_text("weight = 2\n")
    one, other = (function(FILE, name, workers=n) for n in (2, 1))
    for reward in (one, other, one):
        assert reward.run(rows(["a"] * 5)).score.tolist() == [1.0] * 5


# -- 88: a GPU in a reward ---------------------------------------------------------------------------------------

ON_GPU = {
    "a tensor": "torch.ones(1).cuda()",
    "a device": "torch.ones(1, device='cuda')",
    "a module": "torch.nn.Linear(1, 1).to('cuda:0')",
    "a question": "torch.cuda.current_device()",
}
NO_GPU = "(reward workers are CPU only: the GPU is the policy's; a model that scores is reward=model)"


def test_88_a_reward_that_wants_a_gpu_is_told_where_models_go(function: Callable[..., FunctionReward]) -> None:
    body = (
        f"import torch\nasked = {ON_GPU!r}\ndef compute_score({CALL}):\n    exec(asked[solution_str])\n    return 1\n"
    )
    rewards = function(body, timeout_s=60).run(rows(list(ON_GPU)))
    assert rewards.status.tolist() == [Status.UNSCORED] * len(ON_GPU)
    for reason in reasons(rewards):
        assert reason.startswith("raised ")
        assert reason.endswith(NO_GPU)


def test_88_also_when_the_file_itself_wants_one(function: Callable[..., FunctionReward]) -> None:
    with pytest.raises(Exception, match="does not run: RuntimeError: Found no NVIDIA driver") as e:
        function(f"raise RuntimeError('Found no NVIDIA driver')\ndef compute_score({CALL}):\n    return 1\n")
    assert NO_GPU in str(e.value)


# -- 89: what is no score ----------------------------------------------------------------------------------------

NO_SCORES = {
    "None": "abstained on row",
    "float('nan')": "returned nan (float) for row",
    "np.float32('nan')": "returned np.float32(nan) (float32) for row",
    "float('inf')": "returned inf (float) for row",
    "-np.inf": "returned -inf (float) for row",
    "10**400": "returned 1000",
    "'1.0'": "returned '1.0' (str) for row",
    "b'1'": "returned b'1' (bytes) for row",
    "(1.0, {})": "returned (1.0, {}) (tuple) for row",
    "[1.0]": "returned [1.0] (list) for row",
    "[]": "returned [] (list) for row",
    "{1.0}": "returned {1.0} (set) for row",
    "{}": "returned an object without 'score' for row",
    "{'reward': 1.0}": "returned an object without 'score' for row",
    "{'score': None}": "abstained on row",
    "{'score': [1.0]}": "returned [1.0] (list) for row",
    "{'score': float('nan')}": "returned nan (float) for row",
    "1j": "returned 1j (complex) for row",
    "np.array([0.5, 1.0])": "returned array([0.5, 1. ]) (ndarray) for row",
    "np.array([])": "returned array([], dtype=float64) (ndarray) for row",
    "(x for x in [1.0])": "returned <generator object",
    "compute_score": "returned <function compute_score",
    "Exception('late')": "returned Exception('late') (Exception) for row",
}


def test_89_what_is_no_finite_number_is_no_score(function: Callable[..., FunctionReward], ctx: Context) -> None:
    body = f"import numpy as np\ndef compute_score({CALL}):\n    return eval(solution_str)\n"
    given = [r for text in NO_SCORES for r in ("1.0", text)]
    rewards = function(body).run(rows(given))
    for row, (text, reason) in enumerate(zip(given, reasons(rewards), strict=True)):
        if text == "1.0":
            assert (reason, rewards.score[row]) == ("", 1.0)
            continue
        assert reason.startswith(f"compute_score {NO_SCORES[text]}"), (text, reason)
        assert f"row {row}" in reason
        assert np.isnan(rewards.score[row])
    assert summarise(ctx.meter.drain())["reward/mean"] == 1.0


def test_89_a_group_is_compared_without_the_row_that_has_none(
    function: Callable[..., FunctionReward], make_context: Callable[..., Context]
) -> None:
    """[1, none, 0, 1]: the others' mean is 2/3. A group without any score changes nothing."""
    body = f"def compute_score({CALL}):\n    return eval(solution_str)\n"
    bad = ["None", "float('nan')", "float('inf')", "'x'", "(1, 2)", "[1]", "1 / 0"]
    rollouts = rows([r for b in bad for r in ("1", b, "0", "1", b, b, b, b)], n=4)
    rewards = function(body).run(rollouts)
    assert rewards.status.tolist() == [0, 2, 0, 0, 2, 2, 2, 2] * len(bad)
    out = advantages(make_context, rollouts, rewards, estimator="grpo", norm_adv_by_std_in_grpo=False)
    by_row = out.advantages.values.reshape(-1, 2)[:, 0]
    np.testing.assert_allclose(by_row, [1 / 3, 0, -2 / 3, 1 / 3, 0, 0, 0, 0] * len(bad), atol=1e-6)
    assert out.mask.values.reshape(-1, 2).any(1).tolist() == [True, False, True, True, *[False] * 4] * len(bad)


# -- 90: a judge over HTTP, asked by the user's function ---------------------------------------------------------

ASKS = f"""
import json, time, urllib.error, urllib.request

def ask(url, text):
    request = urllib.request.Request(url, json.dumps({{"text": text}}).encode())
    with urllib.request.urlopen(request, timeout=30) as answer:
        score = json.load(answer)["score"]
    if not 0 <= score <= 1:
        raise ValueError(f"the judge gave {{score}}")
    return score

def compute_score({CALL}, url, tries=1):
    for left in reversed(range(tries)):
        try:
            return ask(url, solution_str)
        except urllib.error.HTTPError as e:
            if e.code < 500 or not left:
                raise
            time.sleep(0.05)
"""


class Judge(BaseHTTPRequestHandler):
    """Answers by what the response asks for."""

    asked: Counter[str]
    now = most = 0
    lock = threading.Lock()

    def do_POST(self) -> None:
        kind = type(self)
        text = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["text"]
        with kind.lock:
            kind.asked[text] += 1
            count = kind.asked[text]
            kind.now += 1
            kind.most = max(kind.most, kind.now)
        try:
            self.answer(text, count)
        finally:
            with kind.lock:
                kind.now -= 1

    def answer(self, text: str, count: int) -> None:
        if text == "hang":
            time.sleep(4)
        if text == "slow":
            time.sleep(0.1)
        if text == "cut":
            self.wfile.write(b"HTTP/1.0 200 OK\r\nContent-Length: 100\r\n\r\n{")
            return
        status = 500 if text == "twice" and count <= 2 else int(text) if text.isdigit() else 200
        body = {
            "not json": "<html>",
            "nan": '{"score": NaN}',
            "high": '{"score": 7}',
            "none": "{}",
            "word": '{"score": "1"}',
        }
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body.get(text, '{"score": 0.5}').encode())

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def judge() -> Iterator[tuple[str, type[Judge]]]:
    """The address of a server, and what it has seen."""
    kind = type("OneJudge", (Judge,), {"asked": Counter(), "now": 0, "most": 0, "lock": threading.Lock()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/", kind
    server.shutdown()
    server.server_close()
    thread.join()


FAILS = {
    "500": "raised HTTPError: HTTP Error 500",
    "503": "raised HTTPError: HTTP Error 503",
    "429": "raised HTTPError: HTTP Error 429",
    "400": "raised HTTPError: HTTP Error 400",
    "hang": "timed out after 1.5 s",
    "not json": "raised JSONDecodeError",
    "cut": "raised IncompleteRead",
    "nan": "raised ValueError: the judge gave nan",
    "high": "raised ValueError: the judge gave 7",
    "none": "raised KeyError",
    "word": "raised TypeError",
}


def test_90_a_judge_that_fails_leaves_its_row_out_and_counted(
    function: Callable[..., FunctionReward],
    make_context: Callable[..., Context],
    ctx: Context,
    judge: tuple[str, type[Judge]],
) -> None:
    """Never a zero: the other rows of the group keep their mean, 0.5."""
    reward = function(ASKS, kwargs={"url": judge[0]}, timeout_s=1.5, workers=2)
    rollouts = rows([r for failure in FAILS for r in ("fine", failure)], n=2)
    rewards = reward.run(rollouts)
    for failure, reason in zip(FAILS, reasons(rewards)[1::2], strict=True):
        assert reason.startswith(FAILS[failure]), (failure, reason)
    assert rewards.score[::2].tolist() == [0.5] * len(FAILS)
    assert np.isnan(rewards.score[1::2]).all()
    metrics = summarise(ctx.meter.drain())
    assert (metrics["reward/mean"], metrics["reward/unscored"]) == (0.5, len(FAILS))
    assert set(judge[1].asked.values()) - {judge[1].asked["fine"]} == {1}, (
        "no call is made twice behind the user's back"
    )
    out = advantages(make_context, rollouts, rewards, estimator="reinforce_plus_plus_baseline")
    assert not out.mask.values.reshape(-1, 2, 2)[:, 1].any()
    assert np.isfinite(out.advantages.values).all()


def test_90_what_the_function_tries_again_counts_and_calls_at_once_are_bounded(
    function: Callable[..., FunctionReward], judge: tuple[str, type[Judge]]
) -> None:
    reward = function(ASKS, kwargs={"url": judge[0], "tries": 3}, timeout_s=20, workers=2)
    rewards = reward.run(rows(["twice", *["slow"] * 8, "400"]))
    assert rewards.score[:9].tolist() == [0.5] * 9
    assert reasons(rewards)[9].startswith("raised HTTPError: HTTP Error 400")
    assert (judge[1].asked["twice"], judge[1].asked["400"]) == (3, 1)
    assert judge[1].most <= 2, "no more calls at once than there are workers"


def test_90_a_judge_that_is_not_there_ends_the_run(function: Callable[..., FunctionReward]) -> None:
    reward = function(ASKS, kwargs={"url": "http://127.0.0.1:9/"})
    with pytest.raises(ValueError, match=r"none of the first 64 rows could be scored.*URLError"):
        reward.run(rows(["fine"] * 64))


# -- 91: placeholders in a baseline ------------------------------------------------------------------------------


def test_91_no_placeholder_of_a_failed_row_is_in_a_baseline(
    function: Callable[..., FunctionReward], make_context: Callable[..., Context]
) -> None:
    body = f"def compute_score({CALL}):\n    return {{'score': 1 / float(solution_str), 'acc': 0.0}}\n"
    rollouts = rows(["1", str(1 / 3), "0.5", "0"], n=4)  # scores 1, 3, 2 and a division by zero
    rewards = function(body).run(rollouts)
    for estimator, expected in (("grpo", [-1, 1, 0, 0]), ("rloo", [-1.5, 1.5, 0, 0])):
        more = {"norm_adv_by_std_in_grpo": False} if estimator == "grpo" else {}
        out = advantages(make_context, rollouts, rewards, estimator=estimator, **more)
        np.testing.assert_allclose(out.advantages.values.reshape(4, 2)[:, 0], expected, atol=1e-5)
        assert out.mask.values.reshape(4, 2).all(1).tolist() == [True, True, True, False]


# -- 92: where the reward of a response lands --------------------------------------------------------------------


@pytest.mark.parametrize("pad", [0, EOS])
@pytest.mark.parametrize("first", [0, 1])
def test_92_the_reward_lies_on_the_last_token_of_a_response(
    make_context: Callable[..., Context], pad: int, first: int
) -> None:
    """One that ended before the others did, one that fills the length: by discounting back from the last token."""
    responses = [[10, 11, EOS], [12, 13, 14, 15, 16], [pad], [17, EOS]]
    order = [*range(first, 4), *range(first)]
    scores = [3.0, 5.0, 7.0, -2.0]
    rollouts = rollout_batch([[1]] * 4, [responses[i] for i in order])
    rewards = reward_batch([scores[i] for i in order])
    out = advantages(make_context, rollouts, rewards, estimator="gae", gamma=0.5, lam=1.0)
    for row, i in enumerate(order):
        length = len(responses[i])
        expected = [scores[i] * 0.5 ** (length - 1 - t) for t in range(length)]
        np.testing.assert_allclose(out.returns[row], expected, rtol=1e-6)


# -- 93, 94: what a reward model reads ---------------------------------------------------------------------------

ENDING_TURNS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def scores(tmp_path: Path, make_context: Callable[..., Context]) -> Iterator[Callable[..., np.ndarray]]:
    """Of a model of random weights that pads with its end token; `scores(rollouts, **settings)`."""
    folder = save_classifier(tmp_path / "judge", pad_token_id=EOS, max_position_embeddings=512)
    policy = HfModel(HfModelConfig(path=str(write_tokenizer(tmp_path / "policy"))))
    made: list[ModelReward] = []

    def score(rollouts: RolloutBatch, **settings: Any) -> np.ndarray:
        stage = ModelReward(ModelRewardConfig(path=str(folder), tokenizer="policy", **settings), policy)
        made.append(stage)
        stage.open(make_context("reward"))
        return stage.run(rollouts).score

    yield score
    for stage in made:
        stage.close()


def test_93_both_answers_are_read_to_their_last_token(scores: Callable[..., np.ndarray]) -> None:
    """Where the end token ends turns and responses and is the padding too: the turns of the prompt hide nothing, and a
    row in a batch scores as it does alone. (transformers, and so the judge's training, passes over padding at the end.)
    """
    prompt = [USER, 20, 21, EOS, ASSISTANT, 22, EOS, USER, 23, EOS, ASSISTANT]
    answers = [[30, EOS], [31, EOS], [30, 31, 32, 33, 34, 35, EOS], [EOS], [PAD, EOS], [30, 31], [30, EOS, 32]]
    together = scores(rollout_batch([prompt] * len(answers), answers))
    alone = [float(scores(rollout_batch([prompt], [a]))[0]) for a in answers]
    np.testing.assert_allclose(together, alone, atol=1e-5, rtol=0)
    assert len(set(np.round(alone, 4))) == len(answers)


def test_94_scores_do_not_depend_on_the_batch(scores: Callable[..., np.ndarray]) -> None:
    """Nine texts of 3 to 400 tokens, one, a few and all at a time, in another order."""
    lengths = [3, 5, 17, 40, 41, 90, 150, 260, 400]
    draw = np.random.default_rng(0)
    responses = [draw.integers(6, 262, n - 2).tolist() for n in lengths]
    prompts = [[USER, 20]] * len(lengths)
    whole = rollout_batch(prompts, responses)
    alone = scores(whole, micro_tokens=1)
    assert np.ptp(alone) > 0.1
    for tokens in (400, 1000, 100_000):
        np.testing.assert_allclose(scores(whole, micro_tokens=tokens), alone, atol=1e-5, rtol=0)
    order = draw.permutation(len(lengths))
    np.testing.assert_allclose(scores(whole.take(order), micro_tokens=1000), alone[order], atol=1e-5, rtol=0)


# -- 95: an exception, a death and a tuple in one batch ----------------------------------------------------------


def test_95_what_breaks_is_told_once_with_its_row_and_the_run_goes_on(
    function: Callable[..., FunctionReward], caplog: pytest.LogCaptureFixture
) -> None:
    body = (
        f"import os\ndef compute_score({CALL}):\n"
        "    if solution_str == 'leaves': os._exit(1)\n"
        "    if solution_str == 'tuple': return 1.0, 'why'\n"
        "    return {'fine': 1.0}[solution_str]\n"
    )
    reward = function(body, workers=2)
    given = ["fine", "fine", "fine", "absent", "leaves", "tuple", "fine", "absent"]
    with caplog.at_level(logging.WARNING, "headrace"):
        steps = [reward.run(rows(given)) for _ in range(3)]
        for rewards in steps:
            assert rewards.status.tolist() == [0, 0, 0, *[Status.UNSCORED] * 3, 0, Status.UNSCORED]
    told = [r.getMessage() for r in caplog.records]
    [error] = [t for t in told if "KeyError" in t]
    assert "row 3: raised KeyError: 'absent'" in error
    assert "Traceback" in error
    assert "return {'fine': 1.0}[solution_str]" in error
    assert len([t for t in told if "row 4: worker died" in t]) == 1
    assert reasons(steps[0])[5] == "compute_score returned (1.0, 'why') (tuple) for row 5, not a finite number"
