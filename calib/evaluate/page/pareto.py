"""The Pareto front: the methods to which no other one is superior in both bits and quality."""

from collections.abc import Sequence


def front(points: Sequence[tuple[float, float]], less: bool) -> list[int]:
    """Returns the indices of the points (bits, quality) on the front, from few bits to many.

    Args:
        points: the points, without NaN. Of equal points only the first is on the front.
        less: whether a lower quality figure is better.
    """
    sign = 1 if less else -1
    best, found = float("inf"), []
    for index in sorted(range(len(points)), key=lambda index: (points[index][0], sign * points[index][1], index)):
        if sign * points[index][1] < best:
            best = sign * points[index][1]
            found.append(index)
    return found
