"""What trellis-coded levels of a step and width err by (`calib/kernels/trellis`), of each component of tokens.

A component's error depends on the paths that its neighbours leave it. Reverse water-filling gives all components of a cache about
the same step, so that an error of one step counts the same in all of them: that is what is measured, with as many bits for each.
"""

import torch
from torch import Tensor

from calib.kernels.trellis.operation import trellis_levels, trellis_words


def trellis_residual(y: Tensor, steps: Tensor, bits: int) -> Tensor:
    """y^ - y of components `y [H, n, D]` float32 in `steps [H or 1, 1, D]`, the same path through all of a token's components."""
    heads, _, channels = y.shape
    reach = steps * 2.0**bits
    widths, counts = (bits,), (channels,) * heads
    words = trellis_words((y / reach)[None], widths, counts, torch.ones(heads, channels, device=y.device))
    levels = trellis_levels(words.mT.contiguous(), widths, counts)[0].mT
    return ((levels + 0.5) * 2.0**-bits - 1).mul_(reach).sub_(y)
