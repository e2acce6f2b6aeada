"""Arrays of token ids by key in a piece of memory that processes share: a ring of entries and an index.

    header   4096 bytes: magic, version, job, sizes; at 64 the state that writers keep
    index    buckets of 8 slots of two words: the last 8 bytes of a key, the place of its entry (0: free).
             The first 8 bytes choose a bucket; the key stands in that one or the next, whichever had more room
    ring     entries one after the other: checksum, number of ids, key, ids; padded to 16 bytes

A place counts all bytes ever written, so it names a turn of the ring as well. An entry never crosses the end of
the ring. The oldest entries go first, when the ring comes round to them.

Readers take no lock. They copy what a slot names and believe it only if the key and the checksum (xxh3 over
number, key and ids) are right; everything else, whatever the reason, is a miss: an entry that is just being
written or overwritten, a writer that was killed, a word that was seen half, memory that another core sees in
another order. So order of writes matters only for what is remembered, never for what is true.

Writers exclude each other, and write: the mark `writing`, entry, slot, state without the mark. Whoever finds the
mark knows that a writer died, and counts again what the index holds.
"""

from __future__ import annotations

import mmap
import struct
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import astuple, dataclass

import numpy as np
from xxhash import xxh3_64_intdigest

MAGIC, VERSION = b"HRTOKENS", 1
KEY_BYTES = 16
HEADER = 4096
_FIXED = struct.Struct("=8sQ16sQQQ")
"""Magic, version, job, buckets, bytes of the ring, checksum of those."""
_STATE, _STATE_AT = struct.Struct("=QQQQQ"), 64
_HEAD, _TAIL, _ENTRIES, _EVICTIONS, _MARK = range(_STATE_AT // 8, _STATE_AT // 8 + 5)
_SLOT, _SLOTS, _BUCKET = 16, 8, 128
_TWO = struct.Struct("=" + "8sQ" * 2 * _SLOTS)
"""The slots of two buckets."""
_ENTRY = struct.Struct("=QQ16s")
_IDS = np.dtype(np.int32)
_ALIGN = 16
_PAD = 2**64 - 1
"""In place of a number of ids: nothing follows up to the end of the ring."""
SMALLEST = 64 * 1024

Item = tuple[bytes, np.ndarray]


class BadRing(ValueError):
    """These bytes are not a ring of this version."""


@dataclass(slots=True)
class State:
    """Places of the next entry and of the oldest one; how many entries there are, and how many had to go."""

    head: int
    tail: int
    entries: int = 0
    evictions: int = 0
    writing: int = 0


def entry_bytes(tokens: int) -> int:
    """What an entry takes in the ring."""
    return -(-(_ENTRY.size + 4 * tokens) // _ALIGN) * _ALIGN


def format_ring(memory: mmap.mmap, job: bytes) -> None:
    """Make zeroed memory a ring that holds nothing; an eighth of it is index."""
    buckets = (len(memory) - HEADER) // 8 // _BUCKET - 1
    size = (len(memory) - HEADER - (buckets + 1) * _BUCKET) // _ALIGN * _ALIGN
    if len(memory) < SMALLEST:
        raise ValueError(f"a ring takes at least {SMALLEST} bytes; got {len(memory)}")
    memory[_STATE_AT : _STATE_AT + _STATE.size] = _STATE.pack(*astuple(State(size, size)))  # place 0 is a free slot
    fixed = _FIXED.pack(MAGIC, VERSION, job, buckets, size, 0)
    memory[: _FIXED.size] = fixed[:-8] + xxh3_64_intdigest(fixed[:-8]).to_bytes(8, sys.byteorder)


class Ring:
    """Reads, and writes if the memory is writable and `lock` says how writers exclude each other.

    `lock()` is a context that gives whether it was got; where it was not, nothing is written, and `skipped` counts
    what was not. BadRing if the memory does not hold a ring, or not one of this `job` (None: any).
    """

    def __init__(self, memory: mmap.mmap, lock: Callable[[], AbstractContextManager[bool]] | None, job: bytes | None):
        if len(memory) < SMALLEST:
            raise BadRing(f"{len(memory)} bytes are too few")
        magic, version, self.job, buckets, size, check = _FIXED.unpack_from(memory)
        if magic != MAGIC or check != xxh3_64_intdigest(memory[: _FIXED.size - 8]):
            raise BadRing("its header is not that of a ring")
        if version != VERSION:
            raise BadRing(f"it is of version {version}, and this is version {VERSION}")
        if job is not None and job != self.job:
            raise BadRing("it belongs to another job")
        self._start = HEADER + (buckets + 1) * _BUCKET
        self._end = self._start + size
        if self._end > len(memory):
            raise BadRing("it is cut short")
        self._memory, self._lock = memory, lock
        self._words = memoryview(memory).cast("Q")
        self._buckets, self.size = buckets, size
        self.most = (size // 8 - _ENTRY.size) // 4
        """The most ids that an entry may have."""
        self.skipped = 0

    # -- reading ---------------------------------------------------------------------------------------------

    def get(self, keys: Sequence[bytes]) -> list[np.ndarray | None]:
        """The ids of each key, int32, read-only and their own copy; None where they are not here."""
        out = [None if body is None else np.frombuffer(body, _IDS, -1, 24) for body in map(self._find, keys)]
        words = self._words
        if self._lock is not None and words[_HEAD] - words[_TAIL] > self.size // 8 * 7:
            self._second_chance(keys, out, words[_TAIL] + self.size // 4)
        return out

    def has(self, key: bytes) -> bool:
        """Whether a slot names an entry of this key. It may have been damaged, or go the next moment."""
        return self._place(key) != 0

    def _find(self, key: bytes) -> bytes | None:
        """A copy of a whole entry from the number of ids on: that number, the key, the ids."""
        memory, words, tag = self._memory, self._words, key[8:]
        bucket = int.from_bytes(key[:8], "little") % self._buckets * _BUCKET + HEADER
        end = bucket + _TWO.size
        at = memory.find(tag, bucket, end)
        while at >= 0:
            if not at & 15 and (place := words[(at >> 3) + 1]):
                start = place % self.size + self._start
                tokens = words[(start >> 3) + 1]
                stop = start + 32 + 4 * tokens
                if tokens <= self.most and stop <= self._end:
                    body = memory[start + 8 : stop]
                    if xxh3_64_intdigest(body) == words[start >> 3] and body.startswith(key, 8):
                        return body
            at = memory.find(tag, at + 1, end)
        return None

    def _bucket(self, key: bytes) -> int:
        return HEADER + int.from_bytes(key[:8], "little") % self._buckets * _BUCKET

    def state(self) -> State:
        """As a writer left it last, or is just writing it: numbers to show."""
        return State(*_STATE.unpack_from(self._memory, _STATE_AT))

    @property
    def bytes(self) -> int:
        """Of the ring, from the oldest entry to the newest."""
        state = self.state()
        return max(state.head - state.tail, 0)

    def _second_chance(self, keys: Sequence[bytes], found: Sequence[np.ndarray | None], old: int) -> None:
        """Entries that are used while they are among the next quarter to go are written again, if the ring is nearly
        full. Readers leave no marks, so writers do it."""
        if again := [(k, ids) for k, ids in zip(keys, found, strict=True) if ids is not None and self._place(k) < old]:
            self._write(again, again=True)

    def _place(self, key: bytes) -> int:
        """Of its entry; 0 if there is none."""
        bucket, tag = self._bucket(key), key[8:]
        at = self._memory.find(tag, bucket, bucket + _TWO.size)
        while at >= 0:
            if not at & 15 and (place := self._words[(at >> 3) + 1]):
                return place
            at = self._memory.find(tag, at + 1, bucket + _TWO.size)
        return 0

    # -- writing ---------------------------------------------------------------------------------------------

    def put(self, items: Sequence[Item]) -> int:
        """Keep these, in place of what their keys named before. Returns how many entries had to go for them.

        What is there already is not written again. An entry of more than `most` ids is not kept.
        """
        return self._write(items, again=False)

    def _write(self, items: Sequence[Item], *, again: bool) -> int:
        if self._lock is None:
            raise PermissionError("this ring was opened for reading")
        with self._lock() as got:
            if not got:
                self.skipped += len(items)
                return 0
            state = self.state()
            if state.writing or not 0 <= state.head - state.tail <= self.size or state.tail < self.size:
                self._count_again(state)
            words, before = self._words, state.evictions
            words[_MARK] = 1
            for key, ids in items:
                self._append(state, key, ids, again)
            # Word by word: a copy of several words could end in the middle, with the process.
            words[_HEAD], words[_TAIL] = state.head, state.tail
            words[_ENTRIES], words[_EVICTIONS] = state.entries, state.evictions
            words[_MARK] = 0
            return state.evictions - before

    def _append(self, state: State, key: bytes, ids: np.ndarray, again: bool) -> None:
        if len(key) != KEY_BYTES:
            raise ValueError(f"a key has {KEY_BYTES} bytes; got {len(key)}")
        tokens = len(ids)
        if tokens > self.most:
            return
        body = tokens.to_bytes(8, sys.byteorder) + key + np.ascontiguousarray(ids, np.int32).tobytes()
        if not again and self._find(key) == body:
            return
        size, place = entry_bytes(tokens), state.head
        left = self.size - place % self.size
        if size > left:
            self._make_room(state, place + left)
            self._words[(self._start + place % self.size >> 3) + 1] = _PAD
            place += left
        self._make_room(state, place + size)
        at = self._start + place % self.size
        self._memory[at : at + 8 + len(body)] = xxh3_64_intdigest(body).to_bytes(8, sys.byteorder) + body
        self._point(state, key, place)
        state.head = place + size

    def _make_room(self, state: State, head: int) -> None:
        """Let entries go from the oldest on, until the ring may be written up to the place `head`."""
        while state.tail < head - self.size:
            offset = state.tail % self.size
            at = self._start + offset
            tokens = self._words[(at >> 3) + 1]
            if tokens == _PAD:
                state.tail += self.size - offset
                continue
            if tokens > self.most or offset + entry_bytes(tokens) > self.size:  # damaged: where does the next begin?
                self._count_again(state, oldest=head - self.size)
                return
            self._forget(state, self._memory[at + 16 : at + 32])
            state.tail += entry_bytes(tokens)

    def _forget(self, state: State, key: bytes) -> None:
        """Free the slot that names the entry at the tail; an entry that was written again has none."""
        bucket = self._bucket(key)
        slots = _TWO.unpack_from(self._memory, bucket)
        if state.tail in slots[1::2]:
            at = bucket + slots[1::2].index(state.tail) * _SLOT
            self._words[(at >> 3) + 1] = 0
            state.entries -= 1
            state.evictions += 1

    def _point(self, state: State, key: bytes, place: int) -> None:
        """The slot of this key, a free one of the emptier bucket, or that of the oldest entry of both."""
        bucket = self._bucket(key)
        slots = _TWO.unpack_from(self._memory, bucket)
        tags, places = slots[::2], slots[1::2]
        tag = key[8:]
        slot = next((i for i in range(2 * _SLOTS) if tags[i] == tag and places[i]), None)
        if slot is None:
            first, second = places[:_SLOTS].count(0), places[_SLOTS:].count(0)
            if first or second:
                slot = places.index(0) if first >= second else _SLOTS + places[_SLOTS:].index(0)
                state.entries += 1
            else:
                slot = places.index(min(places))
                state.evictions += 1
        at = bucket + slot * _SLOT >> 3
        self._words[at + 1] = 0  # the slot is free until its tag is whole
        self._words[at] = int.from_bytes(tag, sys.byteorder)
        self._words[at + 1] = place

    def _count_again(self, state: State, oldest: int = 0) -> None:
        """What the index names and the ring still holds decides; entries from `state.head` on were not finished."""
        if state.head < self.size:
            state.head = self.size
        slots = np.frombuffer(self._memory, np.uint64, count=(self._buckets + 1) * _SLOTS * 2, offset=HEADER).reshape(
            -1, 2
        )
        places = slots[:, 1]
        oldest = max(oldest, state.head - self.size, self.size)
        good = (places >= oldest) & (places < state.head)
        live = places[good]
        places[~good] = 0
        gone = max(state.entries - len(live), 0) if oldest else 0
        state.entries, state.evictions = len(live), state.evictions + gone
        state.tail = int(live.min()) if len(live) else state.head
