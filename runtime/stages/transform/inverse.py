"""The inverse of a matrix, the same whatever the number of threads."""

import torch
from torch import Tensor


def inverse(matrix: Tensor) -> Tensor:
    """Of float64 `[..., D, D]`, by Q R.

    `torch.linalg.inv` and `solve` go by L U, and that of MKL is wrong for matrices of 256 once `torch.set_num_threads` was
    called with 2 or more.
    """
    orthonormal, upper = torch.linalg.qr(matrix)
    return torch.linalg.solve_triangular(upper, orthonormal.mT, upper=True)
