"""The inverse of a matrix, which does not depend on the number of threads."""

import torch
from torch import Tensor


def inverse(matrix: Tensor) -> Tensor:
    """Returns the inverse of `matrix [..., D, D]`, float64, by QR decomposition.

    `torch.linalg.inv` and `solve` use LU decomposition, and MKL's is wrong for matrices of 256 x 256 once
    `torch.set_num_threads` was called with 2 or more.
    """
    orthonormal, upper = torch.linalg.qr(matrix)
    return torch.linalg.solve_triangular(upper, orthonormal.mT, upper=True)
