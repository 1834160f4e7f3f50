"""Values less what the codes of their keys predict, where a kernel serves them: Triton on a GPU.

For what is not `supported` `runtime/stages/prediction.py` does the same in plain torch: the same bits.
"""

from torch import Tensor

from calib.kernels.attend.packed_pages import PackedStream, PredictedValues
from calib.kernels.dispatch import prefers_triton


def supported(values: Tensor, keys: PackedStream) -> bool:
    """Whether a kernel takes off of `values [rows, kv_heads, T, D]` what these keys predict."""
    if keys.sizes is None or not keys.counts or not any(keys.counts) or not prefers_triton(values.device):
        return False
    from calib.kernels.predictions import triton

    return values.is_floating_point() and triton.is_exact(keys)


def unpredicted(values: Tensor, keys: PackedStream, predicted: PredictedValues) -> Tensor:
    """v - unit T^T s (2 c - L), c the codes of a token's key and s its size, every operation rounded to float32 and the sum exact.

    Args:
        values: `[rows, kv_heads, T, D]`, of a floating dtype.
        keys: of the same tokens, each row a page: words `[rows, 1, T, sum(counts)]` and sizes `[rows, 1, T, W]`.
        predicted: T and unit.

    Returns:
        float32 `[rows, kv_heads, T, D]`.
    """
    from calib.kernels.predictions import triton

    return triton.unpredicted(values, keys, predicted)
