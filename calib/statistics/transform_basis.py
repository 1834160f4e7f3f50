"""The bases of `klt`: coordinates that are uncorrelated, and in which every error counts the same.

Of a layer, KV head and stream, with C the covariance of x:

    W  = 1/2 F + 1/2 P            F as measured (`sensitivity.py`); P = E[q q^T] of keys, of values sum_h Wo_h^T Wo_h over
                                  the query heads of the group, scaled so that tr(P C) = tr(F C)
    R  = W^(1/2)                  W and C shrunk towards isotropy
    T  = U^T R                    U the eigenvectors of R C R, largest eigenvalue first
    y  = T (x - mean)             sum_j (y_j - y^_j)^2 = (x - x^)^T W (x - x^), because T^T T = W

Values have a second basis, of what keys do not predict of them (`calib/runtime/stages/prediction.py`). With K and V the
covariances of keys before RoPE and values, X = E[v k^T] and N what coding errs by in keys, at most `theta` in each component:

    M   = X (K + N)^-1
    C_r = V - M X^T - X M^T + M (K + N) M^T

This basis is of tokens over their own size s (`calib/runtime/stages/codec/sized.py`), whose errors are as large as they are: F is
E[s^2 g g^T] there. A token that many others attend to has a small value and a large g, and without s it would count for nothing
in C_r and for much in F.

F says what matters on the text that was seen, P what any query may ask: half of each holds on other text (a basis of F
alone drops what its text did not need).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from calib.runtime.stages.transform import inverse
from calib.statistics.residual_basis import leading
from calib.statistics.second_moments import SecondMoments
from calib.statistics.sensitivity import Sensitivity
from calib.statistics.shrinkage import shrunk

MEASURED = 0.5  # share of F in W
# Of the mean head's tr(F C), the least that a head counts: one whose errors no answer saw (a short sliding window) has a
# basis still, and costs next to nothing.
LEAST = 1e-6
CODED = 1.5  # bits of a key's channel, that values are predicted from: more or fewer change M and its rest little


@dataclass(frozen=True)
class Bases:
    """All bases of a model, float64 on the CPU.

    Attributes:
        mean: `[S, L, H, D]`.
        transform: T, `[S, L, H, D, D]`, rows are components.
        deviation: of each component, `[S, L, H, D]`, above 0.
        rest: of values that are predicted; None where there are no keys before RoPE.
    """

    mean: Tensor
    transform: Tensor
    deviation: Tensor
    rest: "Rest | None" = None


@dataclass(frozen=True)
class Rest:
    """What is left of values that keys before RoPE predict, float64 on the CPU.

    Attributes:
        matrix: M, `[L, H, D, D]`.
        bits: of each component of the keys that M was made for, int64 `[L, H, D]`, 0 ... 8.
        transform: of tokens over their own size, `[L, H, D, D]`.
        deviation: `[L, H, D]`, above 0.
    """

    matrix: Tensor
    bits: Tensor
    transform: Tensor
    deviation: Tensor


def bases(moments: SecondMoments, sensitivity: Sensitivity | None, output: Tensor) -> Bases:
    """The bases that the statistics give.

    Args:
        moments: of a corpus.
        sensitivity: None or of no sequence: W is P alone, and every head and stream counts the same.
        output: sum_h Wo_h^T Wo_h, float64 `[L, H, D, D]` (`output_projection.py`).
    """
    weight, covariance = errors_weight(moments, sensitivity, output), moments.covariance()
    transform, deviation = principal(weight, covariance)
    rest = None
    if len(covariance) == 3:
        rest = rest_of_values(moments, sensitivity, output, weight[1], transform[2], deviation[2])
    return Bases(moments.mean(), transform, deviation, rest)


def errors_weight(moments: SecondMoments, sensitivity: Sensitivity | None, output: Tensor) -> Tensor:
    """W of every stream, layer and head, float64 `[S, L, H, D, D]`; arguments as in `bases`."""
    covariance, asked = moments.covariance(), moments.asked()
    papers = torch.stack([asked[0], output, *asked[1:]])
    if sensitivity is not None and sensitivity.is_known:
        return blended(sensitivity.mean(), papers, covariance)
    heads = 2 * covariance[0, ..., 0, 0].numel()  # of both streams that a cache stores: together they count 1
    return shrunk(scaled(papers, covariance, torch.full(covariance.shape[:3], 1 / heads, dtype=torch.float64)))


def blended(measured: Tensor, papers: Tensor, covariance: Tensor) -> Tensor:
    """W of F `measured` and P, `papers`, which stand for each other on a scale of tr(F C): all `[..., D, D]`."""
    share = traced(measured, covariance)
    share = share.clamp(min=LEAST * float(share.mean()))
    return shrunk(MEASURED * measured + (1 - MEASURED) * scaled(papers, covariance, share))


def principal(weight: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
    """T `[..., D, D]` of errors' `weight` and the vectors' `covariance`, and the deviations of its components `[..., D]`."""
    root, spread = square_root(weight), shrunk(covariance)
    transform = leading(root @ spread @ root, root.shape[-1]).double() @ root
    variance = (transform @ covariance * transform).sum(-1)
    # A component that the corpus does not move gets steps all the same, of what shrinkage lends it.
    lent = (transform @ spread @ transform.mT).diagonal(dim1=-2, dim2=-1)
    least = torch.finfo(torch.float32).tiny
    return transform, variance.maximum(lent * LEAST).clamp(min=least).sqrt()


def rest_of_values(
    moments: SecondMoments,
    sensitivity: Sensitivity | None,
    output: Tensor,
    weight: Tensor,
    keys: Tensor,
    deviation: Tensor,
) -> Rest:
    """From the transform of `keys` and its components' `deviation`; `weight` is that of values' errors where no sensitivity is
    known, all else as in `bases`."""
    covariance = moments.covariance()
    variance = deviation.square()
    theta = water_level(variance, CODED)[..., None]
    columns = inverse(keys)
    noise = columns * variance.minimum(theta)[..., None, :] @ columns.mT
    coded, crossed = shrunk(covariance[2]) + noise, moments.values_by_keys()
    matrix = torch.cholesky_solve(crossed.mT, torch.linalg.cholesky(coded)).mT
    shared = matrix @ crossed.mT
    left = covariance[1] - shared - shared.mT + matrix @ (covariance[2] + noise) @ matrix.mT
    bits = ((variance / theta).log2() / 2).round().clamp(0, 8).long()
    if sensitivity is not None and sensitivity.is_known:
        weight = blended(sensitivity.sized_mean(), output, left)
    return Rest(matrix, bits, *principal(weight, left))


def water_level(variance: Tensor, bits: float) -> Tensor:
    """The error theta of each component at which reverse water-filling spends so many bits a component: `[...]` of `[..., D]`."""
    low, high = variance.log2().amin(-1) - 2 * bits, variance.log2().amax(-1)
    for _ in range(50):
        middle = (low + high) / 2
        spent = ((variance.log2() - middle[..., None]) / 2).clamp(min=0).mean(-1)
        low, high = torch.where(spent > bits, middle, low), torch.where(spent > bits, high, middle)
    return torch.exp2((low + high) / 2)


def scaled(weight: Tensor, covariance: Tensor, share: Tensor) -> Tensor:
    """`weight [..., D, D]` on a scale at which tr(W C) is `share [...]`; isotropic where it weighs nothing, as it is where C
    is 0."""
    nothing = weight.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None] == 0
    weight = torch.where(nothing, torch.eye(weight.shape[-1], dtype=weight.dtype), weight)
    found = traced(weight, covariance)
    return weight * torch.where(found > 0, share / found, 1.0)[..., None, None]


def traced(weight: Tensor, covariance: Tensor) -> Tensor:
    """tr(W C) = E[e^T W e] of an error e that is all of x - mean: `[...]`."""
    return (weight * covariance).sum((-1, -2))


def square_root(matrix: Tensor) -> Tensor:
    """The symmetric root of a symmetric, positive matrix."""
    values, rows = torch.linalg.eigh(matrix)
    return rows * values.clamp(min=0).sqrt()[..., None, :] @ rows.mT
