"""The divergences of a stream's layers as an SVG heat map: one square for each pair of layers, with groups outlined."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

CELL = 20  # side of a square in SVG units; the drawing is scaled to the page
LETTERS = 1 / 40  # least height of letters, as a share of the drawing's width, which is 360 pixels on a phone
TICKS = 16  # most layers numbered along an axis
WRITTEN = 12  # most layers with which every square has its value written in it
DARK = 0.6  # share of full colour from which on the value is written in the page's background colour


def heat_map(divergence: Tensor, groups: Sequence[Sequence[int]], stream: str) -> str:
    """Returns the drawing as SVG; colour is proportional to the divergence, full at ln 2.

    Args:
        divergence: `[layers, layers]`, 0 to ln 2.
        groups: the layers of each group, which are adjacent.
        stream: `keys` or `values`, for the drawing's label.
    """
    layers = len(divergence)
    grid = Grid(CELL * 2 if layers <= WRITTEN else CELL, layers)
    size = grid.margin + layers * grid.cell + 4
    return "\n".join(
        [
            f'<svg class="map" viewBox="0 0 {size} {size}" style="max-width:{min(40, max(12, size // 16))}rem;'
            f'font-size:{grid.letter}px" role="img" aria-label="Divergence of the {stream} of each pair of layers">',
            *axes(grid),
            *squares(divergence, grid),
            *outlines(groups, grid),
            "</svg>",
        ]
    )


@dataclass(frozen=True)
class Grid:
    """The drawing's geometry in SVG units: `cell` is the side of a square, `layers` the number of squares in a row."""

    cell: int
    layers: int

    @property
    def letter(self) -> int:
        """Height of the letters."""
        return max(11, round(self.cell * self.layers * LETTERS))

    @property
    def margin(self) -> int:
        """Room for the numbers above and to the left."""
        return 5 * self.letter // 2

    def position(self, layer: int) -> int:
        """Returns the coordinate at which the layer's squares begin."""
        return self.margin + layer * self.cell


def axes(grid: Grid) -> Iterator[str]:
    """Yields the layers' numbers above and to the left."""
    near = grid.margin - grid.letter // 2
    for layer in range(0, grid.layers, math.ceil(grid.layers / TICKS)):
        middle = grid.position(layer) + grid.cell / 2
        yield f'<text class="axis" x="{middle:g}" y="{near}" text-anchor="middle">{layer}</text>'
        yield f'<text class="axis" x="{near}" y="{middle + grid.letter / 3:.1f}" text-anchor="end">{layer}</text>'


def squares(divergence: Tensor, grid: Grid) -> Iterator[str]:
    """Yields a square for each pair, with its divergence as a tooltip and, if there are few layers, written in it."""
    rows, side = divergence.tolist(), grid.cell - 1  # a gap, so that squares of one colour can be told apart
    for first, row in enumerate(rows):
        for second, value in enumerate(row):
            x, y = grid.position(second), grid.position(first)
            share = min(1.0, value / math.log(2))
            yield (
                f'<rect x="{x}" y="{y}" width="{side}" height="{side}" fill-opacity="{share:.3f}">'
                f"<title>layers {first} and {second}: {value:.4f}</title></rect>"
            )
            if grid.layers <= WRITTEN:
                tone = " dark" if share >= DARK else ""
                yield (
                    f'<text class="value{tone}" x="{x + side / 2:g}" y="{y + side / 2 + 4:g}" text-anchor="middle">'
                    f"{value:.2f}</text>"
                )


def outlines(groups: Sequence[Sequence[int]], grid: Grid) -> Iterator[str]:
    """Yields a frame around the pairs of each group."""
    for number, layers in enumerate(groups):
        start, width = grid.position(layers[0]) - 0.5, len(layers) * grid.cell
        yield (
            f'<rect class="group" x="{start:g}" y="{start:g}" width="{width}" height="{width}">'
            f"<title>group {number}</title></rect>"
        )
