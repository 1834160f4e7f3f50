"""Chooses one candidate for each layer so that the mean cost stays within a budget and the sum of errors is as small as possible.

For any Lagrange multiplier (price of a bit), only a layer's candidates on the lower convex hull of (cost, error) can be optimal
(Shoham and Gersho, 1988, Efficient bit allocation for an arbitrary set of quantizers). Taking the hulls' edges, steepest first, as
long as they fit, is therefore optimal for the cost reached; the rest of the budget is filled greedily with any candidates.
"""

from collections.abc import Sequence
from itertools import pairwise

TINY = 1e-9  # bits per value: tolerance for rounding errors in sums of costs


def cheapest(costs: Sequence[Sequence[float]], errors: Sequence[Sequence[float]], budget: float) -> list[int] | None:
    """Returns the index of each layer's candidate, or None if even the smallest costs exceed the budget.

    Args:
        costs: costs by layer and candidate, at least one candidate for each layer.
        errors: errors by layer and candidate.
        budget: largest mean of the layers' costs.
    """
    hulls = [hull(*pair) for pair in zip(costs, errors, strict=True)]
    chosen = [corners[0] for corners in hulls]
    left = budget * len(costs) - sum(cost[position] for cost, position in zip(costs, chosen, strict=True)) + TINY
    if left < 0:
        return None
    edges = [
        ((error[b] - error[a]) / (cost[b] - cost[a]), layer, b)
        for layer, (corners, cost, error) in enumerate(zip(hulls, costs, errors, strict=True))
        for a, b in pairwise(corners)
    ]
    for _, layer, position in sorted(edges):  # slopes rise along a hull, so a layer's edges stay in order
        step = costs[layer][position] - costs[layer][chosen[layer]]
        if step > left:
            break
        left, chosen[layer] = left - step, position
    while (found := _best_move(costs, errors, chosen, left)) is not None:
        layer, position = found
        left += costs[layer][chosen[layer]] - costs[layer][position]
        chosen[layer] = position
    return chosen


def hull(costs: Sequence[float], errors: Sequence[float]) -> list[int]:
    """Returns the indices of the candidates on the lower convex hull, from the least cost to the least error."""
    found: list[int] = []
    for position in sorted(range(len(costs)), key=lambda position: (costs[position], errors[position], position)):
        if found and errors[position] >= errors[found[-1]]:
            continue
        while len(found) > 1 and not _below(costs, errors, found[-2], found[-1], position):
            found.pop()
        found.append(position)
    return found


def _below(costs: Sequence[float], errors: Sequence[float], a: int, b: int, c: int) -> bool:
    """Whether candidate `b` lies below the line from `a` to `c`."""
    return (errors[b] - errors[a]) * (costs[c] - costs[a]) < (errors[c] - errors[a]) * (costs[b] - costs[a])


def _best_move(
    costs: Sequence[Sequence[float]], errors: Sequence[Sequence[float]], chosen: Sequence[int], left: float
) -> tuple[int, int] | None:
    """Returns the (layer, candidate) change that reduces the error most and costs at most `left` more; None if there is none."""
    moves = [
        (errors[layer][now] - errors[layer][position], -layer, -position)
        for layer, now in enumerate(chosen)
        for position in range(len(costs[layer]))
        if costs[layer][position] - costs[layer][now] <= left and errors[layer][position] < errors[layer][now]
    ]
    if not moves:
        return None
    _, layer, position = max(moves)
    return -layer, -position
