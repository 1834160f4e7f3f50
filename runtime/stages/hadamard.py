"""Sylvester's Hadamard matrix: its entries have equal magnitude, so that it spreads each coordinate evenly over all."""

import torch
from torch import Tensor


def hadamard(size: int) -> Tensor:
    """The normalised matrix, float64 `[size, size]`, symmetric and orthogonal, entries +-1/sqrt(size).

    Where `size` is no power of two: blocks of the largest power of two that divides it, along the diagonal.
    """
    block = size & -size
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < block:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return torch.block_diag(*[matrix * block**-0.5] * (size // block))
