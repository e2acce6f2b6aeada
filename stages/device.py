"""From arrays on the host to a device: one buffer, one copy, and nobody waits for it.

A batch for a model is several small arrays. Each `to("cuda")` of ordinary memory makes the processor wait for the
device, once an array. Here the arrays of a batch are laid side by side in one page-locked buffer, filled in place,
and sent by a single asynchronous copy on a stream of its own, which runs while the device still computes on what
came before. Only what uses the tensors waits for the copy, and it waits on the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from pipeline.progress import alive

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

_ALIGN = 64


class Parcel:
    """Arrays that travel together: `Parcel("cuda", ids=((4, 9), np.int64))`. Fill `parcel.host["ids"]` (zeros at
    first), `parcel.send()`, and take the tensors of the same names with `parcel.receive()`.

    On a CPU nothing is copied: the tensors are the host's arrays. The page-locked buffer is PyTorch's, whose host
    allocator gives it to another only when the copies from it are done, so a parcel may be dropped at once.
    """

    def __init__(self, device: Any, **arrays: tuple[tuple[int, ...], Any]):
        import torch

        self.device = torch.device(device)
        self._at: dict[str, tuple[int, int]] = {}
        end = 0
        for name, (shape, dtype) in arrays.items():
            start = -(-end // _ALIGN) * _ALIGN
            end = start + math.prod(shape) * np.dtype(dtype).itemsize
            self._at[name] = (start, end)
        self._here = self._there = torch.zeros(end, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        self._copied: torch.Event | None = None
        whole = self._here.numpy()
        self.host = {
            name: whole[slice(*self._at[name])].view(dtype).reshape(shape) for name, (shape, dtype) in arrays.items()
        }

    def send(self) -> Parcel:
        """Start the copy. `host` must not be written to any more."""
        import torch

        alive()  # every micro-batch comes by here
        if self.device.type == "cuda":
            with torch.cuda.stream(stream := _copies(self.device)):
                self._there = self._here.to(self.device, non_blocking=True)
                self._copied = stream.record_event()
        return self

    def receive(self) -> dict[str, torch.Tensor]:
        """The tensors, for the stream that is current."""
        import torch

        if self._copied:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(self._copied)
            self._there.record_stream(current)  # its memory belongs to the stream of copies
        out = {}
        for name, array in self.host.items():
            dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
            out[name] = self._there[slice(*self._at[name])].view(dtype).view(array.shape)
        return out


def send(device: Any, **arrays: np.ndarray) -> dict[str, torch.Tensor]:
    """Arrays that are there already, as tensors on the device."""
    parcel = Parcel(device, **{name: (a.shape, a.dtype) for name, a in arrays.items()})
    for name, a in arrays.items():
        parcel.host[name][...] = a
    return parcel.send().receive()


@cache
def _copies(device: torch.device) -> torch.cuda.Stream:
    import torch

    return torch.cuda.Stream(device)


def ahead(items: Iterable[T]) -> Iterator[T]:
    """The same items, each made before the one in front of it is given out: what it sends is under way by then."""
    items = iter(items)
    for item in items:
        for following in items:
            yield item
            item = following
        yield item
