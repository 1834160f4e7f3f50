"""Positions for the names of points in a chart, without overlaps."""

from collections.abc import Sequence
from dataclasses import dataclass

WIDE = 0.6  # width of a letter as a share of its height, for bold system fonts


@dataclass(frozen=True)
class Box:
    """A rectangle, y growing downwards."""

    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: "Box") -> bool:
        """Whether the two boxes overlap."""
        across = self.left < other.right and other.left < self.right
        return across and self.top < other.bottom and other.top < self.bottom

    def inside(self, other: "Box") -> bool:
        """Whether the box lies within the other."""
        across = other.left <= self.left and self.right <= other.right
        return across and other.top <= self.top and self.bottom <= other.bottom


def place(
    names: Sequence[str], points: Sequence[tuple[float, float]], frame: Box, letter: float, radius: float
) -> list[Box | None]:
    """Returns a box next to its point for each name, or None if there is no free one. Earlier names have priority.

    Args:
        names: the names, most important first.
        points: coordinates of the points; no name covers a point.
        frame: the chart's frame, which contains all boxes.
        letter: height of the letters.
        radius: radius of the points.
    """
    taken = [Box(x - radius, y - radius, x + radius, y + radius) for x, y in points]
    found: list[Box | None] = []
    for name, (x, y) in zip(names, points, strict=True):
        boxes = around(x, y, len(name) * WIDE * letter, letter, radius + 2)
        free = (box for box in boxes if box.inside(frame) and not any(box.meets(other) for other in taken))
        found.append(next(free, None))
        if found[-1] is not None:
            taken.append(found[-1])
    return found


def around(x: float, y: float, wide: float, high: float, gap: float) -> list[Box]:
    """Returns candidate boxes to the right, to the left, above and below a point, then at its corners."""
    lefts = {"right": x + gap, "middle": x - wide / 2, "left": x - gap - wide}
    tops = {"middle": y - high / 2, "above": y - gap - high, "below": y + gap}
    order = [("right", "middle"), ("left", "middle"), ("middle", "above"), ("middle", "below")]
    order += [(side, level) for side in ("right", "left") for level in ("above", "below")]
    return [Box(lefts[s], tops[t], lefts[s] + wide, tops[t] + high) for s, t in order]
