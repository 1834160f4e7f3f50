"""Runs the fit's and the runtime's own code on `meta` tensors, which have shapes but no data, and counts the bytes that it holds.

Operations that read values of a tensor on the host fail on the `meta` device. The code that is run here uses few of them, and
each gets the usual answer: everything is finite, no token is padding, no value is too large for float16.
"""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten
META = torch.device("meta")
WRITES = (aten.copy_.default, aten.index_put_.default)


class MetaTensors(TorchDispatchMode):
    """Context manager in which operations on `meta` tensors succeed even if they read values or copy to another device.

    Attributes:
        held: bytes of the `meta` tensors that were made in the context and still exist.
        most: largest value of `held` so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.held = self.most = 0
        self._known: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._attention = _Attention()

    def __enter__(self) -> "MetaTensors":
        self._attention.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._attention.__exit__(*raised)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = self._answer(func, args, kwargs or {})
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor) and tensor.is_meta:
                self._count(tensor.untyped_storage())
        return found

    def _answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is aten.zeros.default:  # pages in host memory as well
            kwargs = kwargs | {"device": META, "pin_memory": False}
        if not any(isinstance(part, Tensor) and part.is_meta for part in tree_leaves(args)):
            return func(*args, **kwargs)
        if func is aten._local_scalar_dense.default:
            return False if args[0].dtype == torch.bool else 0
        if func is aten.all.default:
            return torch.ones((), dtype=torch.bool)  # a CPU tensor: all finite, no padding
        if func is aten.allclose.default:
            return True
        if func is aten.nonzero.default:
            return torch.empty(0, args[0].ndim, dtype=torch.int64, device=META)
        if func is aten._to_copy.default:
            kwargs = kwargs | {"device": META}
        if func is aten.index.Tensor:
            args = (args[0], [part for index in args[1] for part in _positions(index)])
        if func in WRITES and not args[0].is_meta:
            return args[0]
        # CPU tensors in the arguments are moved to `meta`, since the operation needs all tensors on one device.
        return func(*tree_map(_there, args), **kwargs)

    def _count(self, storage: Any) -> None:
        if storage._cdata in self._known:
            return
        self._known[storage._cdata] = storage
        self.held += storage.nbytes()
        self.most = max(self.most, self.held)
        weakref.finalize(storage, self._gone, storage.nbytes())

    def _gone(self, size: int) -> None:
        self.held -= size


class _Attention(TorchFunctionMode):
    """Replaces SDPA by a version that never allocates the attention matrix, as fused kernels do not; on `meta` tensors torch would
    decompose SDPA into matrix products."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention and args[0].is_meta:
            return _Attended.apply(*args[:3])
        return func(*args, **(kwargs or {}))


class _Attended(torch.autograd.Function):
    """Allocates the attention output only, and saves query, key, value and output for the backward pass."""

    @staticmethod
    def forward(context: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = query.new_empty(*query.shape[:-1], value.shape[-1])
        context.save_for_backward(query, key, value, output)
        return output

    @staticmethod
    def backward(context: Any, *slopes: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(part) for part in context.saved_tensors[:3])


def _positions(index: Tensor | None) -> list[Tensor | None]:
    """Replaces a boolean mask by the integer indices that it stands for, one tensor for each axis, as if all entries were true."""
    if index is None or index.dtype != torch.bool:
        return [index]
    return [torch.empty(index.numel(), dtype=torch.int64, device=META) for _ in range(index.ndim)]


def _there(part: Any) -> Any:
    return part.to(META) if isinstance(part, Tensor) and not part.is_meta and part.ndim else part
