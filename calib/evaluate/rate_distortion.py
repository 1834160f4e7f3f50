"""The least error that any code can have at a rate: reverse water-filling (Cover and Thomas, Elements of Information Theory,
2nd ed., theorem 10.3.3).

A Gaussian vector of n independent components with variances v_j, coded in R bits per value, has at least the mean squared error
per value D:

    D = 1/n sum_j min(theta, v_j)        R = 1/n sum_j max(0, 1/2 log2(v_j / theta))

The water level theta is the same for all components: those with a smaller variance get no bits, the others all have the error
theta. A head's keys are rotated to uncorrelated components by the eigenvectors of their covariance C, or, if the squared error of
e is e^T W e, by those of W^(1/2) C W^(1/2) (W = E[q q^T] gives squared errors of logits). The components of all heads of a layer
share its bits. Mean and covariance are assumed known to the decoder and cost nothing.

No code does better for Gaussian vectors that are independent from token to token. Real keys are neither Gaussian nor independent,
so a method may come below the bound; the distance says how much could be gained at most, not that it can be gained.
"""

import math

import torch
from torch import Tensor


def spectrum(covariance: Tensor, weight: Tensor | None = None) -> Tensor:
    """Returns the variances of the uncorrelated components of all heads: float64 `[kv_heads * D]`, descending, at least 0.

    `covariance` is `[kv_heads, D, D]`; with a `weight` W of the same shape the squared error is e^T W e. Both are symmetric and
    positive semidefinite.
    """
    covariance = covariance.double()
    if weight is not None:
        root = square_root(weight.double())
        covariance = root @ covariance @ root
    variances = torch.linalg.eigvalsh(covariance)
    # Variances that are only rounding error become 0: at a high rate they would determine the bound.
    least = variances.amax(-1, keepdim=True) * (variances.shape[-1] * torch.finfo(torch.float64).eps)
    return variances.where(variances > least, 0.0).flatten().sort(descending=True).values


def square_root(matrices: Tensor) -> Tensor:
    """Returns the symmetric square root of symmetric positive semidefinite matrices `[..., D, D]`."""
    values, vectors = torch.linalg.eigh(matrices)
    return (vectors * values.clamp(min=0).sqrt()[..., None, :]) @ vectors.mT


def least_error(variances: Tensor, bits: float) -> float:
    """Returns the least mean squared error D per value at `bits` bits per value; `variances` as from `spectrum`.

    Raises ValueError for a negative rate, and for variances that are negative or empty.
    """
    n, alive = _checked(variances)
    if not bits >= 0:
        raise ValueError(f"a rate must be at least 0 bits per value, got {bits!r}")
    if not len(alive):
        return 0.0
    logs = alive.log2()
    count = torch.arange(1, len(alive) + 1, dtype=torch.float64)
    # begins[j]: bits spent in total when the water level has sunk to the variance of component j, which then gets its first bits.
    begins = (logs.cumsum(0) - count * logs) / 2
    given = max(1, int((begins <= n * bits).sum()))
    level = 2.0 ** (float(logs[:given].mean()) - 2 * n * bits / given)
    return (given * level + float(alive[given:].sum())) / n


def least_bits(variances: Tensor, error: float) -> float:
    """Returns the least rate R in bits per value for a mean squared error of at most `error` per value: inverse of `least_error`.

    0 if the mean variance is not above `error`; infinity for an error of 0. Raises ValueError for a negative error.
    """
    n, alive = _checked(variances)
    if not error >= 0:
        raise ValueError(f"a mean squared error must be at least 0, got {error!r}")
    if not len(alive) or n * error >= float(alive.sum()):
        return 0.0
    if error == 0:
        return math.inf
    count = torch.arange(1, len(alive) + 1, dtype=torch.float64)
    left = alive.flip(0).cumsum(0).flip(0) - alive  # sum of the smaller variances
    # count * alive + left: total error when the water level has sunk to a component's variance.
    given = max(1, int((count * alive + left >= n * error).sum()))
    level = (n * error - float(left[given - 1])) / given
    return max(0.0, float((alive[:given].log2() - math.log2(level)).sum())) / (2 * n)


def decibels(ratio: float) -> float:
    """10 log10 of a positive ratio of squares."""
    return 10 * math.log10(ratio)


def _checked(variances: Tensor) -> tuple[int, Tensor]:
    """Returns the number of components, and the variances above 0 in descending order."""
    variances = variances.double().cpu()
    if not len(variances) or not bool((variances >= 0).all()):
        raise ValueError(f"variances must be at least 0 and at least one, got {variances.tolist()}")
    return len(variances), variances[variances > 0].sort(descending=True).values
