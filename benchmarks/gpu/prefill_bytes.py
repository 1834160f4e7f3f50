"""Bytes that an operation of torch reads and writes at least, and products of a matrix product."""

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

from torch import Tensor

# Read as much as they write, however much they could read.
GATHERING = {"gather", "index", "index_select"}
# Write as much as they are given, however large what they write to: their last tensor.
SCATTERING = {"index_put_", "scatter_", "index_copy_"}
FILLING = {"fill_", "zero_", "zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "arange", "new_zeros"}
PRODUCTS = {"mm", "bmm", "addmm", "baddbmm"}


def tensors_in(given: Any) -> Iterator[Tensor]:
    """All tensors of arguments or results."""
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, dict):
        yield from tensors_in(list(given.values()))
    elif isinstance(given, list | tuple):
        for part in given:
            yield from tensors_in(part)


def bytes_of(tensor: Tensor) -> int:
    """Of its numbers, those that are expanded once."""
    sizes = (size for size, step in zip(tensor.shape, tensor.stride(), strict=True) if step or not size)
    return prod(sizes) * tensor.element_size()


def moved(name: str, given: Sequence[Tensor], made: Sequence[Tensor]) -> int:
    """Bytes of one operation on tensors that are `given`; those that are `made` are written."""
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
    """Products of two numbers that are summed up."""
    if name not in PRODUCTS:
        return 0
    *_, left, right = given
    return left.numel() * right.shape[-1]
