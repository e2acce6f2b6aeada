"""Weights of a module as a Snapshot, and back: bytes on the host, each tensor once, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from pipeline.records import Snapshot, offsets_of

if TYPE_CHECKING:
    import torch


def snapshot_of(module: torch.nn.Module, version: int) -> Snapshot:
    """A copy of the module's state dict. Tied weights are in it once, under the first of their names."""
    import torch

    tensors = _distinct(module)
    ends = offsets_of([t.numel() * t.element_size() for t in tensors.values()])
    data = np.empty(int(ends[-1]), np.uint8)
    manifest = []
    for (name, tensor), start, stop in zip(tensors.items(), ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        torch.from_numpy(data[start:stop]).copy_(flat)
        manifest.append((name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), start, stop))
    return Snapshot(version=version, manifest=tuple(manifest), data=data)


def iterate(snapshot: Snapshot) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors, on the host; each tensor is a copy of its own."""
    import torch

    for name, dtype, shape, start, stop in snapshot.manifest:
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        tensor.reshape(-1).view(torch.uint8).numpy()[:] = snapshot.data[start:stop]
        yield name, tensor


def load_into(module: torch.nn.Module, snapshot: Snapshot) -> None:
    """Overwrite the module's weights in place, so that tied weights stay tied; another dtype is converted.

    ValueError, before anything is written, if names or shapes differ from the module's.
    """
    import torch

    targets = _distinct(module)
    shapes = {name: shape for name, _, shape, _, _ in snapshot.manifest}
    both = sorted(targets.keys() & shapes.keys())
    differ = {
        "missing": sorted(targets.keys() - shapes.keys()),
        "unexpected": sorted(shapes.keys() - targets.keys()),
        "of another shape": [f"{n} {shapes[n]}" for n in both if shapes[n] != tuple(targets[n].shape)],
    }
    if any(differ.values()):
        said = "; ".join(f"{what}: {', '.join(names[:8])}" for what, names in differ.items() if names)
        raise ValueError(f"the weights of version {snapshot.version} do not fit {type(module).__name__}: {said}")
    with torch.no_grad():
        for name, tensor in iterate(snapshot):
            targets[name].copy_(tensor)


def _distinct(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The state dict without the further names of tied tensors."""
    first: dict[int, str] = {}
    state = module.state_dict(keep_vars=True)  # the tensors themselves: tied ones are one object
    return {name: t for name, t in state.items() if first.setdefault(id(t), name) == name}
