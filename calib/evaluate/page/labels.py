"""Where the names of points find room in a drawing."""

from collections.abc import Sequence
from dataclasses import dataclass

WIDE = 0.6  # width of a letter, of its height: bold ones of the system's fonts


@dataclass(frozen=True)
class Box:
    """A rectangle, y growing downwards."""

    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: "Box") -> bool:
        """Whether the two have room in common."""
        across = self.left < other.right and other.left < self.right
        return across and self.top < other.bottom and other.top < self.bottom

    def inside(self, other: "Box") -> bool:
        """Whether it lies within the other."""
        across = other.left <= self.left and self.right <= other.right
        return across and other.top <= self.top and self.bottom <= other.bottom


def place(
    names: Sequence[str], points: Sequence[tuple[float, float]], frame: Box, letter: float, radius: float
) -> list[Box | None]:
    """A box for each name beside its point, None where there is no room for it. The first ones choose first.

    Args:
        names: in the order of their importance.
        points: where they are drawn; no name covers one.
        frame: the drawing's.
        letter: height of the letters.
        radius: of the points.
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
    """Boxes to the right, to the left, above and below of a point, then at its corners."""
    lefts = {"right": x + gap, "middle": x - wide / 2, "left": x - gap - wide}
    tops = {"middle": y - high / 2, "above": y - gap - high, "below": y + gap}
    order = [("right", "middle"), ("left", "middle"), ("middle", "above"), ("middle", "below")]
    order += [(side, level) for side in ("right", "left") for level in ("above", "below")]
    return [Box(lefts[s], tops[t], lefts[s] + wide, tops[t] + high) for s, t in order]
