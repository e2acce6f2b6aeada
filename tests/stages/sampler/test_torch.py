"""The PyTorch sampler against loops over tokens, and the ways in which samplers are known to go wrong."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.sampler import SamplingParams
from stages.sampler import torch as module
from stages.sampler.torch import TorchSampler, TorchSamplerConfig, uniforms
from tests.stages.sampler import reference


def params(temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> SamplingParams:
    return SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)


def sample(logits, settings: SamplingParams, seeds=None, position=None) -> tuple[np.ndarray, np.ndarray]:
    logits = torch.as_tensor(logits)
    seeds = np.arange(len(logits), dtype=np.uint64) if seeds is None else seeds
    position = np.zeros(len(logits), np.int64) if position is None else position
    ids, log_probs = TorchSampler(TorchSamplerConfig()).sample(logits, settings, seeds, position)
    assert ids.dtype == torch.int64
    assert log_probs.dtype == torch.float32
    return ids.numpy(), log_probs.numpy()


def many(p: list[float], settings: SamplingParams, draws: int) -> np.ndarray:
    """Ids of `draws` rows that all have the probabilities `p`."""
    logits = torch.tensor(p).log().expand(draws, -1)
    return sample(logits, settings)[0]


# -- the uniform numbers ---------------------------------------------------------------------------------------


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**31))
def test_uniforms_are_splitmix64(seed: int, position: int) -> None:
    got = uniforms(np.array([seed], np.uint64), np.array([position], np.int64))
    assert got[0] == reference.splitmix64(seed, position)


def test_uniforms_are_uniform_over_rows_and_over_positions() -> None:
    count = 100_000
    by_row = uniforms(np.arange(count, dtype=np.uint64), np.zeros(count, np.int64))
    by_position = uniforms(np.full(count, 7, np.uint64), 1 + np.arange(count))
    for u in (by_row, by_position):
        assert u.min() >= 0
        assert u.max() < 1
        counts = np.histogram(u, 100, (0, 1))[0]
        chi2 = ((counts - count / 100) ** 2 / (count / 100)).sum()
        assert 50 < chi2 < 160  # 99 degrees of freedom
        assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.02
    assert len(np.unique(np.concatenate([by_row, by_position]))) == 2 * count


# -- ids and log-probs against the reference -------------------------------------------------------------------


@settings(deadline=None, max_examples=200)
@given(
    logits=st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=40),
    temperature=st.floats(0.05, 5),
    top_k=st.integers(0, 45),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
    seed=st.integers(0, 2**63 - 1),
    position=st.integers(0, 1000),
)
def test_equals_the_reference(logits, temperature, top_k, top_p, min_p, seed, position) -> None:
    p = reference.probabilities(logits, temperature)
    allowed = reference.kept(p, top_k, top_p, min_p)
    expected = reference.draw(p, allowed, reference.splitmix64(seed, position))
    given_params = params(temperature, top_k, top_p, min_p)
    ids, log_probs = sample([logits], given_params, np.array([seed], np.uint64), np.array([position]))
    assert ids[0] in allowed
    assert ids[0] == expected
    np.testing.assert_allclose(log_probs[0], np.log(p[expected]), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.97), (3000, 0.9), (0, 0.01), (1, 0.5)])
def test_large_flat_vocabulary(top_k: int, top_p: float) -> None:
    """The nucleus reaches far past the first look, and differs from row to row."""
    rng = np.random.default_rng(0)
    logits = (rng.standard_normal((6, 20_000)) * np.array([[0.1], [1], [3], [0.1], [6], [1]])).astype(np.float32)
    ids, _ = sample(logits, params(1.0, top_k, top_p))
    for row, got in enumerate(ids):
        p = reference.probabilities(logits[row], 1.0)
        allowed = reference.kept(p, top_k, top_p)
        assert got == reference.draw(p, allowed, reference.splitmix64(row, 0))


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(50, 300, generator=torch.Generator().manual_seed(0))
    logits[17] = float("nan")
    whole = sample(logits, params(0.8, 20, 0.9))
    monkeypatch.setitem(module._BLOCK_VALUES, "cpu", 7 * 300)
    cut = sample(logits, params(0.8, 20, 0.9))
    assert whole[0].tobytes() == cut[0].tobytes()
    assert whole[1].tobytes() == cut[1].tobytes()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_any_float_type(dtype: torch.dtype) -> None:
    logits = torch.randn(64, 50, generator=torch.Generator().manual_seed(0)).to(dtype)
    same = sample(logits.double(), params(0.7, 10, 0.9))
    got = sample(logits, params(0.7, 10, 0.9))
    assert got[0].tobytes() == same[0].tobytes()
    assert got[1].tobytes() == same[1].tobytes()


# -- filters ---------------------------------------------------------------------------------------------------


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    """flashinfer issue 2202: the token at the boundary belongs to the set."""
    ids = many([0.5, 0.41, 0.09], params(top_p=0.9), 100_000)
    assert set(ids) == {0, 1}
    np.testing.assert_allclose((ids == 0).mean(), 0.5 / 0.91, atol=0.005)
    assert set(many([0.4, 0.3, 0.2, 0.1], params(top_p=0.8), 20_000)) == {0, 1, 2}
    assert set(many([0.25, 0.25, 0.25, 0.25], params(top_p=0.5), 20_000)) == {0, 1}  # exact in binary


def test_top_k_then_top_p_on_the_renormalised_rest() -> None:
    """sglang PR 36173: .35 + .25 + .20 of .85 is .94 of what top-k left; of the whole it would be .80 < .82."""
    p = [0.35, 0.25, 0.20, 0.05, 0.03, 0.03, 0.03, 0.03, 0.03]
    assert set(many(p, params(top_k=4, top_p=0.82), 20_000)) == {0, 1, 2}
    assert set(many(p, params(top_p=0.82), 20_000)) == {0, 1, 2, 3}


def test_top_k_one_with_top_p_above_its_mass() -> None:
    """mlx-lm PR 388."""
    assert set(many([0.3, 0.25, 0.25, 0.2], params(top_k=1, top_p=0.8), 1000)) == {0}


@pytest.mark.parametrize("top_k", [0, 4, 5, 2**30])
def test_top_k_off(top_k: int) -> None:
    """vllm issue 17553."""
    ids = many([0.25] * 4, params(top_k=top_k), 4000)
    np.testing.assert_allclose(np.bincount(ids) / 4000, 0.25, atol=0.03)


def test_of_equal_tokens_the_lower_ids_stay() -> None:
    assert set(many([0.2] * 5, params(top_k=3), 5000)) == {0, 1, 2}
    assert set(many([0.1, 0.3, 0.3, 0.3], params(top_k=2), 5000)) == {1, 2}


def test_huge_top_k_on_a_one_hot_row() -> None:
    """flashinfer issue 384."""
    logits = torch.full((1, 32_000), float("-inf"))
    logits[0, 1] = 0.0
    ids, log_probs = sample(logits.expand(1000, -1), params(top_k=2**30))
    assert set(ids) == {1}
    assert set(log_probs) == {0.0}


def test_min_p_is_relative_to_the_likeliest() -> None:
    """sglang PR 15648; .1 * .5 = .05, and .0499 lies below."""
    p = [0.5, 0.2, 0.1999, 0.0501, 0.0499]
    assert set(many(p, params(min_p=0.1), 100_000)) == {0, 1, 2, 3}
    assert set(many(p, params(min_p=1.0), 1000)) == {0}
    logits = torch.tensor(p).log()[None]
    sharp = reference.kept(reference.probabilities(logits[0].numpy(), 0.5), min_p=0.1)
    assert set(sample(logits.expand(20_000, -1), params(0.5, min_p=0.1))[0]) == set(sharp) == {0, 1, 2}


@pytest.mark.parametrize("live", [range(5), range(1995, 2000), range(0, 2000, 400)])
def test_never_a_token_of_zero_probability(live: range) -> None:
    """pytorch issue 4858: rounding at the end of the cumulative sum points behind the last live token."""
    logits = torch.full((2000,), float("-inf"))
    logits[list(live)] = 0.1
    ids, log_probs = sample(logits.expand(10_000, -1), params())
    assert set(ids) == set(live)
    assert np.isfinite(log_probs).all()


@pytest.mark.parametrize(
    "weights", [[0.1, 0.7, 0.2, 0.0, 0.0], [0.0, 0.3, 0.3, 0.3, 0.0], [1e-30, 3e-38, 0.0, 0.0, 0.0]]
)
def test_the_largest_uniform_draws_the_last_live_token(weights: list[float]) -> None:
    last = max(i for i, w in enumerate(weights) if w)
    for uniform in (1 - 2.0**-53, 1.0):  # 1.0 stands for a product that is rounded up to the total
        got = module._draw(torch.tensor([weights], dtype=torch.float64), torch.tensor([uniform], dtype=torch.float64))
        assert got.tolist() == [[last]]
    first = min(i for i, w in enumerate(weights) if w)
    got = module._draw(torch.tensor([weights], dtype=torch.float64), torch.zeros(1, dtype=torch.float64))
    assert got.tolist() == [[first]]


# -- temperature -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1e-320, 1e-300, 1e-12, 1e-5])
@pytest.mark.parametrize("filters", [{}, {"top_k": 2, "top_p": 0.5, "min_p": 0.5}])
def test_zero_and_tiny_temperatures_are_argmax(temperature: float, filters: dict) -> None:
    """gemma issue 562."""
    logits = np.array([[1, 2, 2.5], [7, -3, 7.01], [float("-inf"), 3, float("-inf")]], np.float32)
    ids, log_probs = sample(logits, params(temperature, **filters))
    assert ids.tolist() == [2, 2, 1]
    if temperature:
        assert log_probs.tolist() == [0, 0, 0]
    else:
        expected = [np.log(reference.probabilities(row, 1.0)[i]) for row, i in zip(logits, ids, strict=True)]
        np.testing.assert_allclose(log_probs, expected, rtol=1e-6, atol=1e-7)


def test_a_small_temperature_keeps_its_meaning() -> None:
    """5e-3 is not rounded to something else: exp(-0.01 / 0.005) = 0.135."""
    ids, _ = sample(torch.tensor([[0.0, -0.01]]).expand(50_000, -1), params(0.005))
    np.testing.assert_allclose((ids == 1).mean(), np.exp(-2) / (1 + np.exp(-2)), atol=0.006)


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    assert sample(torch.tensor([[1.0, 3.0, 3.0, 2.0]]), params(0.0))[0].tolist() == [1]


# -- rows ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [params(), params(0.0), params(0.7, 3, 0.9, 0.05)])
def test_rows_without_a_distribution_leave_their_neighbours_alone(settings: SamplingParams) -> None:
    """flashinfer issue 2402."""
    good = torch.randn(6, 40, generator=torch.Generator().manual_seed(1))
    bad = good.clone()
    bad[1] = float("nan")
    bad[3, 7] = float("nan")
    bad[4] = float("-inf")
    bad[5, 2] = float("inf")
    ids, log_probs = sample(bad, settings)
    clean_ids, clean_log_probs = sample(good, settings)
    assert ids[[1, 3, 4, 5]].tolist() == [-1] * 4
    assert np.isnan(log_probs[[1, 3, 4, 5]]).all()
    assert ids[[0, 2]].tolist() == clean_ids[[0, 2]].tolist()
    assert log_probs[[0, 2]].tolist() == clean_log_probs[[0, 2]].tolist()


@pytest.mark.parametrize("settings", [params(), params(0.0), params(0.7, 3, 0.9, 0.1)])
def test_logits_are_not_modified(settings: SamplingParams) -> None:
    """sglang PR 15648. In float64, where a conversion makes no copy."""
    logits = torch.randn(8, 40, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    logits[2] = float("nan")
    before = logits.clone()
    sample(logits, settings)
    assert logits.numpy().tobytes() == before.numpy().tobytes()


def test_no_rows() -> None:
    ids, log_probs = sample(torch.empty(0, 10), params(0.7, 3, 0.9))
    assert len(ids) == len(log_probs) == 0
