"""Parcels on a CPU; tests/gpu/test_transfers.py looks at what a CUDA device really does."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.device import Parcel, ahead, send

DTYPES = (np.int64, np.int32, np.float32, np.bool_, np.uint8)


@settings(deadline=None)  # the first example imports torch
@given(
    st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), min_size=1, max_size=3)), min_size=1, max_size=6
    ),
    st.integers(0, 2**32 - 1),
)
def test_tensors_hold_what_was_sent(arrays: list[tuple[type, list[int]]], seed: int) -> None:
    rng = np.random.default_rng(seed)
    given_ = {f"a{i}": rng.integers(0, 2, shape).astype(dtype) for i, (dtype, shape) in enumerate(arrays)}
    sent = send("cpu", **given_)
    assert list(sent) == list(given_)
    for name, array in given_.items():
        assert sent[name].numpy().dtype == array.dtype
        assert np.array_equal(sent[name].numpy(), array)


def test_a_parcel_starts_with_zeros_and_copies_nothing_on_a_cpu() -> None:
    parcel = Parcel("cpu", ids=((2, 3), np.int64), mask=((3,), np.bool_))
    assert not parcel.host["ids"].any()
    assert not parcel.host["mask"].any()
    parcel.host["ids"][1, 2] = 7
    tensors = parcel.send().receive()
    assert tensors["ids"].tolist() == [[0, 0, 0], [0, 0, 7]]
    assert tensors["ids"].numpy().ctypes.data == parcel.host["ids"].ctypes.data


def test_arrays_of_a_parcel_do_not_overlap() -> None:
    parcel = Parcel("cpu", a=((3,), np.uint8), b=((5,), np.int64), c=((1,), np.bool_))
    parcel.host["a"][:], parcel.host["b"][:], parcel.host["c"][:] = 255, -1, True
    parcel.host["b"][:] = 0
    assert parcel.host["a"].tolist() == [255] * 3
    assert parcel.host["c"].tolist() == [True]


def test_each_item_is_made_before_the_one_in_front_is_given_out() -> None:
    made: list[int] = []

    def make(count: int):
        for i in range(count):
            made.append(i)
            yield i

    seen = [(item, len(made)) for item in ahead(make(4))]
    assert seen == [(0, 2), (1, 3), (2, 4), (3, 4)]
    assert list(ahead([])) == []
    assert list(ahead([5])) == [5]


def test_an_error_while_making_the_next_item_is_not_lost() -> None:
    def make():
        yield 1
        raise ValueError("the second")

    with pytest.raises(ValueError, match="the second"):
        list(ahead(make()))
