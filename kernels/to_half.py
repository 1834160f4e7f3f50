"""Rounds parameters (scales, zero points, factors) for storage in float16."""

import torch
from torch import Tensor

HALF_MAX = torch.finfo(torch.float16).max
NARROW = 2.0**-24  # least positive number of float16


def stored(x: Tensor, fp32_params: bool) -> Tensor:
    """`x` in float16 or, for a layer that has larger values (`fp32_params`), in float32.

    In float32, elements within the range of float16 are rounded to it all the same, so that a row's numbers do not depend on the
    size of other rows' numbers. In float16, larger elements are clamped to its range and stay finite.
    """
    if fp32_params:
        return torch.where(x.abs() <= HALF_MAX, x.half().float(), x)
    return x.clamp(-HALF_MAX, HALF_MAX).half()
