"""vLLM behind a synchronous, streaming interface: token ids in, responses out as they finish.

    controller          caller's thread --queue-- loop thread
    vLLM's process                                   ==zmq== EngineCore with the worker (stages/vllm_worker.py)

Written for vllm 0.26 and 0.27, whose names agree. Nothing of vLLM is imported before `open`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import queue
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from multiprocessing import resource_tracker
from typing import Any, TypeVar

import numpy as np

from pipeline.progress import alive
from pipeline.records import Snapshot
from stages.vllm_worker import CONTROLLER, SCRATCH

T = TypeVar("T")
STOP_S = 30.0


@dataclass(frozen=True, slots=True)
class Request:
    """One row: prompt token ids int32 [P], and a seed below 2^63 or None."""

    prompt: np.ndarray
    seed: int | None


@dataclass(frozen=True, slots=True)
class Response:
    """`index`: place of the request in its batch. `ids` int64 [T] as sampled, the end token included. `log_probs`
    float32 [T] of the logits as scaled, before filters. `error`: why there is no response, else empty."""

    index: int
    ids: np.ndarray
    log_probs: np.ndarray
    stopped: bool
    version_min: int
    version_max: int
    error: str = ""


class EngineError(RuntimeError):
    """The engine died, does not answer, or does not do what it was told."""


ENVIRONMENT = {
    # Offline: without it vLLM opens a UDP socket to a public address to learn its own.
    "VLLM_HOST_IP": "127.0.0.1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # never forked from a process with threads
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


@contextlib.contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Variables for vLLM's processes. Ours are put back, with Python's random state: vLLM writes LD_PRELOAD and more
    into them, and draws from the global generator."""
    before, state = dict(os.environ), random.getstate()
    os.environ.update(changes)
    try:
        yield
    finally:
        random.setstate(state)
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)


def _socket_folder() -> str | None:
    """Where vLLM's sockets may lie: the folder for temporary files, or /tmp if its name is too long for a socket's
    path, which has 107 bytes at most; vLLM's own part takes 36."""
    return None if len(tempfile.gettempdir().encode()) <= 45 else "/tmp"


class Engine:
    """One AsyncLLM on an event loop of its own. Weights may be pushed while responses stream."""

    def __init__(self, arguments: Mapping[str, Any], environment: Mapping[str, str], silence_s: float):
        self._arguments, self._changes, self._silence_s = dict(arguments), dict(environment), silence_s
        self.version = 0
        self._llm: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._names = itertools.count()
        self._scratch = ""
        self._scale = 1.0

    # -- life ------------------------------------------------------------------------------------------------

    def open(self, start_s: float) -> dict[str, Any]:
        """Start the engine; facts about its worker."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-loop", daemon=True)
        self._thread.start()
        self._scratch = tempfile.mkdtemp(prefix="headrace-", dir=_socket_folder())  # 0700
        own = {
            "VLLM_RPC_BASE_PATH": self._scratch,
            SCRATCH: self._scratch,
            CONTROLLER: str(os.getpid()),
            "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path),
        }
        try:
            with _environment(ENVIRONMENT | own | self._changes):
                self._llm = self._call(self._start(), start_s, patient=True)
            facts = self._rpc("headrace_setup")[0]
            shutil.rmtree(self._scratch)  # all are connected: the sockets live on without names that a kill would leave
            return facts
        except BaseException:
            self.close()
            raise

    async def _start(self) -> Any:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.executor.uniproc_executor import UniProcExecutor

        logging.getLogger("vllm").setLevel(logging.ERROR)
        # Ctrl-C goes to every process of a terminal; when the engine ends is for this one to say. What this thread
        # starts inherits its mask, and the resource tracker would unblock the signal if it started later.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        # On CPU vLLM turns the name "uni" into "mp", one more process; the class it leaves alone.
        return AsyncLLM.from_engine_args(
            AsyncEngineArgs(**self._arguments, distributed_executor_backend=UniProcExecutor)
        )

    def close(self) -> None:
        """Stop the engine. Safe to call twice, and after a failed `open`."""
        llm, self._llm = self._llm, None
        loop, self._loop = self._loop, None
        if loop is not None and self._thread is not None:
            if llm is not None:
                with contextlib.suppress(TimeoutError):
                    asyncio.run_coroutine_threadsafe(self._stop(llm), loop).result(STOP_S)
            loop.call_soon_threadsafe(loop.stop)
            self._thread.join(STOP_S)
            if not self._thread.is_alive():
                loop.close()
        if self._scratch:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = ""

    async def _stop(self, llm: Any) -> None:
        mine = asyncio.current_task()
        rows = [t for t in asyncio.all_tasks() if t is not mine and t.get_name().startswith("row-")]
        for task in rows:
            task.cancel()
        await asyncio.gather(*rows, return_exceptions=True)
        if llm.output_handler is not None:  # or it reports the planned end as a dead engine
            llm.output_handler.cancel()
        await asyncio.to_thread(llm.shutdown, 5.0)
        rest = [t for t in asyncio.all_tasks() if t is not mine]
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    # -- generation ------------------------------------------------------------------------------------------

    def stream(
        self, requests: Sequence[Request], sampling: Mapping[str, Any], scale: float
    ) -> Iterator[list[Response]]:
        """Responses when they are finished, those of the same moment together. Leaving early aborts the rest.

        `sampling`: arguments of vLLM's SamplingParams, all that decide the distribution; `scale`: factor on the logits.
        EngineError if the engine dies, or is silent for too long.
        """
        if scale != self._scale:
            self._rpc("headrace_scale_logits", scale)
            self._scale = scale
        done: queue.SimpleQueue[Response | BaseException] = queue.SimpleQueue()
        tasks = self._call(self._submit(requests, sampling, done), self._silence_s)
        try:
            missing = len(requests)
            while missing:
                finished = self._finished(done)
                alive()
                missing -= len(finished)
                yield finished
        finally:
            self._cancel(tasks)

    def _finished(self, done: queue.SimpleQueue[Response | BaseException]) -> list[Response]:
        """All that wait in the queue, at least one."""
        try:
            items = [done.get(timeout=self._silence_s)]
        except queue.Empty:
            raise EngineError(f"vLLM finished no response for {self._silence_s:g} s") from None
        with contextlib.suppress(queue.Empty):
            while True:
                items.append(done.get_nowait())
        for item in items:
            if isinstance(item, BaseException):
                raise EngineError(f"{type(item).__name__}: {item}") from item
        return [item for item in items if isinstance(item, Response)]

    async def _submit(
        self, requests: Sequence[Request], sampling: Mapping[str, Any], done: queue.SimpleQueue[Any]
    ) -> list[asyncio.Task[None]]:
        batch = next(self._names)
        return [
            asyncio.create_task(self._row(f"{batch}-{i}", i, r, sampling, done), name=f"row-{batch}-{i}")
            for i, r in enumerate(requests)
        ]

    async def _row(
        self, name: str, index: int, request: Request, sampling: Mapping[str, Any], done: queue.SimpleQueue[Any]
    ) -> None:
        from vllm import SamplingParams
        from vllm.v1.engine.exceptions import EngineDeadError

        first, nothing = self.version, np.empty(0)
        try:
            params = SamplingParams(**sampling, seed=request.seed)
            prompt = {"prompt_token_ids": request.prompt.tolist()}
            async for final in self._llm.generate(prompt, params, request_id=name):  # one item: FINAL_ONLY
                done.put(self._response(index, final.outputs[0], first))
        except asyncio.CancelledError:
            raise
        except (EngineDeadError, EngineError) as e:  # raised again in the caller's thread
            done.put(e)
        except Exception as e:  # this request cannot be served; others can
            error = f"vLLM refused the request: {type(e).__name__}: {e}"
            done.put(Response(index, nothing, nothing, False, first, self.version, error))

    def _response(self, index: int, out: Any, first: int) -> Response:
        ids = np.asarray(out.token_ids, np.int64)
        log_probs = np.asarray(out.logprobs.logprobs, np.float32)
        if not np.array_equal(np.asarray(out.logprobs.token_ids, np.int64), ids):
            raise EngineError(f"log-probs of tokens {list(out.logprobs.token_ids)} for response {ids.tolist()}")
        error = "" if out.finish_reason in ("stop", "length") else f"vLLM ended the request: {out.finish_reason}"
        if not error and not np.isfinite(log_probs).all():
            error = "the policy gave no finite log-prob"
        return Response(index, ids, log_probs, out.finish_reason == "stop", first, self.version, error)

    def _cancel(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        if self._loop is None or all(t.done() for t in tasks):
            return

        async def cancel() -> None:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self._call(cancel(), STOP_S)

    # -- weights and questions -------------------------------------------------------------------------------

    def push(self, snapshot: Snapshot) -> None:
        """New weights; returns when the engine has them. Requests in flight go on with them: paused in mode `keep`,
        nothing is aborted, and every key and value is computed anew.

        The bytes lie in memory without a name, which vLLM's process opens through this process's descriptor.
        """
        fd = os.memfd_create("headrace-weights", os.MFD_CLOEXEC)
        try:
            rest: memoryview = snapshot.data.data
            while rest.nbytes:
                rest = rest[os.write(fd, rest) :]
            self._call(self._push(f"/proc/{os.getpid()}/fd/{fd}", snapshot), self._silence_s)
        finally:
            os.close(fd)

    async def _push(self, path: str, snapshot: Snapshot) -> None:
        await self._llm.pause_generation(mode="keep", clear_cache=True)
        try:
            arguments = (path, snapshot.manifest, snapshot.version)
            loaded = await self._llm.collective_rpc("headrace_load_weights", args=arguments)
            if any(count != len(snapshot.manifest) for count in loaded):
                raise EngineError(f"pushed {len(snapshot.manifest)} tensors, the workers read {loaded}")
            if not await self._llm.reset_prefix_cache(reset_running_requests=True):
                raise EngineError("vLLM could not empty its prefix cache after a push")
            self.version = snapshot.version
        finally:
            await self._llm.resume_generation()

    def kernel_counts(self) -> dict[str, int]:
        """Calls of each sampling kernel since `open`, over all workers."""
        total: dict[str, int] = {}
        for worker in self._rpc("headrace_kernel_counts"):
            for name, calls in worker.items():
                total[name] = total.get(name, 0) + calls
        return total

    def _rpc(self, method: str, *args: Any) -> list[Any]:
        return self._call(self._llm.collective_rpc(method, args=args), self._silence_s)

    def _call(self, coroutine: Coroutine[Any, Any, T], timeout: float, *, patient: bool = False) -> T:
        """`patient`: only `timeout` counts, and not how long a stage may be silent (run.stall_s)."""
        if self._loop is None:
            coroutine.close()
            raise EngineError("the engine is not open")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        deadline = time.monotonic() + timeout
        try:
            while patient and time.monotonic() < deadline and not wait([future], 1.0).done:
                alive()
            return future.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            future.cancel()
            raise EngineError(f"vLLM gave no answer within {timeout:g} s (settings start_s and silence_s)") from None
