"""Numbers kept in 16 bits."""

import torch
from torch import Tensor

HALF_MAX = torch.finfo(torch.float16).max
NARROW = 2.0**-24  # the least number of float16


def stored(x: Tensor, fp32_params: bool) -> Tensor:
    """`x` in float16 or, where a layer has larger values (`fp32_params`), in float32.

    What float16 can hold is rounded to it all the same: a row's numbers do not depend on its neighbours' size. Larger
    numbers that come after a layer chose 16 bits stay finite.
    """
    if fp32_params:
        return torch.where(x.abs() <= HALF_MAX, x.half().float(), x)
    return x.clamp(-HALF_MAX, HALF_MAX).half()
