"""A reward model: its scores against transformers row by row, what it reads, and what it cannot score."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from pipeline.context import Context
from pipeline.placement import ProcessStage
from pipeline.records import Ragged
from pipeline.registry import PartSpec
from stages.arena import Arena
from stages.model.hf import HfModel, HfModelConfig
from stages.records import RewardBatch, RolloutBatch, Status
from stages.reward.model import ModelReward, ModelRewardConfig, label_index, labels
from stages.reward.prompt_ids import PromptIds
from tests.builders import plan_facts, rollout_batch
from tests.tiny_models import save_classifier
from tests.tiny_tokenizers import ASSISTANT, BOS, EOS, PAD, USER, ids_of, write_tokenizer

CHAT = [{"role": "user", "content": "hi"}]
ENDING_TURNS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_classifier(tmp_path_factory.mktemp("judge"))


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> HfModel:
    """Only its tokenizer and config matter."""
    return HfModel(HfModelConfig(path=str(write_tokenizer(tmp_path_factory.mktemp("policy")))))


@pytest.fixture
def make(policy: HfModel, make_context: Callable[..., Context]) -> Iterator[Callable[..., ModelReward]]:
    """Open instances, closed at the end."""
    made: list[ModelReward] = []

    def make(folder: Path, **settings: Any) -> ModelReward:
        stage = ModelReward(ModelRewardConfig(path=str(folder), **settings), policy)
        made.append(stage)
        stage.open(make_context("reward"))
        return stage

    yield make
    for stage in made:
        stage.close()
        stage.close()


def reference(folder: Path, rows: Sequence[Sequence[int]], label: int = 0) -> np.ndarray:
    """float32, one row at a time, without padding or mask."""
    module = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return np.array([module(torch.tensor([list(r)])).logits[0, label].item() for r in rows], np.float32)


def random_rollouts(prompts: int = 5, n: int = 3, seed: int = 0, high: int = 262) -> RolloutBatch:
    rng = np.random.default_rng(seed)

    def draw(low: int, most: int) -> list[int]:
        return rng.integers(6, high, rng.integers(low, most)).tolist()

    return rollout_batch([draw(1, 20) for _ in range(prompts)], [draw(0, 40) for _ in range(prompts * n)], n=n)


def sequences(rollouts: RolloutBatch) -> list[list[int]]:
    return [[*rollouts.prompt_ids[i].tolist(), *rollouts.response_ids[i].tolist()] for i in range(len(rollouts))]


# -- scores ------------------------------------------------------------------------------------------------------

KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "without padding": {"pad_token_id": None},
    "padding outside": {"pad_token_id": -1},
    "bert": {"kind": "bert"},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("micro_tokens", [1, 150, 8192])
def test_scores_are_those_of_transformers_row_by_row(
    make: Callable[..., ModelReward], tmp_path: Path, kind: str, micro_tokens: int
) -> None:
    folder = save_classifier(tmp_path, **KINDS[kind])
    rollouts = random_rollouts()
    expected = reference(folder, sequences(rollouts))
    rewards = make(folder, tokenizer="policy", micro_tokens=micro_tokens).run(rollouts)
    assert np.ptp(expected) > 0.1, "the rows differ"
    np.testing.assert_allclose(rewards.score, expected, atol=1e-5, rtol=0)
    assert rewards.status.tolist() == [Status.OK] * len(rollouts)
    assert rewards.part_names == ()


def test_a_row_that_ends_in_the_padding_token_is_pooled_as_it_is_alone(
    make: Callable[..., ModelReward], folder: Path
) -> None:
    """Many models pad with a token that also ends a response."""
    responses = [[7, 8, PAD], [9, PAD, 10], [PAD, PAD], list(range(20, 50))]
    rollouts = rollout_batch([[11, 12]] * 4, responses)
    rewards = make(folder, tokenizer="policy").run(rollouts)
    np.testing.assert_allclose(rewards.score, reference(folder, sequences(rollouts)), atol=1e-5, rtol=0)


def test_a_model_without_padding_whose_every_token_is_in_use(make: Callable[..., ModelReward], tmp_path: Path) -> None:
    """Nothing is left to pad with, so such rows go alone."""
    folder = save_classifier(tmp_path, pad_token_id=None, max_position_embeddings=300)
    rollouts = rollout_batch([list(range(262)), [5]], [[1], [2, 3]])
    rewards = make(folder, tokenizer="policy").run(rollouts)
    np.testing.assert_allclose(rewards.score, reference(folder, sequences(rollouts)), atol=1e-5, rtol=0)


def test_the_order_of_rows_changes_no_bit(make: Callable[..., ModelReward], folder: Path) -> None:
    reward, rollouts = make(folder, tokenizer="policy", micro_tokens=100), random_rollouts()
    whole = reward.run(rollouts)
    order = np.random.default_rng(1).permutation(len(rollouts))
    assert reward.run(rollouts.take(order)).same(whole.take(order))
    assert reward.run(rollouts).same(whole)


def test_rows_are_batched_by_length_within_the_budget(make: Callable[..., ModelReward], folder: Path) -> None:
    reward, rollouts = make(folder, tokenizer="policy", micro_tokens=100), random_rollouts()
    module: Any = reward._classifier._module  # type: ignore[union-attr]
    shapes: list[tuple[int, int]] = []
    module.register_forward_pre_hook(
        lambda _, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    reward.run(rollouts)
    assert sum(rows for rows, _ in shapes) == len(rollouts)
    assert all(rows == 1 or rows * width <= 100 for rows, width in shapes)
    assert len(shapes) < len(rollouts)
    assert [width for _, width in shapes] == sorted((width for _, width in shapes), reverse=True)


def test_bfloat16(make: Callable[..., ModelReward], folder: Path) -> None:
    reward, rollouts = make(folder, tokenizer="policy", dtype="bfloat16"), random_rollouts()
    assert {p.dtype for p in reward._classifier._module.parameters()} == {torch.bfloat16}  # type: ignore[union-attr]
    rewards = reward.run(rollouts)
    assert rewards.score.dtype == np.float32
    np.testing.assert_allclose(rewards.score, reference(folder, sequences(rollouts)), atol=0.3)


@pytest.mark.parametrize(("label", "index"), [("good", 2), ("0", 0), ("bad", 1)])
def test_the_label_that_is_asked_for(make: Callable[..., ModelReward], tmp_path: Path, label: str, index: int) -> None:
    names = {0: "neutral", 1: "bad", 2: "good"}
    folder = save_classifier(tmp_path, num_labels=3, id2label=names, label2id={n: i for i, n in names.items()})
    rollouts = random_rollouts()
    rewards = make(folder, tokenizer="policy", label=label).run(rollouts)
    np.testing.assert_allclose(rewards.score, reference(folder, sequences(rollouts), index), atol=1e-5, rtol=0)


def test_accuracy_is_by_the_threshold(make: Callable[..., ModelReward], folder: Path) -> None:
    rollouts = random_rollouts()
    at = float(np.median(make(folder, tokenizer="policy").run(rollouts).score))
    rewards = make(folder, tokenizer="policy", correct_at=at).run(rollouts)
    assert rewards.accuracy.tolist() == [float(s >= np.float32(at)) for s in rewards.score]
    assert 0 < rewards.accuracy.mean() < 1


# -- what it reads -----------------------------------------------------------------------------------------------


def own_rollouts() -> RolloutBatch:
    return rollout_batch(
        [[1]] * 2, [[2]] * 4, n=2, prompts=["add 1", CHAT], responses=["one", "", " two<eos><user>é", "x"]
    )


@pytest.mark.parametrize("close_turn", [True, False])
def test_its_own_tokenizer_reads_prompt_and_response(
    make: Callable[..., ModelReward], tmp_path: Path, close_turn: bool
) -> None:
    """A text with the tokenizer's own special tokens, a chat through the template; special tokens in a response are
    text; after a chat's response comes what ends a turn."""
    folder = save_classifier(write_tokenizer(tmp_path, adds_bos=True))
    (folder / "chat_template.jinja").write_text(ENDING_TURNS)
    rollouts, end = own_rollouts(), [EOS] if close_turn else []
    text, chat = [BOS, *ids_of("add 1")], [BOS, USER, *ids_of("hi"), EOS, ASSISTANT]
    rows = [
        text + ids_of("one"),
        text,
        chat + ids_of(" two<eos><user>é") + end,
        chat + ids_of("x") + end,
    ]
    rewards = make(folder, close_turn=close_turn).run(rollouts)
    np.testing.assert_allclose(rewards.score, reference(folder, rows), atol=1e-5, rtol=0)


def test_a_turn_as_the_template_renders_it(make: Callable[..., ModelReward], tmp_path: Path) -> None:
    """Prompt and response give what the whole conversation gives."""
    folder = save_classifier(write_tokenizer(tmp_path))
    (folder / "chat_template.jinja").write_text(ENDING_TURNS)
    rollouts = rollout_batch([[1]], [[2]], prompts=[CHAT], responses=["hello"])
    whole: Any = AutoTokenizer.from_pretrained(folder)("<user>hi<eos><assistant>hello<eos>", add_special_tokens=False)[
        "input_ids"
    ]
    rewards = make(folder).run(rollouts)
    np.testing.assert_allclose(rewards.score, reference(folder, [whole]), atol=1e-5, rtol=0)


def test_what_a_tokenizer_was_trained_with_cuts_and_pads_nothing(
    make: Callable[..., ModelReward], tmp_path: Path
) -> None:
    """Also where the prompts come from the arena, and nothing but responses goes into the tokenizer."""
    folder = save_classifier(write_tokenizer(tmp_path, template=False))
    padding = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None}
    kept = {
        "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
        "padding": padding | {"pad_id": PAD, "pad_type_id": 0, "pad_token": "<pad>"},
    }
    edit(folder / "tokenizer.json", **kept)
    rollouts = rollout_batch([[1]], [[2]] * 2, n=2, prompts=["12345"], responses=["67890", "6"])
    expected = reference(folder, [ids_of("1234567890"), ids_of("123456")])
    arena = Arena.create(2**20)
    try:
        arena.publish(tmp_path)
        for _ in range(2):
            np.testing.assert_allclose(make(folder).run(rollouts).score, expected, atol=1e-5, rtol=0)
    finally:
        arena.close()


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('only users speak') }}", "only users speak"),
        ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", "changes an assistant's message"),
    ],
)
def test_a_template_that_cannot_end_a_turn(
    make: Callable[..., ModelReward], tmp_path: Path, template: str, message: str
) -> None:
    folder = save_classifier(write_tokenizer(tmp_path))
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(ValueError, match=rf"{message}.*set close_turn=false"):
        make(folder)
    make(folder, close_turn=False)


def test_the_policys_tokens_are_read_as_they_are(
    make: Callable[..., ModelReward], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No tokenizer is loaded, and texts play no part."""

    def refuse(*_: Any) -> Any:
        raise AssertionError("a tokenizer was asked for")

    monkeypatch.setattr(HfModel, "tokenizer", refuse)
    rollouts = rollout_batch([[7, 8]], [[9, 10]], prompts=["something else"], responses=["\u2028"])
    rewards = make(folder, tokenizer="policy").run(rollouts)
    np.testing.assert_allclose(rewards.score, reference(folder, [[7, 8, 9, 10]]), atol=1e-5, rtol=0)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
    """The prompts of each call of `HfModel.render`."""
    made: list[list[Any]] = []
    render = HfModel.render

    def counted(self: HfModel, tokenizer: Any, prompts: list[Any]) -> list[list[int]]:
        made.append(list(prompts))
        return render(self, tokenizer, prompts)

    monkeypatch.setattr(HfModel, "render", counted)
    return made


def test_each_prompt_is_tokenised_once(make: Callable[..., ModelReward], folder: Path, calls: list[list[Any]]) -> None:
    reward = make(folder)
    first = reward.run(own_rollouts())
    assert calls == [["add 1", CHAT]]
    assert reward.run(own_rollouts()).same(first)
    more = rollout_batch([[1]] * 3, [[2]] * 3, prompts=["add 1", "new", "add 1"])
    reward.run(more)
    assert calls[1:] == [["new"]]


def test_another_stage_of_the_run_finds_them_in_the_arena(
    make: Callable[..., ModelReward], folder: Path, tmp_path: Path, calls: list[list[Any]]
) -> None:
    arena = Arena.create(2**20)
    try:
        arena.publish(tmp_path)
        first = make(folder).run(own_rollouts())
        assert arena.entries == 2
        assert make(folder).run(own_rollouts()).same(first)
        assert calls == [["add 1", CHAT]]
    finally:
        arena.close()
    make(folder).run(own_rollouts())
    assert len(calls) == 2, "the arena is gone"


def test_prompts_of_another_tokenizer_have_other_keys(tmp_path: Path) -> None:
    arena = Arena.create(2**20)
    try:
        arena.publish(tmp_path)
        prompts = Ragged.jsons(["a", "b", "a"])
        for adds_bos in (False, True):
            path = write_tokenizer(tmp_path / str(adds_bos), adds_bos=adds_bos)
            ids = PromptIds(HfModel(HfModelConfig(path=str(path))), tmp_path).of(prompts)
            start = [BOS] if adds_bos else []
            assert [i.tolist() for i in ids] == [start + ids_of(p) for p in "aba"]
        assert arena.entries == 4
    finally:
        arena.close()


def test_what_is_kept_in_the_process_is_bounded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, calls: list[list[Any]]
) -> None:
    monkeypatch.setattr("stages.reward.prompt_ids.MAX_BYTES", 3 * (320 + 4))
    kept = PromptIds(HfModel(HfModelConfig(path=str(write_tokenizer(tmp_path)))), tmp_path)
    for prompt in ("a", "b", "c", "a", "d", "a", "b"):  # b is the one used longest ago when d comes
        assert kept.of(Ragged.jsons([prompt]))[0].tolist() == ids_of(prompt)
    assert [p for call in calls for p in call] == ["a", "b", "c", "d", "b"]


def test_in_a_process_it_gives_the_same(
    make: Callable[..., ModelReward], make_context: Callable[..., Context], folder: Path, policy: HfModel
) -> None:
    config = ModelRewardConfig(path=str(folder))
    expected = make(folder).run(own_rollouts())
    spec = PartSpec("reward", ModelReward, config, {"model": PartSpec("model", HfModel, policy.cfg, {})})
    apart = ProcessStage(spec)
    try:
        apart.open(make_context("reward"))
        assert apart.run(rollouts=own_rollouts()).same(expected)
    finally:
        apart.close()


# -- what it cannot score ----------------------------------------------------------------------------------------


def unscored(rewards: RewardBatch) -> dict[int, str]:
    bad = np.flatnonzero(rewards.status == Status.UNSCORED).tolist()
    assert all(math.isnan(rewards.score[i]) and math.isnan(rewards.accuracy[i]) for i in bad)
    return {i: rewards.reason.text(i) for i in bad}


def test_rows_that_the_model_cannot_take(make: Callable[..., ModelReward], folder: Path) -> None:
    """The others get the scores they have without them."""
    responses = [[9] * 126, [9] * 127, [261], [262], []]
    rollouts = rollout_batch([[7, 8]] * 4 + [[]], responses)
    rewards = make(folder, tokenizer="policy").run(rollouts)
    assert unscored(rewards) == {
        1: "too long: 129 tokens, and the reward model takes 128",
        3: "token 262 is not among the 262 of the reward model",
        4: "prompt and response have no tokens",
    }
    expected = reference(folder, [[7, 8, *responses[0]], [7, 8, 261]])
    np.testing.assert_allclose(rewards.score[[0, 2]], expected, atol=1e-5, rtol=0)


def test_the_limit_of_its_own_tokenizer_counts_too(make: Callable[..., ModelReward], tmp_path: Path) -> None:
    folder = save_classifier(write_tokenizer(tmp_path))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"model_max_length": 10}))
    rollouts = rollout_batch([[1]], [[2]] * 2, n=2, prompts=["12345"], responses=["67890", "678901"])
    rewards = make(folder).run(rollouts)
    assert unscored(rewards) == {1: "too long: 11 tokens, and the reward model takes 10"}


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_score_that_is_not_finite(make: Callable[..., ModelReward], tmp_path: Path, value: float) -> None:
    folder = save_classifier(tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][200] = value
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    rewards = make(folder, tokenizer="policy").run(rollout_batch([[7]], [[8], [200]], n=2))
    assert list(unscored(rewards)) == [1]
    assert "the reward model's score is" in unscored(rewards)[1]


def test_where_no_row_can_be_scored_the_run_stops(make: Callable[..., ModelReward], folder: Path) -> None:
    reward = make(folder, tokenizer="policy")
    reward.run(rollout_batch([[7]], [[8] * 200] * 60, n=60))
    with pytest.raises(ValueError, match=r"none of the first 64 rows could be scored; the last reason: too long"):
        reward.run(rollout_batch([[7]], [[8] * 200] * 4, n=4))


# -- plan time ---------------------------------------------------------------------------------------------------


def problems(folder: Path, policy: HfModel, facts: dict[str, Any] | None = None, **settings: Any) -> dict[str, str]:
    reward = ModelReward(ModelRewardConfig(path=str(folder), **settings), policy)
    return {p.where: f"{p.level}: {p.what}" for p in reward.check(plan_facts("reward", **(facts or {})))}


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("tokenizer", ["own", "policy"])
def test_a_good_folder_has_no_problems(folder: Path, policy: HfModel, tokenizer: str) -> None:
    facts = {"max_new_tokens": 100, "max_prompt_tokens": 28, "chat_prompts": True}
    assert problems(folder, policy, facts, tokenizer=tokenizer) == {}


def test_a_folder_that_cannot_be_used(tmp_path: Path, policy: HfModel) -> None:
    assert "there is no folder" in problems(tmp_path / "none", policy)["reward.path"]
    folder = save_classifier(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "holds pickled weights" in problems(folder, policy)["reward.path"]


def test_a_model_of_another_kind(tiny_model: Path, policy: HfModel, make: Callable[..., ModelReward]) -> None:
    assert problems(tiny_model, policy)["reward.path"].endswith("holds a LlamaForCausalLM")
    with pytest.raises(ValueError, match=r"lacks weights of LlamaForSequenceClassification: score\.weight"):
        make(tiny_model, label="0")


def test_settings_that_cannot_be(tmp_path: Path, folder: Path, policy: HfModel) -> None:
    found = problems(folder, policy, tokenizer="polcy", correct_at=math.inf, dtype="float23", target="sort")
    assert found["reward.tokenizer"] == "error: no tokenizer 'polcy'"
    assert found["reward.correct_at"] == "error: inf is not allowed"
    assert found["reward.dtype"] == "error: no dtype 'float23'"
    assert found["reward.target"].startswith("warning: 'sort' has no effect")
    several = save_classifier(tmp_path, num_labels=3)
    assert "must be given: the model has 3 labels" in problems(several, policy)["reward.label"]
    assert "no label 'LABEL_3'" in problems(several, policy, label="LABEL_3")["reward.label"]
    assert problems(several, policy, label="LABEL_1") == problems(several, policy, label="1") == {}


def test_labels_by_name_and_index() -> None:
    assert labels({}) == ["LABEL_0", "LABEL_1"], "transformers leaves out what is its default"
    assert labels({"id2label": {"1": "b", "0": "a", "10": "k", "2": "c"}}) == ["a", "b", "c", "k"]
    assert label_index("", ["a"]) == 0
    assert label_index("1", ["1", "0"]) == 0, "a name comes before an index"
    assert isinstance(label_index("2", ["a", "b"]), str)
    assert isinstance(label_index("-1", ["a", "b"]), str)


def test_the_policys_tokens_must_mean_the_same(tmp_path: Path, policy: HfModel) -> None:
    folder = save_classifier(write_tokenizer(tmp_path))
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    content["added_tokens"].append({**content["added_tokens"][0], "id": 262, "content": "<more>"})
    file.write_text(json.dumps(content))
    assert problems(folder, policy, tokenizer="policy") == {}, "more tokens do no harm"
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(content))
    found = problems(folder, policy, tokenizer="policy")
    assert "2 of 262 token ids differ: 103 is 'a' in" in found["reward.tokenizer"]
    assert problems(folder, policy, tokenizer="own") == {}
    del vocabulary["z"]
    file.write_text(json.dumps(content))
    assert "3 of 262 token ids differ" in problems(folder, policy, tokenizer="policy")["reward.tokenizer"]


def test_lengths_must_add_up(folder: Path, policy: HfModel) -> None:
    facts = {"max_new_tokens": 100, "max_prompt_tokens": 29}
    found = problems(folder, policy, facts, tokenizer="policy")
    assert found["reward.path"] == "error: has 128 positions, too few for 100 new tokens after a prompt of 29"
    assert problems(folder, policy, {"max_new_tokens": 127}, tokenizer="policy") == {}
    assert "reward.path" in problems(folder, policy, {"max_new_tokens": 128}, tokenizer="policy")


def test_chats_need_a_template(tmp_path: Path, policy: HfModel) -> None:
    folder = save_classifier(write_tokenizer(tmp_path, template=False))
    assert "no chat template" in problems(folder, policy, {"chat_prompts": True})["reward.path"]
    assert problems(folder, policy) == {}
    assert problems(folder, policy, {"chat_prompts": True}, tokenizer="policy") == {}
