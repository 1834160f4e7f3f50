"""Vectors as a few atoms of a dictionary, where the tensors are."""

import torch
from torch import Tensor

from calib.kernels.dispatch import prefers_triton
from calib.kernels.matching_pursuit import reference


def matching_pursuit(x: Tensor, atoms: Tensor, sparsity: int) -> tuple[Tensor, Tensor]:
    """`sparsity` pairs for every vector: `x [V, d]`, `atoms [N, d]` -> index int64, coefficient `[V, s]`: float64 for `x` in
    float64, else float32.

    Index: the first of the largest |R . d|; coefficient: R . d, signed. A repeated atom's coefficients add up. Atoms are
    float32 of about unit length, or float16, which a GPU multiplies in two thirds of the time. Matching pursuit (Mallat and
    Zhang, 1993) as CSR has it (arXiv:2412.11741, section 3). No gradient.
    """
    if prefers_triton(x.device):
        from calib.kernels.matching_pursuit import triton

        if triton.supports(x, atoms, sparsity):
            with torch.cuda.device_of(x):
                return triton.matching_pursuit(x, atoms, sparsity)
    dtype = torch.promote_types(x.dtype, torch.float32)
    return reference.matching_pursuit(x.to(dtype), atoms.to(dtype), sparsity)
