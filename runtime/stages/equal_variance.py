"""Scales of the rows and columns of a matrix that give all of them the same variance, as Sinkhorn's iteration gives them the same
sum (KVarN, arXiv:2606.03458; SINQ, arXiv:2509.22944).

    y_ij = x_ij / (r_i c_j)        r_i <- r_i std_j(y_ij)        c_j <- c_j std_i(y_ij)        in turns, from r = c = 1

So that scales do not diverge, standard deviations are clamped to 10^-3 ... 10^3 and scales to e^-0.3 ... e^10. The scales of the
round with the least imbalance are used, max r-std / min r-std + max c-std / min c-std. These numbers are those of the authors'
release. The release adds logarithms; this file multiplies, so that the rounding is the same in every batch.
"""

import math

import torch
from torch import Tensor

from calib.runtime.stages.exact_sums import whole_numbers

LEAST_STD, MOST_STD = 1e-3, 1e3
LEAST_SCALE, MOST_SCALE = math.exp(-0.3), math.exp(10)
TINY = 1e-8  # the least divisor in an imbalance
MOST_SIDE = 512  # rows or columns whose sums are exact


def row_scales(x: Tensor, rounds: int) -> Tensor:
    """Row scales r of matrices `x [..., rows, columns]` after `rounds` rounds, rows first in each: float64 `[..., rows, 1]`.

    Up to `MOST_SIDE` rows and columns a matrix has the same scales in any batch.
    """
    x = x.double().contiguous()
    if x.is_meta:  # no values: only the shape matters
        return x[..., :1]
    rows, columns = torch.ones_like(x[..., :1]), torch.ones_like(x[..., :1, :])
    row_std, column_std = deviation(x), deviation(x.mT).mT
    found, least = rows, _imbalance(row_std, column_std)
    for _ in range(rounds):
        rows = _scaled(rows, row_std)
        before, spread = columns, deviation((x / (rows * columns)).mT).mT
        columns = _scaled(before, spread)
        # A column's deviation changes by the inverse of its scale's change.
        row_std, column_std = deviation(x / (rows * columns)), spread * (before / columns)
        imbalance = _imbalance(row_std, column_std)
        found = torch.where(imbalance <= least, rows, found)
        least = torch.minimum(imbalance, least)
    return found


def deviation(x: Tensor) -> Tensor:
    """The sample standard deviation of each row of `x [..., n]`, n from 2: float64 `[..., 1]`, to 22 bits of the largest value."""
    whole, unit = whole_numbers(x)
    count, total = x.shape[-1], whole.sum(-1, keepdim=True)
    squares = whole.square_().sum(-1, keepdim=True)
    return squares.sub_(total.square_() / count).clamp_(min=0).div_(count - 1).sqrt_() * unit


def _scaled(scales: Tensor, std: Tensor) -> Tensor:
    return (scales * std.clamp(LEAST_STD, MOST_STD)).clamp_(LEAST_SCALE, MOST_SCALE)


def _imbalance(row_std: Tensor, column_std: Tensor) -> Tensor:
    """Largest over least deviation of the rows, plus that of the columns: `[..., 1, 1]`, at best 2."""
    sides = (std.flatten(-2).aminmax(dim=-1) for std in (row_std, column_std))
    return sum((most / least.clamp(min=TINY) for least, most in sides), start=torch.zeros((), dtype=torch.float64))[
        ..., None, None
    ]
