"""What every sampler does that works on logits in this process."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest
import torch

from pipeline import registry
from pipeline.plan import has_cuda
from stages.sampler import Sampler, SamplingParams
from tests.stages.sampler import reference

registry.discover("stages")
ENTRIES = [e for e in registry.entries("sampler") if "logits_sampler" in e.cls.provides]
FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.2},
    {"temperature": 1.7, "top_k": 12, "top_p": 0.7, "min_p": 0.05},
]


@pytest.fixture(params=ENTRIES, ids=lambda e: e.name)
def sampler(request: pytest.FixtureRequest) -> Sampler:
    entry = request.param
    for need in entry.cls.requires:
        if need == "device:cuda" and not has_cuda():
            pytest.skip(f"sampler={entry.name} needs a CUDA device")
        if not need.startswith("device:") and importlib.util.find_spec(need) is None:
            pytest.skip(f"sampler={entry.name} needs the package '{need}'")
    return entry.cls(entry.config())


def params(**changed: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | changed))


def sample(sampler: Sampler, logits: np.ndarray, settings: SamplingParams, seeds: Any = None, position: Any = None):
    device = "cuda" if "device:cuda" in sampler.requires else "cpu"
    seeds = np.arange(len(logits), dtype=np.uint64) if seeds is None else seeds
    position = np.zeros(len(logits), np.int64) if position is None else position
    given = torch.from_numpy(np.array(logits, np.float32)).to(device)
    before = given.clone()
    ids, log_probs = sampler.sample(given, settings, seeds, position)
    assert torch.equal(given.nan_to_num(9.0), before.nan_to_num(9.0)), "the logits were changed"
    assert ids.dtype == torch.int64
    assert log_probs.dtype == torch.float32
    assert ids.shape == log_probs.shape == (len(logits),)
    return ids.cpu().numpy(), log_probs.cpu().numpy()


def random_logits(rows: int, vocabulary: int, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, vocabulary)) * 2).astype(np.float32)


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_frequencies_are_those_of_the_filtered_distribution(sampler: Sampler, filters: dict[str, Any]) -> None:
    """20,000 draws: none outside the filters, and each share within five standard deviations."""
    row, settings, draws = random_logits(1, 30)[0], params(**filters), 20_000
    p = reference.probabilities(row, settings.temperature)
    kept = reference.kept(p, settings.top_k, settings.top_p, settings.min_p)
    ids, log_probs = sample(sampler, np.tile(row, (draws, 1)), settings)
    assert set(ids) <= set(kept)
    share = np.bincount(ids, minlength=30)[kept] / draws
    expected = p[kept] / p[kept].sum()
    assert (np.abs(share - expected) <= 5 * np.sqrt(expected * (1 - expected) / draws) + 1e-9).all()
    np.testing.assert_allclose(log_probs, np.log(p[ids]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_greedy_ignores_filters(sampler: Sampler, filters: dict[str, Any]) -> None:
    logits = random_logits(50, 300)
    ids, log_probs = sample(sampler, logits, params(**(filters | {"temperature": 0.0})))
    assert ids.tolist() == logits.argmax(-1).tolist()
    expected = [np.log(reference.probabilities(row, 1.0).max()) for row in logits]
    np.testing.assert_allclose(log_probs, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_a_row_depends_on_its_seed_and_position_alone(sampler: Sampler, filters: dict[str, Any]) -> None:
    if "seeded_rows" not in sampler.provides:
        pytest.skip(f"sampler={sampler.backend} does not provide seeded_rows")
    logits, settings = random_logits(64, 500), params(**filters)
    seeds, position = np.arange(64, dtype=np.uint64) * 977, np.arange(64) % 7
    whole = sample(sampler, logits, settings, seeds, position)
    order = np.random.default_rng(1).permutation(64)
    shuffled = sample(sampler, logits[order], settings, seeds[order], position[order])
    assert shuffled[0].tolist() == whole[0][order].tolist()
    alone = [sample(sampler, logits[i : i + 1], settings, seeds[i : i + 1], position[i : i + 1]) for i in range(64)]
    assert [int(a[0][0]) for a in alone] == whole[0].tolist()
    for other in (
        sample(sampler, logits, settings, seeds + 1, position),
        sample(sampler, logits, settings, seeds, position + 1),
    ):
        assert other[0].tolist() != whole[0].tolist()


def test_rows_without_a_distribution_are_marked_and_others_are_not_touched(sampler: Sampler) -> None:
    logits = random_logits(6, 100)
    clean = sample(sampler, logits, params(top_k=10, top_p=0.9))
    logits[1], logits[3, 50], logits[5] = np.nan, np.nan, -np.inf
    ids, log_probs = sample(sampler, logits, params(top_k=10, top_p=0.9))
    assert ids[[1, 3, 5]].tolist() == [-1, -1, -1]
    assert np.isnan(log_probs[[1, 3, 5]]).all()
    assert ids[[0, 2, 4]].tolist() == clean[0][[0, 2, 4]].tolist()
    np.testing.assert_array_equal(log_probs[[0, 2, 4]], clean[1][[0, 2, 4]])


@pytest.mark.parametrize("off", [{"top_k": 0}, {"top_k": 100}, {"top_k": 101}, {"top_k": 2**30}])
def test_values_that_mean_no_filter(sampler: Sampler, off: dict[str, Any]) -> None:
    logits = np.zeros((4000, 4), np.float32)
    share = np.bincount(sample(sampler, logits, params(**off))[0], minlength=4) / 4000
    np.testing.assert_allclose(share, 0.25, atol=0.035)
    wide = random_logits(200, 100)
    assert sample(sampler, wide, params(**off))[0].tolist() == sample(sampler, wide, params())[0].tolist()


def test_tokens_of_zero_probability_are_never_drawn(sampler: Sampler) -> None:
    logits = np.full((20_000, 1000), -np.inf, np.float32)
    live = [0, 3, 500, 996]
    logits[:, live] = [0.0, -0.3, 0.2, 0.1]
    ids, log_probs = sample(sampler, logits, params())
    assert set(ids) == set(live)
    assert np.isfinite(log_probs).all()
