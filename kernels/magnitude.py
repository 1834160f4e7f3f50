"""The largest magnitude of tokens, in one pass over them: `abs` would write them once more, and a prompt's are many."""

import torch
from torch import Tensor


def largest_magnitude(x: Tensor, dim: int | None = None) -> Tensor:
    """max |x| in the dtype of x: of all of it, `[]`, or along an axis that is kept, `[..., 1, ...]`. NaN where x holds one.

    Raises RuntimeError where there is nothing to compare.
    """
    if dim is None:
        low, high = torch.aminmax(x)
    else:
        low, high = torch.aminmax(x, dim=dim, keepdim=True)
    return torch.maximum(low.abs(), high.abs())
