"""Weighted sums of rows by atom (for dictionary learning), by the implementation for the device."""

import torch
from torch import Tensor

from calib.kernels.dispatch import prefers_triton
from calib.kernels.neural_dict import reference


def scattered(coefficient: Tensor, index: Tensor, rows: Tensor, count: int) -> Tensor:
    """Scatter-add: for each pair (i, c) of a row of `rows [B, d]`, add c times the row to row i of the result, `[count, d]`.

    `coefficient [B, s]` in the rows' dtype, `index` int64 `[B, s]` below `count`. The result is deterministic. With coefficients
    times -2/B and residuals as rows it is the gradient of NeuralDict's L_MSE (CSR, arXiv:2412.11741, eq. 8). The function itself
    need not be differentiable.
    """
    if prefers_triton(rows.device):
        from calib.kernels.neural_dict import triton

        if triton.supports(coefficient, index, rows, count):
            with torch.cuda.device_of(rows):
                return triton.scattered(coefficient, index, rows, count)
    return reference.scattered(coefficient, index, rows, count)
