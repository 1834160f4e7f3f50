"""Codes of a layer's keys, or values, for storage: less what is decoded already predicts of them, in one basis of all heads.

With x what is coded and f what is decoded before it, less their means, W the weight of errors and C the covariance of r:

    r = x - M f        T as `transform_basis.py` makes it of W and C        y = T r        y^ = s D(E(y / s))

M is a ridge regression, s the token's size over all heads (`runtime/stages/codec/sized.py`). All is fitted on what is really
decoded (closed loop): an error of f is no error of x, because r has it taken off.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from calib.runtime.stages.transform import inverse
from calib.statistics.components import GAUSSIAN, SIZED_FACTORS, add, gathered, size_of
from calib.statistics.transform_basis import principal

EVERY = 3  # tokens for one on which steps are measured: neighbours say much the same
RIDGE = 1e-3  # of a predictor's variance
SIZE_BITS, MOST_BITS = 4, 8


@dataclass(frozen=True)
class JointCodes:
    """How `width = G D` channels are coded, in G bases of D components each; components from the one that varies most.

    Attributes:
        matrix: M transposed, float32 `[predictors, width]`.
        mean: of x - M f, float32 `[width]`.
        rows, columns: T and its inverse, float32 `[G, D, D]`.
        deviation: of components, float32 `[G, D]`.
        steps, errors: of components over their token's size, float64 `[G, D, 8]` of 1 ... 8 bits, `[G, D, 9]` of 0 ... 8.
        widths: bits of components, int64 `[G, D]`.
    """

    matrix: Tensor
    mean: Tensor
    rows: Tensor
    columns: Tensor
    deviation: Tensor
    steps: Tensor
    errors: Tensor
    widths: Tensor

    @classmethod
    def fitted(cls, x: Tensor, known: Tensor, weight: Tensor, price: float, blocks: int = 1) -> "JointCodes":
        """On tokens `x [n, width]`, of which `known [n, predictors]` float32 is decoded.

        Args:
            x: float32, means included.
            known: less means.
            weight: of errors, float64 `[G, D, D]`.
            price: of a bit, in errors: what widths are chosen by (`at`).
            blocks: parts of `known` that predict the same part of `x` alone.
        """
        matrix = regression(x - x.mean(0), known, blocks)
        left = x - known @ matrix
        mean = left.mean(0)
        rest = (left - mean).unflatten(-1, (len(weight), -1)).transpose(0, 1)  # [G, n, D]
        transform, deviation = principal(weight, (rest.mT @ rest).double() / max(1, rest.shape[1]))
        y = rest[:, ::EVERY] @ transform.float().mT
        steps, errors = tables(y, deviation.float())
        order = errors[..., 0].argsort(dim=-1, descending=True, stable=True)
        transform, deviation = gathered(transform, order), deviation.gather(-1, order)
        steps, errors = gathered(steps, order), gathered(errors, order)
        parts = (part.float() for part in (transform, inverse(transform), deviation))
        return cls(matrix, mean, *parts, steps, errors, torch.zeros_like(order)).at(price)

    def at(self, price: float) -> "JointCodes":
        """With the widths that are worth their bits at this price."""
        return replace(self, widths=(self.errors + price * torch.arange(MOST_BITS + 1)).argmin(-1))

    @property
    def bits(self) -> int:
        """Of a token: widths, and four for every size."""
        return int(self.widths.sum()) + SIZE_BITS * int(self.widths.any(-1).sum())

    def decoded(self, x: Tensor, known: Tensor) -> Tensor:
        """What is decoded of `x [n, width]`, less the mean."""
        predicted = known @ self.matrix
        y = (x - self.mean - predicted).unflatten(-1, (len(self.rows), -1)).transpose(0, 1) @ self.rows.mT
        coded = (self.widths > 0).float()
        share = coded.mean(-1).clamp(min=1 / coded.shape[-1])[:, None, None]
        size = size_of(y * coded[:, None] / share.sqrt(), self.deviation)  # of coded components alone
        last = (2.0**self.widths - 1).float()[:, None]
        step = self.steps.gather(-1, (self.widths - 1).clamp(min=0)[..., None]).float().mT
        code = torch.minimum((y / size / step + last / 2).round_().clamp_(min=0), last)
        said = (code - last / 2) * step * size * coded[:, None]
        return predicted + (said @ self.columns.mT).transpose(0, 1).flatten(1)


def regression(x: Tensor, known: Tensor, blocks: int = 1) -> Tensor:
    """Ridge regression of `x [n, width]` on `known [n, predictors]`, each in so many blocks: float32 `[predictors, width]`."""
    inputs, outputs = (part.unflatten(-1, (blocks, part.shape[-1] // blocks)).transpose(0, 1) for part in (known, x))
    square, cross = (inputs.mT @ inputs).double(), (inputs.mT @ outputs).double()
    # What does not vary predicts nothing.
    ridge = RIDGE * square.diagonal(dim1=-2, dim2=-1) + torch.finfo(torch.float32).tiny
    return torch.block_diag(
        *torch.cholesky_solve(cross, torch.linalg.cholesky(square + torch.diag_embed(ridge)))
    ).float()


def tables(y: Tensor, deviation: Tensor) -> tuple[Tensor, Tensor]:
    """Steps float64 `[G, D, 8]` of least error, and errors `[G, D, 9]`, of components `y [G, n, D]` over their tokens' sizes."""
    groups, count, channels = y.shape
    energy = torch.zeros(groups, channels, dtype=torch.float64)
    error = energy.new_zeros(groups, channels, len(GAUSSIAN), len(SIZED_FACTORS))
    add(energy, error, y, deviation, SIZED_FACTORS, size_of(y, deviation))
    least, chosen = error.min(-1)
    factors = torch.tensor(SIZED_FACTORS, dtype=torch.float64)[chosen]
    steps = deviation.double()[..., None] * torch.tensor(GAUSSIAN, dtype=torch.float64) * factors
    return steps, (torch.cat([energy[..., None], least], -1) / max(1, count)).cummin(-1).values


def price_of(codes: list[JointCodes], bits: float) -> float:
    """Of a bit, at which tokens of all these codes take at most `bits` each."""
    low, high = 1e-30, max(float(own.errors[..., 0].max()) for own in codes) + 1e-30
    for _ in range(60):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if sum(own.at(middle).bits for own in codes) > bits else (low, middle)
    return high
