"""Subtract from values their prediction from the codes of keys, in a Triton kernel on a GPU.

Where `supported` is False, `runtime/stages/prediction.py` computes the same bits in plain torch.
"""

from torch import Tensor

from calib.kernels.attend.packed_pages import PackedStream, PredictedValues
from calib.kernels.dispatch import prefers_triton


def supported(values: Tensor, keys: PackedStream) -> bool:
    """Whether the kernel supports `values [rows, kv_heads, T, D]` and these keys."""
    if keys.sizes is None or not keys.counts or not any(keys.counts) or not prefers_triton(values.device):
        return False
    from calib.kernels.predictions import triton

    return values.is_floating_point() and triton.is_exact(keys)


def unpredicted(values: Tensor, keys: PackedStream, predicted: PredictedValues) -> Tensor:
    """Residual v - unit T^T s (2 c - L) of values, with c the codes of a token's key, s its size and L the largest codes. The sum
    over components is exact, every other operation is rounded to float32.

    Args:
        values: `[rows, kv_heads, T, D]`, of a floating dtype.
        keys: keys of the same tokens, each row as one page: words `[rows, 1, T, sum(counts)]` and sizes `[rows, 1, T, W]`.
        predicted: the table T and unit.

    Returns:
        float32 `[rows, kv_heads, T, D]`.
    """
    from calib.kernels.predictions import triton

    return triton.unpredicted(values, keys, predicted)
