"""Whether a layer's parameters may need more than 16 bits, before the values of its first tokens are known."""

import torch
from torch import Tensor

from calib.runtime.stages.contract import Codec


def may_need_fp32(codec: Codec, dtype: torch.dtype, growth: float = 1.0) -> bool:
    """Whether some finite tokens of `dtype`, after a transform of this `growth`, may have parameters that need float32; False
    unless the codec `asks_extremes`."""
    if not codec.asks_extremes:
        return False
    largest = torch.finfo(dtype).max
    return dtype != torch.float16 or codec.fp32_params(
        grown(torch.full((1, 1, 1, 1), largest, dtype=dtype, device="cpu"), growth)
    )


def grown(extremes: Tensor, growth: float) -> Tensor:
    """Bounds of the extremes after a transform of this `growth`; in float32 where it is not 1."""
    return extremes if growth == 1 else extremes.float() * growth
