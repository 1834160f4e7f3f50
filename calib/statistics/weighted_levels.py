"""Weighted k-means in one dimension, exactly: the best levels of a histogram, by dynamic programming.

Clusters of points on a line are stretches of them: the best k clusters of the first j points are the best k - 1 of the first i and
the stretch from there, for the best i. No start is drawn and no local minimum is met.
"""

import torch
from torch import Tensor

LEAST = 1e-12  # of all weight: what sums of float64 still tell apart


def best_levels(weight: Tensor, moment: Tensor, count: int) -> Tensor:
    """`count` rising levels of least sum of w (y - level)^2: float32 `[count]` on [-1, 1].

    Args:
        weight: w of each bin, float64 `[bins]`, none below 0.
        moment: sum of w y in each bin, the same shape, y on [-1, 1]: a bin is one point at its mean.

    Points fewer than levels are the levels, the last of them repeated; without any point levels are uniform.
    """
    some = weight > LEAST * weight.sum()
    w, y = weight[some], moment[some] / weight[some]
    if not len(w):
        return torch.linspace(-1, 1, count)
    if len(w) <= count:
        return torch.cat([y, y[-1:].expand(count - len(w))]).float()
    sums = [torch.cat([w.new_zeros(1), part.cumsum(0)]) for part in (w, w * y, w * y * y)]
    mass, first, second = (part[None] - part[:, None] for part in sums)  # [i, j]: of the points i ... j - 1
    cost = second - first.square() / mass
    cost = torch.where(mass > 0, cost.clamp(min=0), torch.inf)
    best, starts = cost[0], []
    for _ in range(count - 1):
        best, start = (best[:, None] + cost).min(0)
        starts.append(start)
    ends = [len(w)]
    for start in reversed(starts):
        ends.append(int(start[ends[-1]]))
    cuts = torch.tensor([0, *reversed(ends)])
    return ((sums[1][cuts[1:]] - sums[1][cuts[:-1]]) / (sums[0][cuts[1:]] - sums[0][cuts[:-1]])).float().clamp(-1, 1)
