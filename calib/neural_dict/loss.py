"""The training loss of a dictionary (CSR, arXiv:2412.11741, eq. 8, 10, 11), with explicit gradients.

    L_MSE = mean over the batch of |x - sum_j c_j d_j|^2         dL/dd_i = -2/B sum of c (x - x^) over the pairs (i, c)
    L_div = |I - W W^T|_F^2 / N^2                                dL/dW   = 4 (W W^T W - W) / N^2

B is the number of vectors x in the batch. The pairs (i, c) of a vector, its atoms and their coefficients found by matching pursuit,
are treated as constants, because the choice of atoms has no useful derivative. W `[N, d]` holds the N atoms d_i as rows; W W^T
`[N, N]` is never formed, since |I - W W^T|_F^2 = |W^T W|_F^2 - 2 |W|_F^2 + N and (W W^T) W = W (W^T W) need only `[d, d]`.

Eq. 8 prints a sum over the samples, but a mean must be meant: with a sum the weight of eq. 11 would always be 1.
"""

from typing import Any

import torch
from torch import Tensor

from calib.kernels.matching_pursuit.reference import desparsify
from calib.kernels.neural_dict.operation import scattered

SHARE, LIMIT = 0.1, 1.0  # constants of eq. 11


class _Reconstruction(torch.autograd.Function):
    """L_MSE of a batch, with a gradient only for the atoms."""

    @staticmethod
    def forward(ctx: Any, atoms: Tensor, x: Tensor, index: Tensor, coefficient: Tensor) -> Tensor:
        residual = x - desparsify(index, coefficient, atoms)
        ctx.save_for_backward(residual, index, coefficient)
        ctx.count = len(atoms)
        return residual.square().sum() / len(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        residual, index, coefficient = ctx.saved_tensors
        scaled = coefficient * (gradients[0] * (-2 / len(residual)))
        return scattered(scaled, index, residual, ctx.count), None, None, None


class _Diversity(torch.autograd.Function):
    """L_div."""

    @staticmethod
    def forward(ctx: Any, atoms: Tensor) -> Tensor:
        count, moment = len(atoms), atoms.mT @ atoms
        ctx.save_for_backward(atoms, moment)
        return (moment.square().sum() - 2 * moment.trace() + count) / count**2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        atoms, moment = ctx.saved_tensors
        return (atoms @ moment - atoms) * (gradients[0] * (4 / len(atoms) ** 2))


def reconstruction(atoms: Tensor, x: Tensor, index: Tensor, coefficient: Tensor) -> Tensor:
    """Returns L_MSE (eq. 8) of `x [B, d]` approximated by s pairs each, `[B, s]`, of `atoms [N, d]`: a scalar.

    It is differentiable by the atoms only.
    """
    return _Reconstruction.apply(atoms, x, index, coefficient)


def diversity(atoms: Tensor) -> Tensor:
    """Returns L_div (eq. 10) of `atoms [N, d]`, not necessarily of unit length: a differentiable scalar."""
    return _Diversity.apply(atoms)


def diversity_weight(mse: Tensor, penalty: Tensor) -> Tensor:
    """Returns beta = min(0.1 L_MSE / L_div, 1) without gradient (eq. 11), from the losses of the batch before.

    If L_div is 0, beta is 1.
    """
    mse, penalty = mse.detach(), penalty.detach()
    return torch.where(penalty > 0, SHARE * mse / penalty, LIMIT).clamp(max=LIMIT)
