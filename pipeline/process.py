"""Child processes of our own: killable, gone with their parent, and fed through anonymous shared memory.

A message is a pickle (protocol 5) on a Unix socket; the arrays in it travel out of band in one sealed
memfd, whose descriptor is passed along (SCM_RIGHTS). Such memory has no name: nothing can be left in
/dev/shm, whoever dies when, and no other user can open it. The receiver maps it read-only, without a copy.
Linux only. Both ends are this program; nothing foreign is ever unpickled.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import mmap
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pipeline import progress, redact

_ALIGN = 64
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_PR_SET_PDEATHSIG = 1
_BOOT = "import sys; from pipeline.process import serve; serve(*map(int, sys.argv[2:]))"
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT)


class ChildDied(RuntimeError):
    """The other process is gone; the message says how it ended."""


class RemoteError(RuntimeError):
    """An exception in a child that could not be pickled itself: its type and message. Its traceback is a note."""

    def __str__(self) -> str:
        return str(self.args[0])


def said(error: BaseException) -> str:
    """An exception's type and message, also if it cannot say the latter."""
    if isinstance(error, RemoteError):
        return str(error)
    try:
        return f"{type(error).__name__}: {error}"
    except Exception as e:
        return f"{type(error).__name__}, whose message cannot be shown ({type(e).__name__})"


class Channel:
    """One end of a socket pair that carries Python objects."""

    def __init__(self, sock: socket.socket):
        self._sock, self._wire = sock, Connection(os.dup(sock.fileno()))
        self._lock = threading.Lock()

    def fileno(self) -> int:
        """For select and poll: readable when a message, or the end, has come."""
        return self._sock.fileno()

    def send(self, message: Any) -> None:
        """BrokenPipeError if the other end is gone."""
        buffers: list[pickle.PickleBuffer] = []
        body = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
        views = [b.raw() for b in buffers]
        with self._lock:
            self._wire.send([v.nbytes for v in views])
            self._wire.send_bytes(body)
            if views:
                fd = _memfd(views)
                try:
                    socket.send_fds(self._sock, [b"."], [fd])
                finally:
                    os.close(fd)

    def recv(self, timeout: float | None = None) -> Any:
        """EOFError if the other end is gone, TimeoutError if nothing came within `timeout` seconds."""
        if timeout is not None and not self._wire.poll(timeout):
            raise TimeoutError(f"no message came within {timeout:g} s")
        sizes, body = self._wire.recv(), self._wire.recv_bytes()
        fds = socket.recv_fds(self._sock, 1, 1)[1] if sizes else []
        if len(fds) < bool(sizes):
            raise EOFError("the other process ended in the middle of a message")
        return pickle.loads(body, buffers=_map(fds[0], sizes) if sizes else [])

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits in recv
        self._sock.close()
        self._wire.close()


def _memfd(views: list[memoryview]) -> int:
    fd = os.memfd_create("headrace", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        for v in views:
            os.lseek(fd, -(-os.lseek(fd, 0, os.SEEK_CUR) // _ALIGN) * _ALIGN, os.SEEK_SET)
            rest = v
            while rest.nbytes:
                rest = rest[os.write(fd, rest) :]
        os.ftruncate(fd, max(os.lseek(fd, 0, os.SEEK_CUR), 1))
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)  # a mapping that cannot shrink cannot raise SIGBUS
    except BaseException:
        os.close(fd)
        raise
    return fd


def _map(fd: int, sizes: list[int]) -> list[memoryview]:
    try:
        whole = memoryview(mmap.mmap(fd, 0, prot=mmap.PROT_READ))
    finally:
        os.close(fd)
    out, at = [], 0
    for size in sizes:
        at = -(-at // _ALIGN) * _ALIGN
        out.append(whole[at : at + size])
        at += size
    return out


# The kernel's parent-death signal fires when the *thread* that started the child ends, so all children are
# started by one thread that lives as long as the process.
_spawner = ThreadPoolExecutor(1, thread_name_prefix="spawner")


class Child:
    """A process that builds `target(*args)` and answers calls of its methods, one at a time.

    If this process dies, however it dies, the kernel kills the child; and when the child ends, however it
    ends, everything it has started goes with it (its process group: a program that moves to a session of its
    own escapes). What it prints goes to `log`.
    """

    def __init__(self, target: Callable[..., Any], *args: Any, name: str, log: Path | None = None, threads: int = 1):
        ours, theirs = socket.socketpair()
        self.name = name
        self._channel = Channel(ours)
        self._busy = threading.Lock()
        self._owed = 0  # answers that have not come yet
        self._killed = False
        with theirs, open(log, "ab") if log else contextlib.nullcontext() as out:
            self._process = _spawner.submit(_start, name, theirs.fileno(), out, threads).result()
        try:
            self._ask(target, args)
        except BaseException:
            self.kill()
            raise

    def fileno(self) -> int:
        """For select and poll: readable when `take` has something to give or to raise."""
        return self._channel.fileno()

    @property
    def pid(self) -> int:
        return self._process.pid

    def alive(self) -> bool:
        return not self._killed and self._process.poll() is None

    def wait_ready(self, timeout: float | None = None) -> None:
        """Until the object is built; raises what its construction raised."""
        self._answer(timeout)

    def call(self, method: str, *args: Any, timeout: float | None = None) -> Any:
        """What the method returns, or what it raises. After a TimeoutError, only `kill` and `close` are left."""
        with self._busy:
            self._idle()
            self._ask(method, args)
            return self._answer(timeout)[1]

    def stream(self, method: str, *args: Any) -> Iterator[Any]:
        """Items of a generator method, as they are made. If left early, only `kill` and `close` are left."""
        with self._busy:
            self._idle()
            self._ask(method, args)
            while (answer := self._answer(None))[0] == "item":
                yield answer[1]

    def _idle(self) -> None:
        if self._owed:  # its late answer would be taken for that of the next call
            raise RuntimeError(f"process '{self.name}' still owes an answer to a call that was given up")

    def _ask(self, method: str | Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._owed += 1
        try:
            self._channel.send((method, args))
        except OSError as e:
            raise ChildDied(self._epitaph()) from e

    def post(self, method: str, *args: Any) -> None:
        """Ask without waiting; `take` receives what comes back."""
        self._ask(method, args)

    def take(self, timeout: float | None) -> tuple[str, Any]:
        """The next ('item', x) or ('done', x); TimeoutError, ChildDied, or the child's own exception."""
        return self._answer(timeout)

    def _answer(self, timeout: float | None) -> tuple[str, Any]:
        try:
            kind, value = self._channel.recv(timeout)
        except TimeoutError:
            raise
        except (EOFError, OSError) as e:
            self._owed = 0
            raise ChildDied(self._epitaph()) from e
        self._owed -= kind != "item"
        progress.alive()
        if kind == "error":
            raise value
        return kind, value

    def _epitaph(self) -> str:
        try:
            code = self._process.wait(5)
        except subprocess.TimeoutExpired:
            code = None
        how = f"by signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"with exit code {code}"
        where = "; where it crashed stands in its log" if code is not None and -code in _CRASHES else ""
        return f"process '{self.name}' ended {how}{where}"

    def close(self, method: str, timeout: float) -> None:
        """Call a last method, unless a call is under way or was given up; then end the process in any case.

        Raises what the method raised; that the process is dead, or too slow, is no error here.
        """
        try:
            if self._busy.acquire(blocking=False):
                try:
                    if not self._owed:
                        self._ask(method, ())
                        self._answer(timeout)
                finally:
                    self._busy.release()
        except (ChildDied, TimeoutError):
            pass
        finally:
            self.kill()

    def kill(self) -> None:
        """End the process and its children at once, and reap it. Safe to call twice."""
        if self._killed:
            return  # the number may name another process by now
        self._killed = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._channel.close()


# -P: no folder of the user's comes before the standard library; -u: what is printed survives a kill.
def _start(name: str, fd: int, out: Any, threads: int) -> subprocess.Popen[bytes]:
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path),
        "OMP_NUM_THREADS": str(threads),
    }
    board = progress.descriptors()
    command = [sys.executable, "-P", "-u", "-c", _BOOT, name, *map(str, (fd, os.getpid(), *board))]
    return subprocess.Popen(
        command,
        pass_fds=[fd, *board],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=out,
        start_new_session=True,
    )


def started(pid: int) -> int | None:
    """When a process started, in clock ticks since boot (proc(5), field 22 of stat): numbers come again, pairs do not.

    None if there is no such process, or only a zombie.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies (prctl(2), PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call above
        os._exit(1)


def _kill_group_at_end(fd: int) -> None:
    """Leave a process behind that only waits for the end of this one, then kills the group and so itself.

    The kernel's parent-death signal reaches this process but not what it has started.
    """
    worker = os.getpid()
    if os.fork():
        return
    os.close(fd)  # or the end of the worker would not be seen at the other end
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGUSR1)
    if os.getppid() == worker:
        signal.sigwait({signal.SIGUSR1})
    os.killpg(0, signal.SIGKILL)


def serve(fd: int, parent: int, *board: int) -> None:
    """The main function of a child. `board`: the descriptors of the run's, if it has one."""
    die_with_parent(parent)
    _kill_group_at_end(fd)
    faulthandler.enable()
    redact.guard_streams()
    if board:
        progress.join((board[0], board[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    signal.signal(signal.SIGTERM, _left_to_parent(os.getpid()))  # a cluster sends it to every process of a job
    channel = Channel(socket.socket(fileno=fd))
    try:
        target, args = channel.recv()
        try:
            served = target(*args)
            channel.send(("done", None))
        except BaseException as e:
            channel.send(("error", _portable(e)))
            return
        while True:
            method, args = channel.recv()
            _serve_one(channel, served, method, args)
    except (EOFError, ConnectionError):
        return


def _left_to_parent(pid: int) -> Callable[[int, Any], None]:
    """A handler, which programs that are started do not inherit, for one process: what it forks can be terminated."""

    def handler(number: int, _: Any) -> None:
        if os.getpid() != pid:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    return handler


def _serve_one(channel: Channel, served: Any, method: str, args: tuple[Any, ...]) -> None:
    try:
        value = getattr(served, method)(*args)
        if isinstance(value, Iterator):
            for item in value:
                channel.send(("item", item))
            value = None
        channel.send(("done", value))
    except BaseException as e:  # if it is the channel that broke, this raises again and ends the process
        channel.send(("error", _portable(e)))


def _portable(error: BaseException) -> BaseException:
    """The exception with its traceback as a note, or a stand-in that pickles.

    Only an Exception may go on: what asks a process to end asks this one, and not its parent.
    """
    text = "".join(traceback.format_exception(error))
    sent = error if isinstance(error, Exception) else RemoteError(said(error))
    sent.__traceback__ = None
    sent.add_note(text)
    try:
        if type(pickle.loads(pickle.dumps(sent))) is type(sent):
            return sent
    except Exception:
        pass
    sent = RemoteError(said(error))
    sent.add_note(text)
    return sent
