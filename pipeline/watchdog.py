"""The controlling process's side of the watchdog: starts it, feeds it, and takes its word that a node is stuck."""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from pipeline import progress
from pipeline.errors import StageError
from pipeline.progress import Board
from pipeline.stopping import Stopping
from pipeline.watcher import END_S, RUNNER, Orders, start_line

log = logging.getLogger("headrace")

TRACKER = "tracker"
VERDICT_S = 10.0
"""Seconds that the watchdog may take to gather stacks."""
GONE = "the process of the watchdog has ended; the run goes on, but nobody sees it if a node makes no progress"


@contextlib.contextmanager
def watched(
    nodes: Sequence[str], stop: Stopping, stall_s: float, run_dir: Path, end_s: float = END_S
) -> Iterator[None]:
    """What the nodes do meanwhile is watched. To be called in the main thread, within `stop.listening()`.

    A node without progress for `stall_s` seconds (0: never mind) is told to `stop`; a controlling process that cannot
    hear is ended with status 1, or by SIGKILL where it ignores SIGHUP.
    """
    board = Board([*nodes, TRACKER, RUNNER])
    ours, theirs = socket.socketpair()
    heard, wake = socket.socketpair()
    wake.setblocking(False)
    with ours, theirs, heard, wake:
        orders = Orders(
            controller=os.getpid(),
            stall_s=stall_s,
            control=theirs.fileno(),
            wake=heard.fileno(),
            board=(board.fds[0], board.fds[1]),
            log=str(run_dir / "run.log"),
            end_s=end_s,
        )
        fds = (orders.control, orders.wake, *board.fds)
        watcher = subprocess.Popen(
            start_line(orders), pass_fds=fds, stdin=subprocess.DEVNULL, start_new_session=True, close_fds=True
        )
        theirs.close()  # but not `heard`: if the watchdog is gone, signals come to nobody, and that is no error
        ending = threading.Event()
        listener = threading.Thread(target=_listen, args=(ours, stop, ending), name="watchdog", daemon=True)
        listener.start()
        before = signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        try:
            with progress.shown(board), _ends_on_hangup():
                yield
        finally:
            signal.set_wakeup_fd(before)
            if board.doomed:  # the node has got on after all, but a verdict is a verdict
                listener.join(VERDICT_S)
                _end_within(end_s)
            ending.set()
            with contextlib.suppress(OSError):
                ours.shutdown(socket.SHUT_RDWR)
            listener.join()
            watcher.kill()
            watcher.wait()
    board.close()


def _end_within(seconds: float) -> None:
    """End this process with status 1 then, also if its last words go into a pipe that nobody reads. That may be why
    the node was stuck."""
    timer = threading.Timer(seconds, os._exit, [1])
    timer.daemon = True
    timer.start()


def _listen(control: socket.socket, stop: Stopping, ending: threading.Event) -> None:
    received = b""
    while not received.endswith(b"\n"):
        try:
            piece = control.recv(2**16)
        except OSError:
            piece = b""
        if not piece:
            if not ending.is_set():
                log.warning(GONE)
                print(f"\n{GONE}", file=sys.stderr)
            return
        received += piece
    report = json.loads(received)
    stop.stall(StageError(report["node"], report["step"], report["what"], report["rows"], report["detail"]))
    with contextlib.suppress(OSError):
        control.sendall(b"!")


@contextlib.contextmanager
def _ends_on_hangup() -> Iterator[None]:
    """Let SIGHUP end this process with status 1, whatever its interpreter does: the kernel calls `_exit` with the
    number of the signal, which is 1. Nothing is changed where it is ignored (nohup) or has a handler."""
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL:
        yield
        return
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    libc.signal(signal.SIGHUP, ctypes.cast(libc._exit, ctypes.c_void_p))
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
