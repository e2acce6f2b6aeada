"""The door to verl: its registries without importing it, and padding."""

from __future__ import annotations

import inspect
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages import verl_door
from stages.verl_door import Layout


def test_reading_the_registries_imports_nothing_heavy(root):
    code = (
        "import sys; from stages import verl_door as d;"
        "assert 'gae' in d.estimators() and 'vanilla' in d.policy_losses();"
        "print(sorted({'torch', 'verl', 'ray', 'transformers'} & sys.modules.keys()))"
    )
    out = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("table", "registry"), [("estimators", "ADV_ESTIMATOR_REGISTRY"), ("policy_losses", "POLICY_LOSS_REGISTRY")]
)
def test_what_is_read_from_the_source_is_what_verl_registers(table, registry):
    live = {str(n): f for n, f in getattr(verl_door.core_algos(), registry).items() if verl_door.is_own(f)}
    read = {n: s for n, s in getattr(verl_door, table)().items() if s.own}
    assert read.keys() == live.keys()
    for name, function in live.items():
        parameters = inspect.signature(function).parameters.values()
        named = [p for p in parameters if p.kind is not p.VAR_KEYWORD]
        assert read[name].required == tuple(p.name for p in named if p.default is p.empty), name
        assert read[name].defaults == {p.name: p.default for p in named if p.default is not p.empty}, name
        assert read[name].takes_any == any(p.kind is p.VAR_KEYWORD for p in parameters), name


def test_fields_that_estimators_read_from_the_config():
    table = verl_door.estimators()
    assert table["reinforce_plus_plus"].takes("gamma")
    assert table["grpo_passk"].takes("norm_adv_by_std_in_grpo")
    assert table["gdpo"].takes("gdpo_reward_weights")
    assert not table["grpo"].takes("gamma")
    assert not table["rloo"].takes("values")  # it takes **kwargs, and uses none of them


def test_importing_verl_leaves_pythons_random_state():
    random.seed(3)
    expected = random.Random(3).random()
    verl_door.core_algos()
    assert random.random() == expected


def test_a_plug_in_joins_the_tables(monkeypatch):
    core = verl_door.core_algos()

    def mine(token_level_rewards, response_mask, values, *, half=0.5, **kwargs):
        return token_level_rewards, token_level_rewards

    monkeypatch.setitem(core.ADV_ESTIMATOR_REGISTRY, "mine", mine)
    signature = verl_door.estimators()["mine"]
    assert signature.required == ("token_level_rewards", "response_mask", "values")
    assert signature.optional == ("half",)
    assert not signature.own
    assert signature.takes("anything")


lengths = st.lists(st.integers(0, 6), min_size=1, max_size=8).map(np.array)


@given(lengths)
@settings(max_examples=60, deadline=None)
def test_padding_and_its_inverse(rows):
    flat = np.arange(1, rows.sum() + 1, dtype=np.float32)
    layout = Layout(rows)
    padded = layout.pad(flat)
    assert padded.shape == (len(rows), max(rows.max(), 1))
    at = 0
    for row, n in zip(padded.numpy(), rows, strict=True):
        assert row[:n].tolist() == flat[at : at + n].tolist()
        assert not row[n:].any()
        at += n
    assert torch.equal(layout.unpad(padded), torch.from_numpy(flat))


def test_gradients_flow_back_through_padding():
    flat = torch.arange(1.0, 5.0, requires_grad=True)
    weights = torch.tensor([[1.0, 2.0], [9.0, 9.0], [3.0, 4.0]])
    (Layout(np.array([2, 0, 2])).pad(flat) * weights).sum().backward()
    assert flat.grad is not None
    assert flat.grad.tolist() == [1.0, 2.0, 3.0, 4.0]


def test_a_wrong_number_of_values_is_refused():
    with pytest.raises(ValueError, match="holds 3 tokens"):
        Layout(np.array([1, 2])).pad(np.zeros(4))


def test_groups_are_numbered_without_gaps():
    index = verl_door.group_index(np.array([5_000_000_000, -3, 5_000_000_000, 7]))
    assert index.tolist() == [2, 0, 2, 1]
    assert index.dtype == np.int64
