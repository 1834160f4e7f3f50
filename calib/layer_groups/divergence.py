"""The divergence of two layers' vectors (CSR, arXiv:2412.11741, "Adjacent transformer layers' KV space is similar").

For a pair of layers: vectors are scaled to norm 1 and projected on the first two principal components of both layers together;
each layer's projections become a histogram of 200 x 200 bins on their common range. The result is the Jensen-Shannon divergence of
the two histograms in nats: 0 if they are equal, ln 2 if no bin has vectors of both.

The divergence is biased by the number of vectors: with few vectors per bin, two samples of one distribution differ. Two samples of
normally distributed vectors of 64 channels are 0.48 apart with 4096 vectors each, 0.12 with 32768, which is of the order of the
paper's threshold of 0.2. So thresholds are meaningful only for a fixed number of vectors.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

BINS = 200


def divergences(vectors: Mapping[int, Tensor], layers: int) -> Tensor:
    """Returns the divergence of every pair of layers in nats: float32 `[layers, layers]`, symmetric.

    Principal components are computed in float64, projections on them in float32.

    Args:
        vectors: by layer, `[V, d]`, d at least 2, V the same for all; layers without vectors are left out.
        layers: number of layers of the model. A layer without vectors has divergence ln 2 from every other.

    Raises:
        ValueError: layers with different numbers of vectors, whose bias would differ.
    """
    counts = {layer: len(x) for layer, x in vectors.items()}
    if len(set(counts.values())) > 1:
        raise ValueError(f"layers have {sorted(set(counts.values()))} vectors: divergences compare equal numbers only")
    found = torch.full((layers, layers), math.log(2), dtype=torch.float64).fill_diagonal_(0)
    # Channels first: the products below read whole rows.
    unit = {layer: torch.nn.functional.normalize(x.float(), dim=-1).T.contiguous() for layer, x in vectors.items()}
    moments = {layer: moments_of(x.double()) for layer, x in unit.items()}
    order = sorted(unit)
    for position, first in enumerate(order[:-1]):
        others = order[position + 1 :]
        axes = torch.stack([principal_axes(moments[first], moments[other]) for other in others]).float()
        projected = axes.flatten(0, 1) @ unit[first]  # one product for all pairs
        for other, mine, points in zip(others, axes, projected.split(2), strict=True):
            found[first, other] = found[other, first] = histogram_divergence(points, mine @ unit[other])
    return found.float()


def moments_of(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns mean `[d]` and second moment `[d, d]` of `x [d, V]`, from which `principal_axes` of two layers follow."""
    return x.mean(1), x @ x.T / x.shape[1]


def principal_axes(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> Tensor:
    """Returns the two leading principal components `[2, d]` of two equally large samples together, given by their moments."""
    mean, moment = ((mine + theirs) / 2 for mine, theirs in zip(first, second, strict=True))
    return torch.linalg.eigh(moment - mean.outer(mean)).eigenvectors[:, -2:].T


def histogram_divergence(first: Tensor, second: Tensor) -> float:
    """Returns the Jensen-Shannon divergence in nats of the histograms of two samples of points `[2, V]` on their common range."""
    low, high = torch.minimum(first.amin(1), second.amin(1)), torch.maximum(first.amax(1), second.amax(1))
    step = torch.where(high > low, high - low, 1) / BINS
    p, q = (
        distribution(((points - low[:, None]) / step[:, None]).long().clamp(max=BINS - 1)) for points in (first, second)
    )
    value = entropy((p + q) / 2) - (entropy(p) + entropy(q)) / 2
    return min(max(value, 0.0), math.log(2))  # rounding may exceed both bounds a little


def distribution(bins: Tensor) -> Tensor:
    """Returns the share of points in each bin, from their bin numbers on both axes, int64 `[2, V]`: float64 `[BINS^2]`."""
    return torch.bincount(bins[0] * BINS + bins[1], minlength=BINS * BINS).double() / bins.shape[1]


def entropy(p: Tensor) -> float:
    """Returns the entropy -sum p ln p."""
    return torch.special.entr(p).sum().item()
