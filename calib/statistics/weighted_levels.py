"""Exact weighted k-means in one dimension: the best quantisation levels of a histogram, by dynamic programming.

Clusters of points on a line are intervals: the best k clusters of the first j points are the best k - 1 clusters of the first i
points and the interval i ... j - 1, for the best i. So there is no random start and no local minimum.
"""

import torch
from torch import Tensor

LEAST = 1e-12  # bins with a smaller share of the total weight are left out: float64 sums hardly resolve them


def best_levels(weight: Tensor, moment: Tensor, count: int) -> Tensor:
    """Returns the `count` increasing levels with the least sum of w (y - level)^2: float32 `[count]` on [-1, 1].

    Args:
        weight: w of each bin, float64 `[bins]`, none negative.
        moment: sum of w y of each bin, float64 `[bins]`, y on [-1, 1]; a bin counts as one point at its mean y.
        count: number of levels.

    If there are fewer points than levels, the points are the levels and the last is repeated; without points levels are uniform.
    """
    some = weight > LEAST * weight.sum()
    w, y = weight[some], moment[some] / weight[some]
    if not len(w):
        return torch.linspace(-1, 1, count, dtype=torch.float32)
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
