"""What a stage is given when it opens: who it is, where it runs, its seeds and its meter."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.metrics import Meter

_M1, _M2, _GOLD = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB), np.uint64(0x9E3779B97F4A7C15)


@dataclass(slots=True, kw_only=True)
class Context:
    """Picklable, so that a stage can open in another process.

    `run_dir` exists; `threads` is the number of compute threads a process may use; `device` is `cpu` or
    `cuda`. The meter collects metrics of the step under way; in another process it starts empty.
    """

    node: str
    run_seed: int
    run_dir: Path
    threads: int = 1
    device: str = "cpu"
    meter: Meter = field(default_factory=Meter)

    def seed(self, node: str, step: int, row: np.ndarray | int) -> np.ndarray:
        """Seeds for rows of a step at a node: uint64, below 2^63, a pure function of the run's seed and these.

        The same row gets the same seed whatever batch, process or order it is worked on; distinct rows,
        steps, nodes and run seeds get unrelated ones. splitmix64 (Steele, Lea and Flood 2014, "Fast
        splittable pseudorandom number generators", OOPSLA) chained over the coordinates.
        """
        name = np.frombuffer(node.encode().ljust(-(-len(node.encode()) // 8) * 8, b"\0"), "<u8")
        key = np.uint64(self.run_seed % 2**64)
        with np.errstate(over="ignore"):
            for word in (*name, np.uint64(step % 2**64)):
                key = mix64(key ^ mix64(word + _GOLD))
            out = mix64(key ^ mix64(np.asarray(row).astype(np.uint64) + _GOLD))
        return out >> np.uint64(1)


def mix64(z: np.ndarray | np.uint64) -> Any:
    """The finaliser of splitmix64: a bijection of uint64 whose every output bit depends on every input bit."""
    z = (z ^ (z >> np.uint64(30))) * _M1
    z = (z ^ (z >> np.uint64(27))) * _M2
    return z ^ (z >> np.uint64(31))
