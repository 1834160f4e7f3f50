"""Shrinkage of measured covariances, whose estimates are poor in directions that the corpus hardly contains."""

import torch
from torch import Tensor

SHRINKAGE = 0.01


def shrunk(matrix: Tensor) -> Tensor:
    """Returns `matrix [..., D, D]`, shrunk by 1 % towards the multiple of the identity with the same trace."""
    middle = matrix.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    return (1 - SHRINKAGE) * matrix + SHRINKAGE * middle * torch.eye(
        matrix.shape[-1], dtype=matrix.dtype, device=matrix.device
    )
