"""The least bytes that an operation of torch reads and writes, and the multiplications of a matrix product."""

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

from torch import Tensor

# Operations that read as much of their source as they write.
GATHERING = {"gather", "index", "index_select"}
# Operations that write as much as their last tensor holds, however large the target is.
SCATTERING = {"index_put_", "scatter_", "index_copy_"}
FILLING = {"fill_", "zero_", "zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "arange", "new_zeros"}
PRODUCTS = {"mm", "bmm", "addmm", "baddbmm"}


def tensors_in(given: Any) -> Iterator[Tensor]:
    """Yields all tensors of arguments or results."""
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, dict):
        yield from tensors_in(list(given.values()))
    elif isinstance(given, list | tuple):
        for part in given:
            yield from tensors_in(part)


def bytes_of(tensor: Tensor) -> int:
    """Returns the bytes of a tensor's numbers; expanded (stride 0) axes count once."""
    sizes = (size for size, step in zip(tensor.shape, tensor.stride(), strict=True) if step or not size)
    return prod(sizes) * tensor.element_size()


def moved(name: str, given: Sequence[Tensor], made: Sequence[Tensor]) -> int:
    """Returns the bytes that one operation moves, reading tensors `given` and writing tensors `made`."""
    read, written = [bytes_of(part) for part in given], sum(map(bytes_of, made))
    if name in FILLING:
        return written
    if name in GATHERING:
        return 2 * written + sum(read[1:])
    if name in SCATTERING:
        return sum(read[1:]) + read[-1]
    if name == "copy_":
        return read[1] + written
    return sum(read) + written


def products_of(name: str, given: Sequence[Tensor]) -> int:
    """Returns the multiply-adds of a matrix product; 0 for other operations."""
    if name not in PRODUCTS:
        return 0
    *_, left, right = given
    return left.numel() * right.shape[-1]
