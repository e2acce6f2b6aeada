"""What a sampler should do, by loops over tokens in float64; nothing is shared with the code under test."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def probabilities(logits: Sequence[float] | np.ndarray, temperature: float) -> np.ndarray:
    scaled = np.asarray(logits, np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    return weights / weights.sum()


def kept(p: np.ndarray, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> list[int]:
    """Ids that stay, ascending."""
    order = sorted(range(len(p)), key=lambda i: (-p[i], i))
    if 0 < top_k < len(p):
        order = order[:top_k]
    if top_p < 1:
        mass, total, few = 0.0, math.fsum(p[i] for i in order), []
        for i in order:
            few.append(i)
            mass += p[i]
            if mass >= top_p * total:
                break
        order = few
    return sorted(i for i in order if p[i] >= min_p * p.max())


def draw(p: np.ndarray, ids: Sequence[int], uniform: float) -> int:
    """The inverse of the cumulative distribution over `ids`, renormalised."""
    mark = uniform * math.fsum(p[i] for i in ids)
    mass = 0.0
    for i in ids:
        mass += p[i]
        if mass > mark:
            return i
    raise AssertionError("the mark lies above the total")


def splitmix64(seed: int, index: int) -> float:
    """Output number `index` of a splitmix64 generator whose seed was mixed once, as a float in [0, 1)."""
    whole, gold = 2**64, 0x9E3779B97F4A7C15

    def mix(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % whole
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % whole
        return z ^ (z >> 31)

    return (mix((mix((seed + gold) % whole) + index * gold) % whole) >> 11) / 2**53
