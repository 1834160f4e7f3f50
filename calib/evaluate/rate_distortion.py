"""The least error that any code can have at a rate: reverse water-filling (Cover and Thomas, Elements of Information Theory,
2nd ed., theorem 10.3.3).

A Gaussian vector of n independent components with variances v_j, told in R bits per value, is known to within

    D = 1/n sum_j min(theta, v_j)        R = 1/n sum_j max(0, 1/2 log2(v_j / theta))

on the average, in squares per value. One water level theta serves all components: those below it get no bits, the others
all end with the same error. Keys of a head are rotated to independent components by the eigenvectors of their covariance
C, and where an error e matters as e^T W e, by those of W^(1/2) C W^(1/2) (W = E[q q^T]: squared errors of logits). The
components of all heads of a layer share its bits. The mean and the covariance are known to both sides and cost nothing.

No code of Gaussian vectors that are independent from token to token does better. Real keys are neither, so a method may
come below the bound; the distance says how much is left to gain, not that it can be gained.
"""

import math

import torch
from torch import Tensor


def spectrum(covariance: Tensor, weight: Tensor | None = None) -> Tensor:
    """Variances of the independent components of all heads together: float64 `[kv_heads * D]`, falling, none below 0.

    `covariance [kv_heads, D, D]`, and `weight` like it for e^T W e as the error; both symmetric and not negative.
    """
    covariance = covariance.double()
    if weight is not None:
        root = square_root(weight.double())
        covariance = root @ covariance @ root
    variances = torch.linalg.eigvalsh(covariance)
    # What rounding leaves of a direction without variance is none: at a high rate it would set the bound.
    least = variances.amax(-1, keepdim=True) * (variances.shape[-1] * torch.finfo(torch.float64).eps)
    return variances.where(variances > least, 0.0).flatten().sort(descending=True).values


def square_root(matrices: Tensor) -> Tensor:
    """The symmetric root of symmetric, not negative matrices `[..., D, D]`."""
    values, vectors = torch.linalg.eigh(matrices)
    return (vectors * values.clamp(min=0).sqrt()[..., None, :]) @ vectors.mT


def least_error(variances: Tensor, bits: float) -> float:
    """D: the least mean squared error per value at `bits` bits per value; `variances` as from `spectrum`.

    Raises ValueError for a rate below 0 or without components.
    """
    n, alive = _checked(variances)
    if not bits >= 0:
        raise ValueError(f"a rate must be at least 0 bits per value, got {bits!r}")
    if not len(alive):
        return 0.0
    logs = alive.log2()
    count = torch.arange(1, len(alive) + 1, dtype=torch.float64)
    # Bits that are spent when the level has sunk to a component's variance and it is about to be given some.
    begins = (logs.cumsum(0) - count * logs) / 2
    given = max(1, int((begins <= n * bits).sum()))
    level = 2.0 ** (float(logs[:given].mean()) - 2 * n * bits / given)
    return (given * level + float(alive[given:].sum())) / n


def least_bits(variances: Tensor, error: float) -> float:
    """R: the least bits per value for a mean squared error per value of at most `error`; the inverse of `least_error`.

    0 where the variances alone are no more than that, infinity for no error. Raises ValueError for an error below 0.
    """
    n, alive = _checked(variances)
    if not error >= 0:
        raise ValueError(f"a mean squared error must be at least 0, got {error!r}")
    if not len(alive) or n * error >= float(alive.sum()):
        return 0.0
    if error == 0:
        return math.inf
    count = torch.arange(1, len(alive) + 1, dtype=torch.float64)
    left = alive.flip(0).cumsum(0).flip(0) - alive  # of the smaller ones
    # The error of all when the level has sunk to a component's variance.
    given = max(1, int((count * alive + left >= n * error).sum()))
    level = (n * error - float(left[given - 1])) / given
    return max(0.0, float((alive[:given].log2() - math.log2(level)).sum())) / (2 * n)


def decibels(ratio: float) -> float:
    """10 log10 of a ratio of squares above 0."""
    return 10 * math.log10(ratio)


def _checked(variances: Tensor) -> tuple[int, Tensor]:
    """How many components there are, and the variances of those that have any, falling."""
    variances = variances.double().cpu()
    if not len(variances) or not bool((variances >= 0).all()):
        raise ValueError(f"variances must be at least 0 and at least one, got {variances.tolist()}")
    return len(variances), variances[variances > 0].sort(descending=True).values
