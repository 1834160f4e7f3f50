"""Scales of the rows and columns of a matrix that give all of them the same variance, as Sinkhorn's iteration gives them the same
sum (KVarN, arXiv:2606.03458; SINQ, arXiv:2509.22944).

    y_ij = x_ij / (r_i c_j)        r_i <- r_i std_j(y_ij)        c_j <- c_j std_i(y_ij)        in turns, from r = c = 1

Scales that begin to run away are held: a standard deviation counts as 10^-3 ... 10^3, a scale is e^-0.3 ... e^10. Of all rounds
the one with the least imbalance is taken, max r-std / min r-std + max c-std / min c-std. These numbers are those of the authors'
release; it adds up logarithms where this file multiplies, which no arithmetic rounds differently from batch to batch.
"""

import math

import torch
from torch import Tensor

from calib.runtime.stages.exact_sums import whole_numbers

LEAST_STD, MOST_STD = 1e-3, 1e3
LEAST_SCALE, MOST_SCALE = math.exp(-0.3), math.exp(10)
TINY = 1e-8  # below which the least standard deviation is no divisor
MOST_SIDE = 512  # rows or columns whose sums are exact


def row_scales(x: Tensor, rounds: int) -> Tensor:
    """r of matrices `x [..., rows, columns]`, rows first in each of so many `rounds`: float64 `[..., rows, 1]`.

    Up to `MOST_SIDE` rows and columns a matrix has the same scales in any batch.
    """
    x = x.double().contiguous()
    if x.is_meta:  # no numbers: whatever scales
        return x[..., :1]
    rows, columns = torch.ones_like(x[..., :1]), torch.ones_like(x[..., :1, :])
    row_std, column_std = deviation(x), deviation(x.mT).mT
    found, least = rows, _imbalance(row_std, column_std)
    for _ in range(rounds):
        rows = _scaled(rows, row_std)
        before, spread = columns, deviation((x / (rows * columns)).mT).mT
        columns = _scaled(before, spread)
        # What a column's scale is divided by its deviation is too.
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
    """2 where all rows and all columns vary alike: `[..., 1, 1]`."""
    sides = (std.flatten(-2).aminmax(dim=-1) for std in (row_std, column_std))
    return sum((most / least.clamp(min=TINY) for least, most in sides), start=torch.zeros(()))[..., None, None]
