"""Largest magnitude of a tensor, in one pass over it: `abs` would write a copy, which is large for a prompt's keys or values."""

import torch
from torch import Tensor


def largest_magnitude(x: Tensor, dim: int | None = None) -> Tensor:
    """max |x| in the dtype of x: over all elements, `[]`, or along the axis `dim`, which is kept with size 1. NaN if x holds a NaN.

    Raises RuntimeError if there are no elements to compare.
    """
    if dim is None:
        low, high = torch.aminmax(x)
    else:
        low, high = torch.aminmax(x, dim=dim, keepdim=True)
    return torch.maximum(low.abs(), high.abs())
