"""Keys as they were before RoPE, by whichever form of the operation the device runs."""

from torch import Tensor

from calib.kernels.dispatch import prefers_triton
from calib.kernels.unrotate import reference


def unrotated(keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Undoes half-split RoPE: channels (i, i + r/2) of the first r were turned, the others were not.

    Args:
        keys: `[rows, heads, n, D]`, float32, float16 or bfloat16.
        cos, sin: float32 `[n, r/2]` of the tokens' angles, r at most D, or `[rows, n, r/2]` where rows differ.

    Returns:
        float32 `[rows, heads, n, D]`, the same bits on every device.
    """
    if prefers_triton(keys.device):
        from calib.kernels.unrotate import triton

        if triton.supports(keys, cos, sin):
            return triton.unrotated(keys, cos, sin)
    return reference.unrotated(keys, cos, sin)
