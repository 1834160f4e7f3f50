"""The Pareto front: the methods that no other one beats in bits and in quality at once."""

from collections.abc import Sequence


def front(points: Sequence[tuple[float, float]], less: bool) -> list[int]:
    """Indices of the points (bits, quality) on the front, from few bits to many.

    Args:
        points: no NaN among them. Of equal points the first counts.
        less: whether a lower quality figure is the better one.
    """
    sign = 1 if less else -1
    best, found = float("inf"), []
    for index in sorted(range(len(points)), key=lambda index: (points[index][0], sign * points[index][1], index)):
        if sign * points[index][1] < best:
            best = sign * points[index][1]
            found.append(index)
    return found
