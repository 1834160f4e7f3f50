"""Simulates several devices on a machine with one: tensors with a device, and operations that refuse to mix devices.

A tensor `on` a device wraps a plain CPU tensor, on which operations are computed; inside `SimulatedDevices` the result is on the
same device. As with GPUs, tensors of two devices may only meet in a copy; 0-dimensional CPU tensors may be combined with any
device, and indices may be on the CPU. Devices are called `meta:0`, `meta:1` and so on, because other names make torch look for a
driver.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten
COPIES = {aten._to_copy.default, aten.copy_.default}
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}


class Placed(Tensor):
    """A tensor that reports `device` as its device; `held` is the CPU tensor with its numbers."""

    is_meta = False

    @staticmethod
    def __new__(cls, held: Tensor, device: torch.device) -> "Placed":
        """A wrapper without memory, of the shape, strides and dtype of `held`."""
        return Tensor._make_wrapper_subclass(cls, held.shape, held.stride(), dtype=held.dtype, device=device)

    def __init__(self, held: Tensor, device: torch.device) -> None:
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        """Raises RuntimeError: such tensors may be used inside `SimulatedDevices` only."""
        raise RuntimeError(f"{func} of a placed tensor outside SimulatedDevices")


def on(device: str, x: Tensor) -> Placed:
    """Return `x` as a tensor on `device` that shares its memory."""
    return Placed(x, torch.device(device))


class SimulatedDevices(TorchDispatchMode):
    """A mode in which operations on `Placed` tensors work."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Apply the operation to the held tensors and put the result on their device; raises RuntimeError if devices are mixed."""
        kwargs = dict(kwargs or {})
        device = place(func, args, kwargs)
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("cpu")
        shells: dict[int, Placed] = {}

        def opened(x: Any) -> Any:
            if isinstance(x, Placed):
                shells[id(x.held)] = x
                return x.held
            return x

        def closed(x: Any) -> Any:
            if not isinstance(x, Tensor) or device.type == "cpu":
                return x
            return shells[id(x)] if id(x) in shells else Placed(x, device)

        return tree_map(closed, func(*tree_map(opened, args), **tree_map(opened, kwargs)))


def place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """The device of an operation's result; raises RuntimeError if its tensors are on several devices."""
    if kwargs.get("device") is not None:
        return torch.device(kwargs["device"])
    met = args[:1] if func in COPIES else tree_leaves((args, kwargs))
    if func in INDEXING:
        indices = [x for x in args[1] if isinstance(x, Tensor) and x.device.type != "cpu"]
        met = [args[0], *indices, *args[2:3]]
    devices = {x.device for x in met if isinstance(x, Tensor) and (x.dim() or x.device.type != "cpu")}
    if len(devices) > 1:
        raise RuntimeError(f"{func}: tensors on {' and '.join(sorted(map(str, devices)))}")
    return devices.pop() if devices else torch.device("cpu")
