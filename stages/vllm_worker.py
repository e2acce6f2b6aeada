"""What runs inside vLLM's own processes; the controller never imports vLLM through this module.

vLLM adds `WorkerExtension` to the bases of its worker class (`worker_extension_cls`), so every method here can be
called through `AsyncLLM.collective_rpc`. Importing the module inside vLLM's process starts a watchdog, before the
model loads: when the controller is gone, however it went, so is the engine.
"""

from __future__ import annotations

import atexit
import mmap
import os
import select
import shutil
import signal
import sys
import threading
from multiprocessing import util
from multiprocessing.synchronize import SemLock
from typing import Any

import numpy as np

from pipeline.records import Snapshot
from stages.weights import iterate

CONTROLLER = "HEADRACE_CONTROLLER"
"""Environment: the process id that the engine must not outlive."""
SCRATCH = "HEADRACE_SCRATCH"
"""Environment: the folder of sockets that the controller would remove."""

FLASHINFER = ("top_p_sampling_from_probs", "top_k_sampling_from_probs", "top_k_top_p_sampling_from_logits")
"""Names that vLLM 0.26 and 0.27 look up in `flashinfer.sampling` at every call, in either model runner."""


def _watch(pid: int) -> None:
    try:
        poller = select.poll()
        poller.register(os.pidfd_open(pid), select.POLLIN)  # readable when the process ends
        while not poller.poll():
            pass
    except ProcessLookupError:
        pass  # it died before we looked
    shutil.rmtree(os.environ.get(SCRATCH, ""), ignore_errors=True)
    parent = os.getppid()
    if parent not in (1, pid) and _command(parent).startswith(b"VLLM::EngineCore"):
        os.kill(parent, signal.SIGKILL)  # several workers: the engine's core is between them and the controller
    os.kill(os.getpid(), signal.SIGKILL)


def _command(pid: int) -> bytes:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""


def _leave() -> None:
    """Skip the interpreter's teardown, which collects all of torch and vLLM for seconds after vLLM's own shutdown."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _unlink_semaphores() -> None:
    """Take the names of this process's semaphores (vLLM's and tqdm's locks) out of /dev/shm, now that all who use them
    have opened them. Python does so at an orderly end, or its resource tracker, which a kill may take along.
    """
    for finalizer in list(util._finalizer_registry.values()):  # pyright: ignore[reportAttributeAccessIssue]
        if finalizer._callback is SemLock._cleanup:  # pyright: ignore[reportAttributeAccessIssue]
            finalizer()


def _in_engine() -> bool:
    return os.environ.get(CONTROLLER) not in (None, str(os.getpid()))


if _in_engine():
    threading.Thread(target=_watch, args=(int(os.environ[CONTROLLER]),), name="watchdog", daemon=True).start()
    atexit.register(_leave)


class KernelCounts:
    """Calls of each sampling kernel in this process, counted at the function that launches it.

    The native path is counted too, so that a silent fallback shows.
    """

    def __init__(self, device_type: str) -> None:
        from vllm.v1.sample.ops import topk_topp_sampler

        self.calls: dict[str, int] = {}
        self._inside = False  # one kernel's function may call another's: that is one call
        if device_type == "cuda":
            self._count_cuda()
        self._wrap(topk_topp_sampler, "random_sample", "native.random_sample")

    def _count_cuda(self) -> None:
        import importlib

        try:
            kernels = importlib.import_module("flashinfer.sampling")
        except ImportError:
            kernels = None  # then nothing of it can run, and vLLM says so itself if it was asked for
        for name in FLASHINFER if kernels else ():
            self._wrap(kernels, name, f"flashinfer.{name}")
        second = importlib.import_module("vllm.v1.worker.gpu.sample.sampler")  # the newer model runner's sampler
        self._wrap(second, "gumbel_sample", "native.gumbel_sample")

    def _wrap(self, owner: Any, name: str, key: str) -> None:
        inner = getattr(owner, name)
        self.calls[key] = 0

        def counted(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return inner(*args, **kwargs)
            self.calls[key] += 1
            self._inside = True
            try:
                return inner(*args, **kwargs)
            finally:
                self._inside = False

        setattr(owner, name, counted)


class WorkerExtension:
    """Names start with `headrace_`, since vLLM asserts that its worker has no such attribute."""

    model_runner: Any
    device: Any
    vllm_config: Any

    def headrace_setup(self) -> dict[str, Any]:
        """Once, when the engine is up. Facts about this worker."""
        _unlink_semaphores()
        sampler = getattr(self.model_runner.sampler, "topk_topp_sampler", None)
        if self.device.type == "cpu" and sampler is not None:
            # The CPU path drops the seeds of all rows of a step as soon as one row has none, and compiles C++.
            sampler.forward = sampler.forward_native
        self._headrace_counts = KernelCounts(self.device.type)
        self._headrace_own_scale = self.model_runner.get_model().logits_processor.scale  # Granite's, Cohere's
        runner = type(self.model_runner)
        name = f"{runner.__module__}.{runner.__name__}"
        return {"pid": os.getpid(), "device": self.device.type, "model_runner": name}

    def headrace_kernel_counts(self) -> dict[str, int]:
        return dict(self._headrace_counts.calls)

    def headrace_scale_logits(self, scale: float) -> None:
        """Multiply all logits by `scale` before anything else sees them.

        With scale 1/T and requests at temperature 1, vLLM's raw log-probs are those at T before filters, on every
        device and with every sampler.
        """
        self.model_runner.get_model().logits_processor.scale = self._headrace_own_scale * scale

    def headrace_load_weights(self, path: str, manifest: tuple[Any, ...], version: int) -> int:
        """Overwrite the weights of the running model from the bytes at `path`; how many tensors were read."""
        from vllm.config import set_current_vllm_config

        with open(path, "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        entries = tuple((name, dtype, tuple(shape), start, stop) for name, dtype, shape, start, stop in manifest)
        snapshot = Snapshot(version=version, manifest=entries, data=np.frombuffer(mapped, np.uint8))
        with set_current_vllm_config(self.vllm_config):
            self.model_runner.reload_weights(weights_iterator=iterate(snapshot))
            self._headrace_tie()
        return len(entries)

    def _headrace_tie(self) -> None:
        """`reload_weights` leaves a tied lm_head stale: on CPU it keeps a packed copy of the old weight."""
        model = self.model_runner.get_model()
        if not getattr(model.config, "tie_word_embeddings", False):
            return
        head, embedding = model.lm_head, model.model.embed_tokens
        if head is not embedding:
            head.weight = embedding.weight
            head.quant_method.process_weights_after_loading(head)
