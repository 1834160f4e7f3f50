"""A figure against the context as an SVG chart with logarithmic axes: a line for each method, with quartiles and name."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from calib.evaluate.page.axes import Axis, bits_axis
from calib.evaluate.page.labels import Box
from calib.html_page.table import words

WIDTH, HEIGHT = 720, 360  # in SVG units
FRAME = Box(64, 12, WIDTH - 170, HEIGHT - 44)  # names are to the right of it
LETTER = 14.0  # vertical distance between names
RADIUS = 3.5
NEAR = 34.0  # a context closer than this to the last labelled one has no label
LONGEST = 19  # most letters of a name; longer ones are cut
COLOURS = 8  # number of the page's colours; further lines repeat them dashed

STYLE = """\
.curves { display: block; width: 100%; min-width: 34rem; max-width: 54rem; height: auto; font-size: 12px; }
.curves text { font-family: system-ui, sans-serif; fill: var(--soft); }
.curves .grid { stroke: var(--line); fill: none; }
.curves path.line { fill: none; stroke: var(--own); stroke-width: 1.8; }
.curves .dashed path.line { stroke-dasharray: 5 3; }
.curves path.whisker, .curves path.lead { fill: none; stroke: var(--own); stroke-opacity: .55; }
.curves circle { fill: var(--own); }
.curves text.name { fill: var(--ink); }
""" + "".join(f".own-{position} {{ --own: var(--k{position}); }}\n" for position in range(COLOURS))


@dataclass(frozen=True)
class Dot:
    """A figure at a context, with its quartiles (`ends`) if it has some, and a tooltip (`hint`)."""

    context: int
    value: float
    ends: tuple[float, float] | None
    hint: str


def curves(lines: Mapping[str, Sequence[Dot]], looks: Mapping[str, int], figure: str, title: str) -> Iterator[str]:
    """Yields the SVG chart; nothing if there is no positive figure.

    Args:
        lines: dots by name; figures that are not positive are left out.
        looks: number of each name's colour, the same in all charts of a page.
        figure: description of the figure.
        title: title of the chart for screen readers.
    """
    drawn = {name: sorted((d for d in dots if d.value > 0), key=lambda d: d.context) for name, dots in lines.items()}
    drawn = {name: dots for name, dots in drawn.items() if dots}
    if not drawn:
        return
    dots = [dot for found in drawn.values() for dot in found]
    across = bits_axis([dot.context for dot in dots])
    up = bits_axis([end for dot in dots for end in (dot.value, *(dot.ends or ()))])
    yield f'<div class="scroll"><svg class="curves" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{words(title)}">'
    yield from frame(across, up, sorted({dot.context for dot in dots}), figure)
    ends = {name: y_of(up, found[-1].value) for name, found in drawn.items()}
    levels = spread(ends, FRAME.top + LETTER / 2, FRAME.bottom)
    for name, found in drawn.items():
        look = looks[name]
        yield f'<g class="own-{look % COLOURS}{" dashed" if look >= COLOURS else ""}">'
        yield from line(found, across, up)
        yield from label(name, x_of(across, found[-1].context), ends[name], levels[name])
        yield "</g>"
    yield "</svg></div>"


def frame(across: Axis, up: Axis, contexts: Sequence[int], figure: str) -> Iterator[str]:
    """Yields both axes with their ticks, names and grid lines."""
    last = -NEAR
    for context in contexts:
        x = x_of(across, context)
        if x - last >= NEAR:
            last = x
            yield f'<path class="grid" d="M{x:.1f} {FRAME.top}V{FRAME.bottom}"/>'
            yield f'<text x="{x:.1f}" y="{FRAME.bottom + 16}" text-anchor="middle">{context}</text>'
    for tick in up.ticks():
        y = y_of(up, tick)
        yield f'<path class="grid" d="M{FRAME.left} {y:.1f}H{FRAME.right}"/>'
        yield f'<text x="{FRAME.left - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:.6g}</text>'
    middle = (FRAME.top + FRAME.bottom) / 2
    yield f'<text x="{(FRAME.left + FRAME.right) / 2:g}" y="{HEIGHT - 8}" text-anchor="middle">context, tokens</text>'
    yield f'<text transform="translate(13 {middle:g}) rotate(-90)" text-anchor="middle">{words(figure)}</text>'


def line(dots: Sequence[Dot], across: Axis, up: Axis) -> Iterator[str]:
    """Yields a method's line with its dots, quartiles and tooltips."""
    positions = [(x_of(across, dot.context), y_of(up, dot.value)) for dot in dots]
    yield f'<path class="line" d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in positions)}"/>'
    for dot, (x, y) in zip(dots, positions, strict=True):
        yield f"<g><title>{words(dot.hint)}</title>"
        if dot.ends is not None:
            low, high = (y_of(up, end) for end in dot.ends)
            yield f'<path class="whisker" d="M{x - 3:.1f} {low:.1f}h6M{x:.1f} {low:.1f}V{high:.1f}M{x - 3:.1f} {high:.1f}h6"/>'
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{RADIUS:g}"/></g>'


def label(name: str, x: float, y: float, level: float) -> Iterator[str]:
    """Yields the line's name to the right of the frame, with a leader from the end of the line."""
    short = name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…"
    yield f'<path class="lead" d="M{x + RADIUS:.1f} {y:.1f}L{FRAME.right + 6} {level:.1f}"/>'
    yield f'<text class="name" x="{FRAME.right + 9}" y="{level + 4:.1f}"><title>{words(name)}</title>{words(short)}</text>'


def spread(levels: Mapping[str, float], low: float, high: float) -> dict[str, float]:
    """Moves the names' vertical positions apart until they do not overlap, in order; with too many names the gaps are smaller."""
    order = sorted(levels, key=lambda name: levels[name])
    gap = min(LETTER, (high - low) / max(len(order) - 1, 1))
    found: dict[str, float] = {}
    at = low - gap
    for position, name in enumerate(order):
        most = high - gap * (len(order) - 1 - position)  # those below need room as well
        at = found[name] = min(max(levels[name], at + gap), most)
    return found


def x_of(axis: Axis, value: float) -> float:
    """Returns the x coordinate of a value."""
    return FRAME.left + axis.place(value) * (FRAME.right - FRAME.left)


def y_of(axis: Axis, value: float) -> float:
    """Returns the y coordinate of a value."""
    return FRAME.bottom - axis.place(value) * (FRAME.bottom - FRAME.top)
