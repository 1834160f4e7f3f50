"""Quality against true bits as an SVG chart: a point for each method, and the Pareto front as a step line."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from calib.evaluate.figures import less_is_better, number, spoken
from calib.evaluate.page.axes import Axis, axis_of, bits_axis, bits_ticks
from calib.evaluate.page.labels import Box, place
from calib.evaluate.page.pareto import front
from calib.html_page.table import words

WIDTH, HEIGHT = 720, 420  # in SVG units
FRAME = Box(56, 12, WIDTH - 12, HEIGHT - 44)
LETTER = 12
RADIUS = 4.0
LEAST = 2**-4  # bits per value; methods with less keep their cache off the device and are left out of the chart
HOST = ", and host memory"
UNENCODED = "nothing is encoded yet"


@dataclass(frozen=True)
class Point:
    """A method on a column.

    Attributes:
        name: the method's name.
        bits: bits per value on the device.
        value: the quality.
        interval: the interval of the quality, if there is one.
        host: whether its cache uses host memory too, which `bits` do not include.
        encoded: whether any token is encoded.
    """

    name: str
    bits: float
    value: float
    interval: tuple[float, float] | None
    host: bool = False
    encoded: bool = True

    @property
    def comparable(self) -> bool:
        """Whether its bits can be compared: no host memory, and something encoded. Other points are hollow and on no front."""
        return self.encoded and not self.host

    def hint(self, figure: str) -> str:
        """Returns the tooltip of the point."""
        around = f" [{number(self.interval[0])}, {number(self.interval[1])}]" if self.interval else ""
        return (
            f"{self.name}: {spoken(figure)} {number(self.value)}{around} at {self.bits:.2f} bits"
            + HOST * self.host
            + ("" if self.encoded else f", {UNENCODED}")
        )


def scatter(points: Sequence[Point], figure: str, title: str) -> Iterator[str]:
    """Yields the chart and a sentence below it; nothing if no point has enough bits.

    Points with host memory, or with nothing encoded, are hollow and on no front, since their bits cannot be compared.

    Args:
        points: the points of one column.
        figure: name of the quality figure.
        title: the column's title.
    """
    left_out = [point for point in points if point.bits < LEAST]
    points = [point for point in points if point.bits >= LEAST]
    if not points:
        return
    less = less_is_better(figure)
    own = [index for index, point in enumerate(points) if point.comparable]
    pairs = [(points[index].bits, points[index].value) for index in own]
    best = [] if less is None else [own[place] for place in front(pairs, less)]
    order = best + [index for index in range(len(points)) if index not in best]
    across = bits_axis([point.bits for point in points])
    ends = [end for point in points for end in (point.value, *(point.interval or ()))]
    up = axis_of(ends, ratios=less is True)  # for perplexities and errors, not for shares
    places = [spot(point, across, up) for point in points]
    yield '<div class="scroll">'
    yield (
        f'<svg class="scatter" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{words(f"{title}: {spoken(figure)} against bits per value of {len(points)} methods")}">'
    )
    yield from frame(across, up, figure, less)
    if best:
        yield f'<path class="front" d="{steps([places[index] for index in best])}"/>'
    boxes = place([points[index].name for index in order], [places[index] for index in order], FRAME, LETTER, RADIUS)
    for index, box in reversed(list(zip(order, boxes, strict=True))):  # the front is drawn last, above the others
        yield from drawn(points[index], places[index], box, up, figure, index in best)
    yield "</svg></div>"
    hollow = [point for point in points if not point.comparable]
    yield f"<p>{words(told([points[index] for index in best], boxes.count(None), figure, hollow, left_out))}</p>"


def told(best: Sequence[Point], nameless: int, figure: str, hollow: Sequence[Point], left_out: Sequence[Point]) -> str:
    """Returns the sentence below the chart: the front, hollow points, and points or names that are not shown."""
    if less_is_better(figure) is None:
        found = f"Whether more or less of {spoken(figure)} is better is not known here, so there is no front."
    elif not best:
        found = "There is no front."
    else:
        listed = ", ".join(f"{point.name} ({point.bits:.2f} bits, {number(point.value)})" for point in best)
        found = f"On the front, which nothing beats at fewer bits: {listed}."
    if any(point.host for point in hollow):
        found += " Hollow: methods that also use host memory, and so are on no front."
    if early := [point.name for point in hollow if not point.encoded]:
        found += f" Hollow, and on no front, because {UNENCODED}: {', '.join(early)}."
    if left_out:
        found += f" Not shown, because they keep no bits on the device: {', '.join(point.name for point in left_out)}."
    return found + (f" {nameless} without room for the name: it is shown under the pointer." if nameless else "")


def spot(point: Point, across: Axis, up: Axis) -> tuple[float, float]:
    """Returns the coordinates of a point."""
    return x_of(across, point.bits), y_of(up, point.value)


def x_of(axis: Axis, value: float) -> float:
    """Returns the x coordinate of a value."""
    return FRAME.left + axis.place(value) * (FRAME.right - FRAME.left)


def y_of(axis: Axis, value: float) -> float:
    """Returns the y coordinate of a value."""
    return FRAME.bottom - axis.place(value) * (FRAME.bottom - FRAME.top)


def frame(across: Axis, up: Axis, figure: str, less: bool | None) -> Iterator[str]:
    """Yields both axes with their ticks, names and grid lines."""
    for tick in bits_ticks(across):
        x = x_of(across, tick)
        yield f'<path class="grid" d="M{x:.1f} {FRAME.top}V{FRAME.bottom}"/>'
        yield f'<text class="axis" x="{x:.1f}" y="{FRAME.bottom + 16}" text-anchor="middle">{tick:g}</text>'
    for tick in up.ticks():
        y = y_of(up, tick)
        yield f'<path class="grid" d="M{FRAME.left} {y:.1f}H{FRAME.right}"/>'
        yield f'<text class="axis" x="{FRAME.left - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:.6g}</text>'
    better = "" if less is None else ", less is better" if less else ", more is better"
    middle = (FRAME.top + FRAME.bottom) / 2
    yield (
        f'<text class="axis" x="{(FRAME.left + FRAME.right) / 2:g}" y="{HEIGHT - 8}" text-anchor="middle">'
        "true bits per value</text>"
    )
    yield (
        f'<text class="axis" transform="translate(13 {middle:g}) rotate(-90)" text-anchor="middle">'
        f"{words(spoken(figure) + better)}</text>"
    )


def steps(places: Sequence[tuple[float, float]]) -> str:
    """Returns the SVG path of a step line: between two points it keeps the quality of the left one."""
    (x, y), *rest = places
    return f"M{x:.1f} {y:.1f}" + "".join(f"H{x:.1f}V{y:.1f}" for x, y in rest) + f"H{FRAME.right}"


def drawn(point: Point, at: tuple[float, float], box: Box | None, up: Axis, figure: str, best: bool) -> Iterator[str]:
    """Yields the SVG of a point with its interval, tooltip and name."""
    x, y = at
    yield f'<g class="{"best" if best else "other" if point.comparable else "host"}"><title>{words(point.hint(figure))}</title>'
    if point.interval:
        low, high = (y_of(up, end) for end in point.interval)
        yield f'<path class="interval" d="M{x:.1f} {low:.1f}V{high:.1f}"/>'
    yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{RADIUS:g}"/>'
    if box is not None:
        yield f'<text x="{box.left:.1f}" y="{box.bottom - 2:.1f}">{words(point.name)}</text>'
    yield "</g>"
