"""What every rollout does, whatever its engine: rows, ends, log-probs, weights, seeds, sampling of a batch.

An engine is opened once for each model and reused; each test first gives it the weights it wants.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from pipeline import registry
from pipeline.context import Context
from pipeline.metrics import summarise
from pipeline.plan import has_cuda
from pipeline.registry import Entry
from pipeline.stage import component_types
from stages.records import Finish, RolloutBatch, Sampling, Status
from stages.rollout import Rollout
from stages.weights import snapshot_of
from tests.builders import token_batch
from tests.tiny_models import (
    END,
    ENDS,
    load,
    perturb,
    reference_greedy,
    reference_log_probs,
    save_model,
    set_generation_config,
)

registry.discover("stages")
N, LIMIT = 4, 12
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15, 16], [20, 21, 22, 23], [30] * 20]


def _param(entry: Entry) -> Any:
    return pytest.param(entry, id=entry.name, marks=[pytest.mark.vllm] if "vllm" in entry.cls.requires else [])


def _lacks(entry: Entry) -> str | None:
    """What this machine lacks to execute a backend."""
    for need in entry.cls.requires:
        if need == "device:cuda" and not has_cuda():
            return "a CUDA device"
        if not need.startswith("device:") and importlib.util.find_spec(need) is None:
            return f"the package '{need}'"
    return None


def build(entry: Entry, folder: Path, **cfg: Any) -> Rollout:
    """With the first of each component that can run here; a sampler must have what the backend needs, and seeds."""
    held: dict[str, Any] = {}
    for name, role in component_types(entry.cls).items():
        for other in registry.entries(role.role):
            lacking = {*entry.cls.needs, "seeded_rows"} - other.cls.provides
            if _lacks(other) is None and (role.role != "sampler" or not lacking):
                given = {"path": str(folder)} if role.role == "model" else {}
                held[name] = other.cls(other.config(**given))  # pyright: ignore[reportCallIssue]
                break
    return entry.cls(entry.config(**cfg), **held)  # pyright: ignore[reportCallIssue, reportReturnType]


@pytest.fixture(scope="module")
def folders(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """`tied`: the model of the default run. `untied`: random, grouped-query attention, many end tokens."""
    return {"tied": tiny_model, "untied": save_model(tmp_path_factory.mktemp("untied") / "model")}


@pytest.fixture(scope="module", params=[_param(e) for e in registry.entries("rollout")])
def opened(
    request: pytest.FixtureRequest, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Any]]:
    """`opened("tied")`: the backend with that model in its own weights, version 0."""
    entry: Entry = request.param
    if lack := _lacks(entry):
        pytest.skip(f"rollout={entry.name} needs {lack}")
    run_dir = tmp_path_factory.mktemp(entry.name)
    stages: dict[str, Rollout] = {}

    def get(which: str) -> Any:
        if which not in stages:
            stages[which] = build(entry, folders[which], n=N, max_new_tokens=LIMIT)
            stages[which].open(Context(node="rollout", run_seed=0, run_dir=run_dir))
        stages[which].receive(snapshot_of(load(folders[which]), 0))
        stages[which].ctx.meter.drain()
        return stages[which]

    yield get
    for stage in stages.values():
        stage.close()
        stage.close()  # safe to call twice


def agree(out: RolloutBatch, module: Any) -> None:
    """Log-probs are those of a forward without a cache, at the temperature sampled at (greedy: 1)."""
    for row in range(len(out)):
        prompt, response = out.prompt_ids[row], out.response_ids[row]
        expected = reference_log_probs(module, prompt, response, out.temperature or 1.0)
        np.testing.assert_allclose(out.log_probs[row], expected, atol=1e-4, err_msg=f"row {row}")


def rows(out: RolloutBatch) -> list[list[int]]:
    return [r.tolist() for r in out.response_ids.rows()]


# -- rows ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["tied", "untied"])
def test_rows_ends_and_text(opened: Any, folders: dict[str, Path], which: str) -> None:
    tokens = token_batch(PROMPTS, answers=[f"answer {i}" for i in range(5)], step=3, first_row=100)
    out = opened(which).run(tokens)
    assert isinstance(out, RolloutBatch)
    assert (out.step, out.purpose, out.group_size, out.temperature) == (3, "train", N, 1.0)
    assert out.sampling == Sampling()
    assert out.row_id.tolist() == list(range(100 * N, 105 * N))
    assert out.group_id.tolist() == [100 + i // N for i in range(5 * N)]
    assert (out.status == Status.OK).all()
    ends = {END} if which == "tied" else set(ENDS)
    tokenizer: Any = AutoTokenizer.from_pretrained(folders[which])
    for row, ids in enumerate(rows(out)):
        assert out.prompt_ids[row].tolist() == PROMPTS[row // N]
        assert out.ground_truth.json(row) == f"answer {row // N}"
        assert 1 <= len(ids) <= LIMIT
        assert not ends & set(ids[:-1])
        assert (ids[-1] in ends) == (out.finish[row] == Finish.STOP)
        assert out.finish[row] == Finish.STOP or len(ids) == LIMIT
        assert out.response.text(row) == tokenizer.decode(ids, skip_special_tokens=True)
        assert out.reason.text(row) == ""
    offsets = out.response_ids.offsets.tolist()
    for column in (out.log_probs, out.loss_mask, out.turn):
        assert column.offsets.tolist() == offsets
    assert out.loss_mask.values.all()
    assert not out.turn.values.any()
    assert out.version_min.tolist() == out.version_max.tolist() == [0] * 5 * N


def test_cut_rows_end_as_sampled(opened: Any) -> None:
    """OpenRLHF issue 238, verl issue 3805: no end token that was not sampled, no padding."""
    out = opened("untied").run(token_batch(PROMPTS, sampling=Sampling(n=16, max_new_tokens=3)))
    cut = out.finish == Finish.LENGTH
    assert 0 < cut.sum() < len(out)
    assert (out.response_ids.lengths[cut] == 3).all()
    assert not any(set(ids) & set(ENDS) for ids, is_cut in zip(rows(out), cut, strict=True) if is_cut)
    assert (out.response_ids.lengths[~cut] <= 3).all()


def test_samples_of_a_prompt_differ(opened: Any) -> None:
    out = opened("untied").run(token_batch(PROMPTS, sampling=Sampling(n=8)))
    for group in range(5):
        assert len({tuple(r) for r in rows(out)[8 * group : 8 * group + 8]}) >= 7


def test_an_empty_batch(opened: Any) -> None:
    out = opened("untied").run(token_batch(PROMPTS).take(np.array([], np.int64)))
    assert len(out) == 0
    assert len(out.response_ids.values) == 0


def test_a_prompt_without_tokens_fails_alone(opened: Any) -> None:
    whole = opened("untied").run(token_batch([PROMPTS[0], PROMPTS[1], PROMPTS[2]]))
    out = opened("untied").run(token_batch([PROMPTS[0], [], PROMPTS[2]]))
    failed = out.group_id == 1
    assert (out.status[failed] == Status.FAILED).all()
    assert (out.finish[failed] == Finish.FAILED).all()
    assert all(out.reason.text(row) for row in np.flatnonzero(failed))
    assert (out.status[~failed] == Status.OK).all()
    assert rows(out.take(np.flatnonzero(~failed))) == rows(whole.take(np.flatnonzero(~failed)))


def test_prompts_that_leave_no_room_are_an_error_that_names_them(opened: Any) -> None:
    with pytest.raises(ValueError, match=r"too long for the model's 128 positions.*rows \[41\]"):
        opened("untied").run(token_batch([[5], [6] * 117], first_row=40))


def test_parts_of_a_stream_are_the_rows_of_run(opened: Any) -> None:
    stage, tokens = opened("untied"), token_batch(PROMPTS)
    whole = stage.run(tokens)
    joined = RolloutBatch.concat(list(stage.stream(tokens=tokens)))
    joined = joined.align(np.sort(joined.row_id))
    assert joined.row_id.tolist() == whole.row_id.tolist()
    assert rows(joined) == rows(whole)


# -- log-probs and weights -------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["tied", "untied"])
def test_greedy_is_the_argmax_of_a_plain_forward(opened: Any, folders: dict[str, Path], which: str) -> None:
    out = opened(which).run(token_batch(PROMPTS, sampling=Sampling(n=1, temperature=0)))
    module = load(folders[which])
    ends = [END] if which == "tied" else ENDS
    assert rows(out) == [reference_greedy(module, p, LIMIT, ends) for p in PROMPTS]
    assert out.temperature == 0
    agree(out, module)


@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(temperature=0.6), Sampling(temperature=1.5, top_k=20, top_p=0.8, min_p=0.01)],
    ids=["plain", "cold", "filtered"],
)
@pytest.mark.parametrize("which", ["tied", "untied"])
def test_log_probs_are_at_the_temperature_and_before_filters(
    opened: Any, folders: dict[str, Path], which: str, sampling: Sampling
) -> None:
    out = opened(which).run(token_batch(PROMPTS, sampling=sampling))
    assert out.temperature == (sampling.temperature or 1.0)
    agree(out, load(folders[which]))


def test_filters_are_at_work(opened: Any, folders: dict[str, Path]) -> None:
    """Every token lies among the five likeliest; without the filter, not all do."""
    module = load(folders["untied"])

    def ranks(sampling: Sampling) -> np.ndarray:
        import torch

        out, found = opened("untied").run(token_batch(PROMPTS, sampling=sampling)), []
        for row in range(len(out)):
            prompt, response = out.prompt_ids[row].tolist(), out.response_ids[row].tolist()
            with torch.no_grad():
                logits = module(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].numpy()
            chosen = logits[np.arange(len(response)), response]
            found.append((logits > chosen[:, None]).sum(-1))
        return np.concatenate(found)

    assert ranks(Sampling(top_k=5)).max() <= 4
    assert ranks(Sampling()).max() > 4


@pytest.mark.parametrize("which", ["tied", "untied"])
def test_rows_are_made_with_the_weights_received_last(opened: Any, folders: dict[str, Path], which: str) -> None:
    """Twice, for what a first push leaves stale shows after the second. A tied head must follow its embedding."""
    stage, tokens = opened(which), token_batch(PROMPTS)
    before = stage.run(tokens)
    for version in (1, 2):
        module = perturb(load(folders[which]), seed=version)
        stage.receive(snapshot_of(module, version))
        out = stage.run(tokens)
        assert out.version_min.tolist() == out.version_max.tolist() == [version] * len(out)
        agree(out, module)
        assert rows(out) != rows(before)
        greedy = stage.run(token_batch(PROMPTS, sampling=Sampling(n=1, temperature=0)))
        assert rows(greedy) == [reference_greedy(module, p, LIMIT, [END] if which == "tied" else ENDS) for p in PROMPTS]
    stage.receive(snapshot_of(load(folders[which]), 3))
    again = stage.run(tokens)
    assert rows(again) == rows(before)
    assert set(again.version_max.tolist()) == {3}


def test_state_goes_round(opened: Any) -> None:
    """What a stage keeps, it takes back; a rollout draws the same rows afterwards."""
    stage, tokens = opened("untied"), token_batch(PROMPTS)
    before = stage.run(tokens)
    stage.load_state_dict(stage.state_dict())
    assert rows(stage.run(tokens)) == rows(before)


# -- seeds -----------------------------------------------------------------------------------------------------


def test_a_row_does_not_depend_on_its_batch(opened: Any) -> None:
    """vllm issue 17524: forward, in another order, split, and one prompt at a time."""
    stage, tokens = opened("untied"), token_batch(PROMPTS, step=4)
    whole = stage.run(tokens)
    shuffled = stage.run(tokens.take(np.array([3, 0, 4, 1, 2])))
    assert shuffled.row_id.tolist() == whole.row_id.tolist()
    assert rows(shuffled) == rows(whole)
    for sizes in ([2, 3], [1, 1, 1, 1, 1]):
        parts = [stage.run(t) for t in tokens.split(sizes)]
        assert rows(RolloutBatch.concat(parts)) == rows(whole)


def test_seeds_come_from_run_step_purpose_and_row(opened: Any) -> None:
    """verl-omni issue 561: other steps draw other rows, and the same step the same ones."""
    stage = opened("untied")
    first = rows(stage.run(token_batch(PROMPTS, step=1)))
    assert rows(stage.run(token_batch(PROMPTS, step=1))) == first
    assert rows(stage.run(token_batch(PROMPTS, step=2))) != first
    assert rows(stage.run(token_batch(PROMPTS, step=1, purpose="eval"))) != first
    assert rows(stage.run(token_batch(PROMPTS, step=1, first_row=5))) != first


# -- settings --------------------------------------------------------------------------------------------------


def test_evaluation_brings_its_own_sampling_and_is_not_measured(opened: Any) -> None:
    stage, sampling = opened("untied"), Sampling(n=1, temperature=0, max_new_tokens=5)
    out = stage.run(token_batch(PROMPTS, purpose="eval", sampling=sampling))
    assert (out.purpose, out.group_size, out.sampling, out.temperature) == ("eval", 1, sampling, 0.0)
    assert out.row_id.tolist() == [0, 1, 2, 3, 4]
    assert out.response_ids.lengths.max() <= 5
    assert stage.ctx.meter.drain() == {}
    after = stage.run(token_batch(PROMPTS))
    assert (after.group_size, after.temperature) == (N, 1.0)


def test_training_is_measured(opened: Any) -> None:
    stage = opened("untied")
    out = stage.run(token_batch(PROMPTS))
    got = summarise(stage.ctx.meter.drain())
    assert got["rollout/length_mean"] == pytest.approx(out.response_ids.lengths.mean())
    assert got["rollout/length_max"] == out.response_ids.lengths.max()
    assert got["rollout/truncated_ratio"] == pytest.approx((out.finish == Finish.LENGTH).mean())
    assert got["rollout/failed"] == 0
    assert got["rollout/tokens_per_s"] > 0


def test_the_generation_config_of_a_folder_sets_nothing(
    opened: Any, request: pytest.FixtureRequest, folders: dict[str, Path], tmp_path: Path
) -> None:
    """NeMo-RL issue 3497: with these values in force, every row would begin with the same token."""
    other = save_model(tmp_path / "leaky", load(folders["untied"]))
    set_generation_config(other, do_sample=True, temperature=0.1, top_k=1, repetition_penalty=1.5, top_p=0.1)
    tokens = token_batch([[5, 6, 7]], sampling=Sampling(n=200, max_new_tokens=3))
    neutral = opened("untied").run(tokens)
    stage = build(request.node.callspec.params["opened"], other, n=N, max_new_tokens=LIMIT)
    try:
        stage.open(Context(node="rollout", run_seed=0, run_dir=tmp_path))
        out = stage.run(tokens)
    finally:
        stage.close()
    assert len({r[0] for r in rows(out)}) > 10
    assert rows(out) == rows(neutral)
    agree(out.take(np.arange(10)), load(folders["untied"]))


def test_facts_are_what_the_plan_needs(opened: Any) -> None:
    assert opened("untied").facts() == {"samples_per_prompt": N, "max_new_tokens": LIMIT}
