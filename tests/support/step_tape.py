"""Simulates a CUDA graph on a machine without a GPU: the operations of a step are recorded, and run again in the same memory.

As with a graph, recording leaves existing tensors unchanged; a Python number or new tensor that is used while recording keeps its
value in replays; and operations that a graph cannot contain are refused: waiting for the device, and uploads of numbers.
"""

from collections.abc import Callable
from typing import Any

import torch
from host_waits import WAITING_OPERATIONS
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

UPLOADS = {"lift_fresh", "_pin_memory"}


class Tape(TorchDispatchMode):
    """Records the operations of `step`, or those between `begin` and `end`; `replay` runs them again."""

    def __init__(self, step: Callable[[], Any] | None = None) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self._made: dict[int, Tensor] = {}  # by storage; kept, so that no address comes twice
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        if step is not None:
            self.begin()
            try:
                self.result = step()
            finally:
                self.end()

    def begin(self) -> None:
        """Start recording."""
        self.__enter__()

    def end(self) -> None:
        """Stop recording, and restore the content of tensors that existed before and were written to."""
        self.__exit__(None, None, None)
        for whole, kept in self._before.values():
            whole.copy_(kept)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func._overloadpacket.__name__
        if name in WAITING_OPERATIONS | UPLOADS:
            raise RuntimeError(f"{name} cannot be recorded")
        for argument, given in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._keep(given)
        for argument in func._schema.arguments:
            if argument.kwarg_only and argument.alias_info is not None and argument.alias_info.is_write:
                self._keep(kwargs[argument.name])
        given = {_storage(tensor) for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)}
        result = func(*args, **kwargs)
        tensors = [tensor for tensor in tree_leaves(result) if isinstance(tensor, Tensor)]
        fresh = [tensor for tensor in tensors if _storage(tensor) not in given]
        for tensor in fresh:
            self._made[_storage(tensor)] = tensor
        if fresh or func._schema.is_mutable:
            self.operations.append((func, args, kwargs, tensors if fresh else []))
        return result

    def _keep(self, written: Tensor) -> None:
        """Keep a copy of the storage of a tensor that existed before the recording, once."""
        storage = _storage(written)
        if storage not in self._made and storage not in self._before:
            whole = torch.empty(0, dtype=torch.uint8).set_(written.untyped_storage())
            self._before[storage] = whole, whole.clone()

    def replay(self) -> None:
        """Run every operation again and copy its results into the tensors that the recording returned."""
        for func, args, kwargs, results in self.operations:
            again = [tensor for tensor in tree_leaves(func(*args, **kwargs)) if isinstance(tensor, Tensor)]
            for old, new in zip(results, again, strict=False):
                old.copy_(new)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
