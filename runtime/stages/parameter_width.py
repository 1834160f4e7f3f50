"""Whether a layer's parameters may need more than 16 bits, before the values of its first tokens are known."""

import torch

from calib.runtime.stages.contract import Codec


def may_need_fp32(codec: Codec, dtype: torch.dtype) -> bool:
    """Whether some finite tokens of `dtype` may have parameters that need float32; False unless the codec `asks_extremes`."""
    if not codec.asks_extremes:
        return False
    largest = torch.finfo(dtype).max
    return dtype != torch.float16 or codec.fp32_params(torch.full((1, 1, 1, 1), largest, dtype=dtype, device="cpu"))
