"""Matching pursuit: represent vectors by a few atoms of a dictionary, by the implementation for the device."""

import torch
from torch import Tensor

from calib.kernels.dispatch import prefers_triton
from calib.kernels.matching_pursuit import reference


def matching_pursuit(x: Tensor, atoms: Tensor, sparsity: int) -> tuple[Tensor, Tensor]:
    """Matching pursuit (Mallat and Zhang, 1993) as in CSR (arXiv:2412.11741, section 3).

    `x [V, d]`, `atoms [N, d]` -> index int64 and coefficient, both `[V, s]` with s = `sparsity`; coefficients are float64 for `x`
    in float64, else float32. In each step the index is that of the largest |R . d| over atoms d, R being the residual (of equal
    ones the lowest), and the coefficient is R . d. An atom may be chosen again; then its coefficients add up. Atoms are float32 of
    about unit length, or float16, with which a GPU takes two thirds of the time. There is no gradient.
    """
    if prefers_triton(x.device):
        from calib.kernels.matching_pursuit import triton

        if triton.supports(x, atoms, sparsity):
            with torch.cuda.device_of(x):
                return triton.matching_pursuit(x, atoms, sparsity)
    dtype = torch.promote_types(x.dtype, torch.float32)
    return reference.matching_pursuit(x.to(dtype), atoms.to(dtype), sparsity)
