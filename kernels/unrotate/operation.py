"""Undoes RoPE of keys, by the implementation for the device."""

from torch import Tensor

from calib.kernels.dispatch import prefers_triton
from calib.kernels.unrotate import reference


def unrotated(keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Undoes half-split RoPE, which has rotated the channels (i, i + r/2) of the first r.

    Args:
        keys: `[rows, heads, n, D]`, float32, float16 or bfloat16.
        cos, sin: of the tokens' angles, float32 `[n, r/2]`, r at most D, or `[rows, n, r/2]` if rows differ.

    Returns:
        float32 `[rows, heads, n, D]`, the same bits on every device.
    """
    if prefers_triton(keys.device):
        from calib.kernels.unrotate import triton

        if triton.supports(keys, cos, sin):
            return triton.unrotated(keys, cos, sin)
    return reference.unrotated(keys, cos, sin)
