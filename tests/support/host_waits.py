"""Detects, on a machine without a GPU, calls that would make the host wait for the device; and counts operations."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from calib.runtime.layer import CompressedLayer

# Functions that return a Python value of a tensor, or a tensor whose shape depends on values.
WAITING = {
    "item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__", "__contains__",
    "nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "equal", "allclose", "is_nonzero",
    "repeat_interleave",
}  # fmt: skip
# The operations to which they are dispatched.
WAITING_OPERATIONS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2"}


class HostWaits(TorchFunctionMode):
    """Counts functions called inside `with` that would wait, by name; also copies to a device of tensors other than uploads.

    Uploads are tensors made by `torch.tensor`; one that is made on a device counts as "tensor(device)".
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        # Tensors that were made from Python numbers, by id. They are kept, so that no other tensor gets the id of one of them.
        self.uploads: dict[int, Tensor] = {}
        self.operations = Operations()
        self.paused = False

    def __enter__(self) -> "HostWaits":
        self.operations.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.operations.__exit__(*error)
        for name in WAITING_OPERATIONS & set(self.operations.counts):
            self.found[f"aten::{name}"] += self.operations.counts[name]

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """A context in which nothing is counted: its tensors would be in host memory even with a GPU."""
        self.paused = self.operations.paused = True
        try:
            yield
        finally:
            self.paused = self.operations.paused = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if self.paused:
            return func(*args, **kwargs)
        if name in WAITING:
            self.found[name] += 1
        if name == "to" and any(isinstance(part, torch.device | str) for part in (*args[1:], *kwargs.values())):
            self.found["to(device)"] += id(args[0]) not in self.uploads
        if name in ("__getitem__", "__setitem__"):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            self.found[f"{name}[mask]"] += sum(isinstance(i, Tensor) and i.dtype == torch.bool for i in index)
            # Copied to the device from memory that is not pinned.
            self.found[f"{name}[list]"] += sum(isinstance(i, list) for i in index)
        result = func(*args, **kwargs)
        if name == "tensor":
            self.found["tensor(device)"] += kwargs.get("device") is not None
            self.uploads[id(result)] = result
        return result

    @property
    def names(self) -> set[str]:
        """Names of the functions and operations that would have waited."""
        return {name for name, count in self.found.items() if count}


class Operations(TorchDispatchMode):
    """Counts every operation inside `with`, by name; `largest`: elements of the largest tensor that an operation allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.largest = 0
        self.paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.paused:
            return result
        self.counts[func.name().split("::")[-1].split(".")[0]] += 1
        given = {part.untyped_storage().data_ptr() for part in args if isinstance(part, Tensor)}
        if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in given:
            self.largest = max(self.largest, result.numel())
        return result


def watched_layers(monkeypatch) -> list[HostWaits]:
    """Watches every `update` and `attend` of compressed layers from now on; one entry for each call."""
    calls: list[HostWaits] = []
    for name in ("update", "attend"):
        original = getattr(CompressedLayer, name)

        def method(layer, *arguments, original=original, **options):
            with HostWaits() as waits:
                result = original(layer, *arguments, **options)
            calls.append(waits)
            return result

        monkeypatch.setattr(CompressedLayer, name, method)
    return calls
