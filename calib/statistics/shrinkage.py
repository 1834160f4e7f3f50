"""Shrinkage of measured matrices: a corpus says little of directions that it hardly has."""

import torch
from torch import Tensor

SHRINKAGE = 0.01


def shrunk(matrix: Tensor) -> Tensor:
    """`matrix [..., D, D]` towards the multiple of the identity that has the same trace."""
    middle = matrix.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    return (1 - SHRINKAGE) * matrix + SHRINKAGE * middle * torch.eye(
        matrix.shape[-1], dtype=matrix.dtype, device=matrix.device
    )
