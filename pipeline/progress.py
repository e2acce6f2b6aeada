"""Who is at work in a run, on which rows, and whether it gets on: told where others can see it.

The board is a table in memory without a name. The controlling process and the processes of stages write into it; the
watchdog, a process of its own, reads it, even where Python does not answer any more. A second piece of such memory
takes the stacks that faulthandler writes when the watchdog asks for them.

Without a board, as in a script that uses a Program alone, everything here does nothing.
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

ASK_FOR_STACKS = signal.SIGUSR2
"""On this signal a process of ours writes the Python stack of each of its threads, whatever it is doing."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""They ask a run to end."""
ECHO_S = 0.1
"""One wish may come as two signals: timeout(1), for one, sends it to its program and then to the whole group."""

_HEAD = struct.Struct("QQQ")  # number of lines, phase, whether the run is doomed
_LINE = struct.Struct("64s16sQQdqqQQ")  # as the fields of Line, without rows
_SIZE = 4096
_MOST_ROWS = (_SIZE - _LINE.size) // 8
_CALL, _ACTIVE, _ROWS, _BEATS = 80, 88, 112, (120, 128)
_U64 = struct.Struct("Q")


class Phase(IntEnum):
    """What a first signal does now: end the run at once, or let something be finished before. Closing: it is ending."""

    at_once = 0
    finishing = 1
    closing = 2


@dataclass(frozen=True, slots=True)
class Line:
    """A node as the board shows it. `began`: of the call under way, in seconds of the monotonic clock. `beats` are two
    counters, of the controlling process and of the stage's own; `rows`: the first ids of `total`."""

    name: str
    method: str
    call: int
    active: bool
    began: float
    step: int
    total: int
    beats: tuple[int, int]
    rows: tuple[int, ...]


class Board:
    """`Board(names)` makes one, `Board(fds=...)` finds that of another process; `fds` may be given to a child."""

    def __init__(self, names: Sequence[str] = (), *, fds: tuple[int, int] | None = None):
        self._side = 1 if fds else 0
        self.fds = fds or (os.memfd_create("headrace-board"), os.memfd_create("headrace-stacks"))
        if not fds:
            os.ftruncate(self.fds[0], _SIZE * (1 + len(names)))
        self._memory = mmap.mmap(self.fds[0], 0)
        if not fds:
            _HEAD.pack_into(self._memory, 0, len(names), Phase.at_once, False)
            for i, name in enumerate(names):
                _LINE.pack_into(self._memory, _SIZE * (1 + i), name.encode()[:64], b"", 0, 0, 0.0, 0, 0, 0, 0)
        self._at = {line.name: _SIZE * (1 + i) for i, line in enumerate(self.lines())}

    @property
    def phase(self) -> Phase:
        return Phase(_HEAD.unpack_from(self._memory, 0)[1])

    @phase.setter
    def phase(self, value: Phase) -> None:
        _U64.pack_into(self._memory, 8, value)

    @property
    def doomed(self) -> bool:
        """Whether the watchdog has decided that the run ends, and will say why."""
        return bool(_HEAD.unpack_from(self._memory, 0)[2])

    def doom(self) -> None:
        _U64.pack_into(self._memory, 16, True)

    def lines(self) -> list[Line]:
        return [self._line(_SIZE * (1 + i)) for i in range(_HEAD.unpack_from(self._memory, 0)[0])]

    def _line(self, at: int) -> Line:
        name, method, call, active, began, step, total, here, there = _LINE.unpack_from(self._memory, at)
        rows = struct.unpack_from(f"{min(total, _MOST_ROWS)}q", self._memory, at + _LINE.size)
        name, method = (b.rstrip(b"\0").decode(errors="replace") for b in (name, method))
        return Line(name, method, call, bool(active), began, step, total, (here, there), rows)

    def begin(self, name: str, method: str, step: int, rows: Sequence[int]) -> None:
        at = self._at[name]
        kept, beats = rows[:_MOST_ROWS], _LINE.unpack_from(self._memory, at)[-2:]
        call = _U64.unpack_from(self._memory, at + _CALL)[0] + 1
        _U64.pack_into(self._memory, at + _ROWS, 0)
        struct.pack_into(f"{len(kept)}q", self._memory, at + _LINE.size, *kept)
        fields = (name.encode()[:64], method.encode()[:16], call, 1, time.monotonic(), step, len(rows), *beats)
        _LINE.pack_into(self._memory, at, *fields)

    def end(self, name: str) -> None:
        _U64.pack_into(self._memory, self._at[name] + _ACTIVE, 0)

    def beat(self, name: str) -> None:
        at = self._at[name] + _BEATS[self._side]
        _U64.pack_into(self._memory, at, _U64.unpack_from(self._memory, at)[0] + 1)

    def has(self, name: str) -> bool:
        return name in self._at

    def take_stacks(self) -> None:
        """From now on this process writes its stacks when it is asked to."""
        faulthandler.register(ASK_FOR_STACKS, file=self.fds[1], all_threads=True)

    def close(self) -> None:
        self._memory.close()
        for fd in self.fds:
            os.close(fd)


_board: Board | None = None
_whole: str | None = None
"""In the process of a stage: its node, which all of its threads work for."""
_thread = threading.local()


@contextlib.contextmanager
def shown(board: Board) -> Iterator[None]:
    """In the controlling process: what happens is shown there."""
    global _board
    _board = board
    board.take_stacks()
    sys.meta_path.insert(0, imports := _Imports())
    try:
        yield
    finally:
        sys.meta_path.remove(imports)
        _board = None
        faulthandler.unregister(ASK_FOR_STACKS)


def join(fds: tuple[int, int]) -> None:
    """In a child: to be called first."""
    global _board
    _board = Board(fds=fds)
    _board.take_stacks()
    sys.meta_path.insert(0, _Imports())


def serve(node: str) -> None:
    """In a child: all it does, it does for this node."""
    global _whole
    _whole = node


def descriptors() -> tuple[int, ...]:
    """What a child needs to `join`."""
    return _board.fds if _board else ()


def set_phase(phase: Phase) -> None:
    if _board:
        _board.phase = phase


@contextlib.contextmanager
def working(node: str, method: str, step: int, rows: Sequence[int] = ()) -> Iterator[None]:
    """This thread works for a node. `rows`: ids of the rows that wait for it."""
    board = _board
    if board is None or not board.has(node):
        yield
        return
    before, _thread.node = getattr(_thread, "node", None), node
    board.begin(node, method, step, rows)
    try:
        yield
    finally:
        board.end(node)
        _thread.node = before


def alive() -> None:
    """The node that this thread works for gets on. To be called now and then in a long call; it costs a microsecond.

    Numbers given to a meter, parts of a stream, and answers of a child process say so by themselves.
    """
    if _board is not None and (node := getattr(_thread, "node", None) or _whole) is not None:
        _board.beat(node)


class _Imports:
    """Finds no module, but a new name is progress: torch has thousands, for which a busy machine takes long."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name not in self._names:
            self._names.add(name)
            alive()
