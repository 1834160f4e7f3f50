"""The bases of `klt`: coordinates that are uncorrelated, and in which equal squared errors count the same.

For each layer, KV head and stream of vectors x (keys, values, keys before RoPE), with C the covariance of x:

    W  = 1/2 F + 1/2 P            F as measured (`sensitivity.py`); P = E[q q^T] of keys, of values sum_h Wo_h^T Wo_h over
                                  the query heads of the group, scaled so that tr(P C) = tr(F C)
    R  = W^(1/2)                  W and C shrunk towards isotropy
    T  = U^T R                    U the eigenvectors of R C R, largest eigenvalue first
    y  = T (x - mean)             sum_j (y_j - y^_j)^2 = (x - x^)^T W (x - x^), because T^T T = W

Values have a second basis, for the rest r = v - M k that keys k before RoPE do not predict (`calib/runtime/stages/prediction.py`).
With K and V the covariances of keys before RoPE and values, X = E[v k^T], and N the covariance of the keys' coding error, whose
variance is at most `theta` in each component:

    M   = X (K + N)^-1
    C_r = V - M X^T - X M^T + M (K + N) M^T

In this basis tokens are divided by their own size s before coding (`calib/runtime/stages/codec/sized.py`), so errors are
proportional to s and F is E[s^2 g g^T]. A token with much attention often has a small value and a large g; without s it would
count almost nothing in C_r and much in F.

F measures which errors matter on the corpus, P which errors matter for any query. Half of each also suits other text; a basis of F
alone drops directions that the corpus did not need.

Shapes: S streams (`transformed_streams.py`), L layers, H KV heads, D = head_dim.
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
# Least tr(F C) of a head, as a share of the mean: a head whose errors affected no answer (a short sliding window) still gets a
# basis, at hardly any bits.
LEAST = 1e-6
CODED = 1.5  # bits per channel of the keys from which values are predicted; M and the rest depend little on it


@dataclass(frozen=True)
class Bases:
    """All bases of a model, float64 on the CPU.

    Attributes:
        mean: of each stream, `[S, L, H, D]`.
        transform: T, `[S, L, H, D, D]`, rows are components.
        deviation: standard deviation of each component, `[S, L, H, D]`, above 0.
        rest: prediction and basis of the values' rest; None without keys before RoPE.
    """

    mean: Tensor
    transform: Tensor
    deviation: Tensor
    rest: "Rest | None" = None


@dataclass(frozen=True)
class Rest:
    """The prediction of values from keys before RoPE and the basis of the rest r; float64 on the CPU.

    Attributes:
        matrix: M, `[L, H, D, D]`.
        bits: bits of each component of the keys that M assumes, int64 `[L, H, D]`, 0 ... 8.
        transform: T of r, `[L, H, D, D]`, with errors in units of the token's size.
        deviation: standard deviations of the components, `[L, H, D]`, above 0.
    """

    matrix: Tensor
    bits: Tensor
    transform: Tensor
    deviation: Tensor


def bases(moments: SecondMoments, sensitivity: Sensitivity | None, output: Tensor) -> Bases:
    """Returns the bases computed from the statistics.

    Args:
        moments: measured on the corpus.
        sensitivity: F; if None or without sequences, W is P alone, with the same weight for every head and stream.
        output: sum_h Wo_h^T Wo_h, float64 `[L, H, D, D]` (`calib/capture/output_projection.py`).
    """
    weight, covariance = errors_weight(moments, sensitivity, output), moments.covariance()
    transform, deviation = principal(weight, covariance)
    rest = None
    if len(covariance) == 3:
        rest = rest_of_values(moments, sensitivity, output, weight[1], transform[2], deviation[2])
    return Bases(moments.mean(), transform, deviation, rest)


def errors_weight(moments: SecondMoments, sensitivity: Sensitivity | None, output: Tensor) -> Tensor:
    """Returns W of every stream, layer and head, float64 `[S, L, H, D, D]`; arguments as in `bases`."""
    covariance, asked = moments.covariance(), moments.asked()
    papers = torch.stack([asked[0], output, *asked[1:]])
    if sensitivity is not None and sensitivity.is_known:
        return blended(sensitivity.mean(), papers, covariance)
    heads = 2 * covariance[0, ..., 0, 0].numel()  # keys and values of all layers and heads: their tr(W C) sum to 1
    return shrunk(scaled(papers, covariance, torch.full(covariance.shape[:3], 1 / heads, dtype=torch.float64)))


def blended(measured: Tensor, papers: Tensor, covariance: Tensor) -> Tensor:
    """Returns W from F (`measured`) and P (`papers`), with P scaled so that tr(P C) = tr(F C): all `[..., D, D]`."""
    share = traced(measured, covariance)
    share = share.clamp(min=LEAST * float(share.mean()))
    return shrunk(MEASURED * measured + (1 - MEASURED) * scaled(papers, covariance, share))


def principal(weight: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Returns T `[..., D, D]` from the errors' `weight` W and the vectors' `covariance` C, and its components' standard deviations.

    The deviations are `[..., D]`, above 0.
    """
    root, spread = square_root(weight), shrunk(covariance)
    transform = leading(root @ spread @ root, root.shape[-1]).double() @ root
    variance = (transform @ covariance * transform).sum(-1)
    # Steps must be above 0: a component without variance on the corpus gets a small part of its variance under the shrunk C.
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
    """Returns the prediction of values from keys before RoPE, and the basis of the rest.

    Args:
        moments, sensitivity, output: as in `bases`.
        weight: W of values, `[L, H, D, D]`, used if no sensitivity was measured.
        keys: T of keys before RoPE, `[L, H, D, D]`.
        deviation: standard deviations of their components, `[L, H, D]`.
    """
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
    """Returns theta, the error per component at which reverse water-filling of `variance [..., D]` spends `bits` per component.

    The result is `[...]`.
    """
    low, high = variance.log2().amin(-1) - 2 * bits, variance.log2().amax(-1)
    for _ in range(50):
        middle = (low + high) / 2
        spent = ((variance.log2() - middle[..., None]) / 2).clamp(min=0).mean(-1)
        low, high = torch.where(spent > bits, middle, low), torch.where(spent > bits, high, middle)
    return torch.exp2((low + high) / 2)


def scaled(weight: Tensor, covariance: Tensor, share: Tensor) -> Tensor:
    """Returns `weight [..., D, D]` scaled so that tr(W C) is `share [...]`; a weight of 0 becomes the identity first.

    Unscaled if tr(W C) is 0, as for C = 0.
    """
    nothing = weight.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None] == 0
    weight = torch.where(nothing, torch.eye(weight.shape[-1], dtype=weight.dtype), weight)
    found = traced(weight, covariance)
    return weight * torch.where(found > 0, share / found, 1.0)[..., None, None]


def traced(weight: Tensor, covariance: Tensor) -> Tensor:
    """Returns tr(W C) = E[e^T W e] for e = x - mean, the weighted error of dropping the whole vector: `[...]`."""
    return (weight * covariance).sum((-1, -2))


def square_root(matrix: Tensor) -> Tensor:
    """Returns the symmetric square root of symmetric, positive semi-definite matrices `[..., D, D]`."""
    values, rows = torch.linalg.eigh(matrix)
    return rows * values.clamp(min=0).sqrt()[..., None, :] @ rows.mT
