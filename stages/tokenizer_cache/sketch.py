"""How many distinct prompts were seen, and how long they are, in a bounded number of bytes."""

from __future__ import annotations

from collections.abc import Iterable

from stages.locks import ThreadLock

KEPT = 4096


class DistinctPrompts:
    """The k smallest of the keys seen, which are uniform 128-bit hashes: if the k-th smallest lies at the fraction f of
    all possible keys, there were about (k - 1) / f of them (Bar-Yossef et al. 2002, "Counting distinct elements in a
    data stream"). Exact up to k keys; above, the standard error is 1 / sqrt(k), 1.6 % here. What is kept is a uniform
    sample of the distinct prompts, so the mean length is that of the sample."""

    def __init__(self) -> None:
        self._kept: dict[bytes, int] = {}
        self._above: bytes | None = None
        self._lock = ThreadLock()

    def add(self, seen: Iterable[tuple[bytes, int]]) -> None:
        """Keys of 16 bytes and the number of ids."""
        with self._lock:
            kept, above = self._kept, self._above
            for key, tokens in seen:
                if above is None or key < above:
                    kept[key] = tokens
            if len(kept) > 2 * KEPT:
                self._shrink()

    def _shrink(self) -> None:
        smallest = sorted(self._kept)[: KEPT + 1]
        self._above = smallest[-1]
        self._kept = {k: self._kept[k] for k in smallest[:-1]}

    def count(self) -> int:
        if self._above is None and len(self._kept) <= KEPT:
            return len(self._kept)
        kth = sorted(self._kept)[KEPT - 1]
        return round((KEPT - 1) / (int.from_bytes(kth, "big") / 2**128))

    def mean_tokens(self) -> float:
        """Of a distinct prompt; 0 if there was none."""
        return sum(self._kept.values()) / len(self._kept) if self._kept else 0.0
