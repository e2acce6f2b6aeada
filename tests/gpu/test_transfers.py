"""What goes to a CUDA device: one asynchronous copy a batch from page-locked memory, and no wait. `pytest -m gpu`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from stages.batching import cut, micro_batches
from stages.device import send
from tests.stages.learners import random_rollouts

pytestmark = pytest.mark.gpu

BUDGET = 64
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")


def happened(work: Callable[[], Any]) -> Counter[str]:
    """Names of what the profiler saw while `work` ran, a second time: the first allocates memory."""
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    work()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        with record_function("the work"):
            torch.cuda.set_sync_debug_mode("error")
            try:
                work()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
    events = seen.events()
    span = next(e.time_range for e in events if e.name == "the work" and "CPU" in str(e.device_type))
    on_host = [e.name for e in events if span.start <= e.time_range.start <= span.end and "CPU" in str(e.device_type)]
    return Counter(on_host) + Counter(e.name for e in events if e.name.startswith("Memcpy "))


def test_a_micro_batch_is_one_copy_and_no_wait() -> None:
    rollouts = random_rollouts(40, 8)
    rows = np.arange(len(rollouts))
    parts = len(cut(rollouts.prompt_ids.lengths + rollouts.response_ids.lengths, BUDGET))
    assert parts > 3

    def work() -> None:
        for micro in micro_batches(rollouts, rows, BUDGET, "cuda"):
            micro.ids.sum() + micro.targets.sum() + micro.predicts.sum()

    seen = happened(work)
    copies = {name: n for name, n in seen.items() if name.startswith("Memcpy ")}
    assert sum(copies.values()) == parts, copies
    assert all("HtoD" in name and "Pinned" in name for name in copies), copies
    assert not {name: n for name, n in seen.items() if name in WAITS}, seen


def test_the_profiler_sees_ordinary_copies() -> None:
    """That the test above can fail: a plain `to` waits."""
    import torch

    def work() -> None:
        torch.from_numpy(np.arange(10_000)).to("cuda")

    with pytest.raises(RuntimeError, match="synchroniz"):
        happened(work)


def test_tensors_arrive_whole_although_nobody_waits() -> None:
    """Many parcels of one buffer's size, each used on the device while the next is on its way."""
    import torch

    rng = np.random.default_rng(0)
    arrays = [rng.integers(0, 2**62, 50_000) for _ in range(200)]
    busy = torch.randn(2000, 2000, device="cuda")
    sums = []
    for a in arrays:
        busy = busy @ busy
        busy /= busy.norm()
        sums.append(send("cuda", a=a)["a"].sum())
    assert [int(s) for s in sums] == [int(np.sum(a)) for a in arrays]
