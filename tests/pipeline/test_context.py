"""Seeds: pure, distinct, well spread."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pipeline.context import Context

M1, M2, GOLD, MASK = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0x9E3779B97F4A7C15, 2**64 - 1


def mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * M1) & MASK
    z = ((z ^ (z >> 27)) * M2) & MASK
    return z ^ (z >> 31)


def expected(run_seed: int, node: str, step: int, row: int) -> int:
    """The same in Python's integers."""
    raw = node.encode()
    raw += b"\0" * (-len(raw) % 8)
    words = [int.from_bytes(raw[i : i + 8], "little") for i in range(0, len(raw), 8)]
    key = run_seed
    for word in [*words, step]:
        key = mix(key ^ mix((word + GOLD) & MASK))
    return mix(key ^ mix((row + GOLD) & MASK)) >> 1


def context(seed: int) -> Context:
    return Context(node="n", run_seed=seed, run_dir=Path())


def test_mix_is_the_finaliser_of_splitmix64() -> None:
    """The first outputs of splitmix64 from state 0 are mix(k * golden gamma): published test values."""
    assert [mix((GOLD * k) & MASK) for k in (1, 2)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


def test_seeds_equal_the_definition() -> None:
    rows = np.array([0, 1, 2**40, 7])
    for run_seed, node, step in ((0, "rollout", 1), (3, "rollout/train", 9), (2**40, "é", 0), (1, "", 5)):
        got = context(run_seed).seed(node, step, rows)
        assert got.dtype == np.uint64
        assert got.tolist() == [expected(run_seed, node, step, int(r)) for r in rows]
    assert int(context(0).seed("a", 1, 5)) == expected(0, "a", 1, 5)


def test_seeds_do_not_depend_on_the_batch_and_do_not_repeat() -> None:
    rows = np.arange(500)
    everything = {(s, n, t): context(s).seed(n, t, rows) for s in range(3) for n in ("a", "b", "ab") for t in range(4)}
    flat = np.concatenate(list(everything.values()))
    assert len(np.unique(flat)) == len(flat)
    assert flat.max() < 2**63
    one = everything[1, "b", 2]
    assert one[::-3].tolist() == context(1).seed("b", 2, rows[::-3]).tolist()


def test_bits_are_balanced() -> None:
    seeds = context(0).seed("n", 1, np.arange(20000))
    for bit in range(63):
        ones = int(((seeds >> np.uint64(bit)) & np.uint64(1)).sum())
        assert abs(ones - 10000) < 5 * np.sqrt(20000 / 4)
