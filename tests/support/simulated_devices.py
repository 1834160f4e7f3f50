"""Several devices on a machine that has one: tensors that say where they lie, and operations that refuse to mix them.

A tensor `on` a device holds a plain one, which every operation really works on; inside `SimulatedDevices` its answer lies
on the same device. As with GPUs, tensors of two devices meet only where one is copied, numbers of the CPU without
dimensions may meet anything, and indices may come from the CPU. Devices are called `meta:0`, `meta:1` and so on: other
names would make torch look for a driver.
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
    """A tensor that says it lies on `device`; `held` has the numbers."""

    is_meta = False

    @staticmethod
    def __new__(cls, held: Tensor, device: torch.device) -> "Placed":
        """An empty shell of the same sizes."""
        return Tensor._make_wrapper_subclass(cls, held.shape, held.stride(), dtype=held.dtype, device=device)

    def __init__(self, held: Tensor, device: torch.device) -> None:
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        """Only `SimulatedDevices` knows what to do."""
        raise RuntimeError(f"{func} of a placed tensor outside SimulatedDevices")


def on(device: str, x: Tensor) -> Placed:
    """The tensor on `device`, sharing its numbers."""
    return Placed(x, torch.device(device))


class SimulatedDevices(TorchDispatchMode):
    """Inside, placed tensors can be worked with."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Works on the held tensors and places the answer; RuntimeError where devices mix."""
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
    """Where an operation's answer lies."""
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
