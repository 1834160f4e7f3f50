"""Codes of a layer's keys, or values, for storage: predicted from data decoded before, the rest coded in one basis of all heads.

With x the vector to be coded and f the vectors decoded before it, both minus their means, W the weight of errors, C = cov(r):

    r = x - M f        T from W and C as in `transform_basis.py`        y = T r        y^ = s D(E(y / s))

M is a ridge regression, s the token's size over all heads (`runtime/stages/codec/sized.py`). The regression uses decoded vectors f
with their coding errors (closed loop), so an error of f is not added to x: r is computed from the same f.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from calib.runtime.stages.transform import inverse
from calib.statistics.components import GAUSSIAN, SIZED_FACTORS, add, gathered, size_of
from calib.statistics.transform_basis import principal

EVERY = 3  # steps are measured on one token in so many: neighbours are similar
RIDGE = 1e-3  # ridge, as a share of each predictor's variance
# A predictor of so small a deviation predicts nothing. Decoded vectors of a head without variance deviate by about 1e-20, and their
# regression would have entries beyond what an artifact may hold.
LEAST = 1e-12
SIZE_BITS, MOST_BITS = 4, 8


@dataclass(frozen=True)
class JointCodes:
    """A fitted code of `width = G D` channels in G bases of D components each, components with the most energy first.

    Attributes:
        matrix: M transposed, float32 `[predictors, width]`.
        mean: of x - M f, float32 `[width]`.
        rows, columns: T and its inverse, float32 `[G, D, D]`.
        deviation: standard deviations of components, float32 `[G, D]`.
        steps, errors: of components divided by their token's size, float64: steps `[G, D, 8]` for 1 ... 8 bits, errors
            `[G, D, 9]` for 0 ... 8 bits.
        widths: bits of each component, int64 `[G, D]`.
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
        """Fits a code to n tokens.

        Args:
            x: the vectors to be coded, float32 `[n, width]`, with their means.
            known: the vectors decoded before, minus their means, float32 `[n, predictors]`.
            weight: W of errors, float64 `[G, D, D]`.
            price: of a bit, in units of error; `at` chooses `widths` by it.
            blocks: number of equal parts of `known` and `x`; each part of `known` predicts only the same part of `x`.
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
        """Returns the same code with the widths that minimise error + price * bits."""
        return replace(self, widths=(self.errors + price * torch.arange(MOST_BITS + 1, dtype=torch.float32)).argmin(-1))

    @property
    def bits(self) -> int:
        """Bits per token: all widths, and four bits for the size of each basis with any coded component."""
        return int(self.widths.sum()) + SIZE_BITS * int(self.widths.any(-1).sum())

    def decoded(self, x: Tensor, known: Tensor) -> Tensor:
        """Returns the decoded vectors of `x [n, width]` minus the mean, given `known` as in `fitted`: float32 `[n, width]`."""
        predicted = known @ self.matrix
        y = (x - self.mean - predicted).unflatten(-1, (len(self.rows), -1)).transpose(0, 1) @ self.rows.mT
        coded = (self.widths > 0).float()
        share = coded.mean(-1).clamp(min=1 / coded.shape[-1])[:, None, None]
        size = size_of(y * coded[:, None] / share.sqrt(), self.deviation)  # rms of the coded components only
        last = (2.0**self.widths - 1).float()[:, None]
        step = self.steps.gather(-1, (self.widths - 1).clamp(min=0)[..., None]).float().mT
        code = torch.minimum((y / size / step + last / 2).round_().clamp_(min=0), last)
        said = (code - last / 2) * step * size * coded[:, None]
        return predicted + (said @ self.columns.mT).transpose(0, 1).flatten(1)


def regression(x: Tensor, known: Tensor, blocks: int) -> Tensor:
    """Returns the ridge regression of `x [n, width]` on `known [n, predictors]`: float32 `[predictors, width]`.

    It is block diagonal, with `blocks` blocks.
    """
    inputs, outputs = (part.unflatten(-1, (blocks, part.shape[-1] // blocks)).transpose(0, 1) for part in (known, x))
    square, cross = (inputs.mT @ inputs).double(), (inputs.mT @ outputs).double()
    ridge = RIDGE * square.diagonal(dim1=-2, dim2=-1) + LEAST**2 * max(1, len(known))
    return torch.block_diag(
        *torch.cholesky_solve(cross, torch.linalg.cholesky(square + torch.diag_embed(ridge)))
    ).float()


def tables(y: Tensor, deviation: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the steps `[G, D, 8]` with the least error, and the errors `[G, D, 9]`, of components `y [G, n, D]`; float64.

    Components are divided by their token's size before quantising.
    """
    groups, count, channels = y.shape
    energy = torch.zeros(groups, channels, dtype=torch.float64)
    error = energy.new_zeros(groups, channels, len(GAUSSIAN), len(SIZED_FACTORS))
    add(energy, error, y, deviation, SIZED_FACTORS, size_of(y, deviation))
    least, chosen = error.min(-1)
    factors = torch.tensor(SIZED_FACTORS, dtype=torch.float64)[chosen]
    steps = deviation.double()[..., None] * torch.tensor(GAUSSIAN, dtype=torch.float64) * factors
    return steps, (torch.cat([energy[..., None], least], -1) / max(1, count)).cummin(-1).values


def price_of(codes: list[JointCodes], bits: float) -> float:
    """Returns the price of a bit at which a token takes at most `bits` in all these codes together (bisection)."""
    low, high = 1e-30, max(float(own.errors[..., 0].max()) for own in codes) + 1e-30
    for _ in range(60):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if sum(own.at(middle).bits for own in codes) > bits else (low, middle)
    return high
