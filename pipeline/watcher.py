"""The watchdog's own process: it reads the board, and ends a run that does not get on or does not end.

It computes nothing and holds no lock of the run's, so it works where Python in the run does not: a thread that loops in
C with the interpreter's lock, a stage that was stopped by SIGSTOP. It ends when the controlling process is gone.
Imported by nothing but its own `main`; only the standard library, so that it starts in 30 ms.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import socket
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pipeline import redact
from pipeline.errors import StageError
from pipeline.progress import ASK_FOR_STACKS, ECHO_S, SIGNALS, Board, Line, Phase
from pipeline.usage import family

ACK_S = 2.0
"""Within which the controlling process says that it has the report; else its interpreter hangs."""
END_S = 30.0
"""Within which the run must have ended then; also after a signal that ends it at once."""
STACK_S = 2.0
"""Within which a process must have written its stack."""
RUNNER = "runner"


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """`stall_s`: 0 is never. `log`: where to write what the controlling process cannot. `end_s`: how long it may take
    to end when it must."""

    controller: int
    stall_s: float
    control: int
    wake: int
    board: tuple[int, int]
    log: str
    end_s: float = END_S


@dataclass(slots=True)
class Idle:
    """How long a line of the board has not changed."""

    last: tuple[Any, ...] = ()
    seconds: float = 0.0


@dataclass(slots=True)
class Watch:
    orders: Orders
    board: Board
    idle: dict[str, Idle] = field(default_factory=dict)
    signals: int = 0
    last_signal: float = -math.inf
    end_by: float | None = None

    def run(self) -> None:
        tick = min(1.0, max(0.05, self.orders.stall_s / 10)) if self.orders.stall_s else 1.0
        last = time.monotonic()
        while not self._gone(tick):
            stopped = _state(self.orders.controller) in "Tt"  # Ctrl-Z, a suspended job, a debugger
            lines, now = self.board.lines(), time.monotonic()
            passed, last = min(now - last, 2 * tick), now  # a machine that slept has not waited
            if stopped:
                continue
            if self.end_by is not None and now > self.end_by:
                self._end_by_force()
                return
            if self.orders.stall_s and (stuck := self._stuck(lines, passed)):
                self._stalled(*stuck)
                return

    def _gone(self, seconds: float) -> bool:
        """Whether the controlling process has ended; waits so long for it, and for signals to it."""
        ready, _, _ = select.select([self.orders.control, self.orders.wake], [], [], seconds)
        if self.orders.wake in ready and not {*os.read(self.orders.wake, 64)}.isdisjoint(SIGNALS):  # alarms come, too
            before, self.last_signal = self.last_signal, time.monotonic()
            self.signals += self.last_signal - before >= ECHO_S
            if self.signals > 1 or self.board.phase is Phase.at_once:
                self.end_by = self.end_by or time.monotonic() + self.orders.end_s
        ended = self.orders.control in ready and not os.read(self.orders.control, 64)
        return ended or os.getppid() != self.orders.controller

    # -- who is stuck --------------------------------------------------------------------------------------------

    def _stuck(self, lines: list[Line], passed: float) -> tuple[Line, float] | None:
        """The line of a call that has made no progress for `stall_s`; the runner's if nobody is in a call."""
        found: list[tuple[Line, float]] = []
        for line in lines:
            told = (line.call, line.active, line.beats)
            idle = self.idle.setdefault(line.name, Idle(told))
            idle.seconds = 0.0 if idle.last != told else idle.seconds + passed
            idle.last = told
            if idle.seconds > self.orders.stall_s and (line.active or line.name == RUNNER):
                found.append((line, idle.seconds))
        least = min((self.idle[line.name].seconds for line in lines), default=0.0)
        if least <= self.orders.stall_s:  # somebody gets on
            found = [f for f in found if f[0].active]
        found.sort(key=lambda f: (not f[0].active, -f[1]))
        return found[0] if found else None

    # -- and what becomes of it ----------------------------------------------------------------------------------

    def _stalled(self, line: Line, seconds: float) -> None:
        self.board.doom()
        spent = time.monotonic() - line.began
        told = f", in '{line.method}' for {spent:.1f} s" if line.active else ", and no node is at work"
        what = f"stalled: no progress for {seconds:.1f} s (run.stall_s={self.orders.stall_s:g}){told}"
        if line.total and line.active:
            what += f"; {line.total} rows wait for it"
        members = self._members()
        detail = self._stacks(members)
        report = {"node": line.name, "step": line.step, "rows": line.rows, "what": what, "detail": detail}
        if (self._tell(json.dumps(report).encode() + b"\n") and self._wait(self.orders.end_s)) or self._gone(0):
            return
        self._write(str(StageError(line.name, line.step, what, line.rows)), detail)
        self._kill(members)

    def _members(self) -> list[int]:
        """The processes of the run, the controlling one first."""
        return [pid for pid in family(self.orders.controller) if pid != os.getpid()]

    def _stacks(self, members: list[int]) -> str:
        return "\n".join(["Every process of the run:", *(self._stack(pid) for pid in members if not _waits_only(pid))])

    def _tell(self, report: bytes) -> bool:
        """Whether the controlling process has taken it."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.orders.control)) as control:
            control.settimeout(ACK_S)
            control.sendall(report)
            return control.recv(1) != b""
        return False

    def _wait(self, seconds: float) -> bool:
        """Whether the controlling process ends within this time."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self._gone(0.1):
                return True
        return False

    def _end_by_force(self) -> None:
        members = self._members()
        what = f"the run was stopped and did not end within {self.orders.end_s:g} s; it is killed"
        self._write(what, self._stacks(members))
        self._kill(members)

    def _write(self, what: str, detail: str) -> None:
        """In the place of a controlling process that cannot."""
        try:
            with open(os.open(self.orders.log, os.O_WRONLY | os.O_APPEND), "w") as log:
                log.write(redact.text(f"{what}\n{detail}\n"))
            where = f"The stacks are in {self.orders.log}"
        except OSError:
            where = detail
        print(redact.text(f"\n{what}\n{where}"), file=sys.stderr, flush=True)

    def _kill(self, members: list[int]) -> None:
        """First the controlling process: on SIGHUP it ends with status 1, unless it ignores that (nohup)."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.orders.controller, signal.SIGHUP)
        if not self._wait(1.0):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.orders.controller, signal.SIGKILL)
        for pid in members[1:]:
            if _state(pid) not in "?ZX":
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)

    # -- stacks --------------------------------------------------------------------------------------------------

    def _stack(self, pid: int) -> str:
        """What a process is, how it stands, and its Python stack if it is one of ours."""
        state, name = _state(pid), _name(pid)
        wait = _read(pid, "wchan").strip("0")
        head = f"--- process {pid}: {name} ({_STATES.get(state, state)}{wait and f'; waits in {wait}'})"
        if not _writes_stacks(pid):
            return f"{head}\nno Python stack: the process is not one of Headrace's own"
        before = os.fstat(self.orders.board[1]).st_size
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, ASK_FOR_STACKS)
            if state == "T":  # it writes its stack when it goes on, and shall do no more than that
                os.kill(pid, signal.SIGCONT)
        deadline, size = time.monotonic() + STACK_S, before
        while time.monotonic() < deadline:
            time.sleep(0.02)
            now = os.fstat(self.orders.board[1]).st_size
            if now == size > before:
                break
            size = now
        if state == "T":
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        text = os.pread(self.orders.board[1], size - before, before).decode(errors="replace").strip()
        return f"{head}\n{text or f'no Python stack came within {STACK_S:g} s'}"


_STATES = {
    "R": "runs",
    "S": "sleeps",
    "D": "waits for a device and cannot be interrupted",
    "T": "was stopped by a signal",
    "t": "is held by a debugger",
    "Z": "has ended",
    "X": "has ended",
    "?": "has ended",
}


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except OSError:
        return ""


def _state(pid: int) -> str:
    """Of a process (proc(5), field 3 of stat); '?' if there is none."""
    return (_read(pid, "stat").rpartition(")")[2].split() or ["?"])[0]


def _name(pid: int) -> str:
    if pid == os.getppid():
        return "the controlling process"
    command = _read(pid, "cmdline").rstrip("\0").split("\0")
    if _ours(command):
        return f"'{command[command.index('-c') + 2]}'"
    return redact.text(" ".join(command))[:200] or _read(pid, "comm").strip()


def _ours(command: list[str]) -> bool:
    return "-c" in command and "from pipeline.process import serve" in " ".join(command)


def _writes_stacks(pid: int) -> bool:
    """Whether it is a process of ours that handles the signal (proc(5), SigCgt) and does not block it (SigBlk)."""
    if pid != os.getppid() and not _ours(_read(pid, "cmdline").split("\0")):
        return False
    return _has(pid, "SigCgt") and not _has(pid, "SigBlk")


def _waits_only(pid: int) -> bool:
    """The helper of a child that ends what the child has started: it blocks every signal."""
    return _ours(_read(pid, "cmdline").split("\0")) and _has(pid, "SigBlk")


def _has(pid: int, mask: str) -> bool:
    """Whether the signal is in a mask of the process."""
    masks = dict(line.split(":\t") for line in _read(pid, "status").splitlines() if line.startswith("Sig"))
    return bool(int(masks.get(mask, "0"), 16) & 1 << (ASK_FOR_STACKS - 1))


def main(orders: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    given = json.loads(orders)
    given["board"] = tuple(given["board"])
    made = Orders(**given)
    with contextlib.suppress(KeyboardInterrupt):
        Watch(made, Board(fds=made.board)).run()


def start_line(orders: Orders) -> list[str]:
    """The command of this program."""
    root = str(Path(__file__).resolve().parents[1])
    boot = f"import sys; sys.path.insert(0, {root!r}); from pipeline.watcher import main; main(sys.argv[1])"
    return [sys.executable, "-S", "-P", "-c", boot, json.dumps(asdict(orders))]
