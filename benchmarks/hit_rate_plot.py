"""Draws the results of `hit_rate.py` as SVG: a panel for each k and task, layers from left to right, in light or dark colours."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

SERIES = ("best", "within the step", "guess", "greedy eviction")  # in the order of their CSS classes s0, s1, ...
TASKS = ("answers from 60 lines", "greedy text", "sampled text")
WIDTH, HEIGHT = 210, 150  # size of a panel
LEFT, TOP, ACROSS, DOWN = 64, 74, 50, 58  # margins, and the gaps between panels
STYLE = """\
svg { --page: #fdfdfc; --ink: #1a1a19; --soft: #62615c; --line: #dcdbd6;
  --best: #8a8983; --late: #b7791f; --guess: #1c5cab; --greedy: #d1495b; }
@media (prefers-color-scheme: dark) {
  svg { --page: #171716; --ink: #f2f1ec; --soft: #a3a199; --line: #3a3935;
    --best: #a3a199; --late: #e3b04b; --guess: #7db2f2; --greedy: #ff8a80; }
}
text { font: 12px system-ui, sans-serif; fill: var(--soft); }
.title { fill: var(--ink); font-weight: 600; }
.page { fill: var(--page); }
.grid { stroke: var(--line); }
polyline { fill: none; stroke-width: 2; }
.s0 { stroke: var(--best); stroke-dasharray: 4 3; } .s1 { stroke: var(--late); }
.s2 { stroke: var(--guess); } .s3 { stroke: var(--greedy); }
.d0 { fill: var(--best); } .d1 { fill: var(--late); } .d2 { fill: var(--guess); } .d3 { fill: var(--greedy); }
"""


def plot(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns an SVG image of the shares of attention in `rows`, each with its task, its k and the `SERIES`."""
    counts = sorted({row["k"] for row in rows})
    width = LEFT + len(counts) * (WIDTH + ACROSS) - ACROSS // 2
    height = TOP + len(TASKS) * (HEIGHT + DOWN) - DOWN // 2
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">',
        "<title>Share of the attention to encoded tokens that the k chosen tokens of each KV head get</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="page" width="{width}" height="{height}"/>',
        *legend(),
    ]
    for row in rows:
        x = LEFT + counts.index(row["k"]) * (WIDTH + ACROSS)
        y = TOP + TASKS.index(row["task"]) * (HEIGHT + DOWN)
        lines += [f'<g transform="translate({x} {y})">', *panel(row), "</g>"]
    return "\n".join([*lines, "</svg>", ""])


def legend() -> Iterator[str]:
    """Yields the title, and the names of the lines."""
    yield f'<text class="title" x="{LEFT}" y="20">Share of the attention to encoded tokens that the k chosen ones get</text>'
    for number, name in enumerate(SERIES):
        x = LEFT + 150 * number
        yield f'<polyline class="s{number}" points="{x},36 {x + 22},36"/><circle class="d{number}" cx="{x + 11}" cy="36" r="3"/>'
        yield f'<text x="{x + 28}" y="40">{name}</text>'


def panel(row: Mapping[str, Any]) -> Iterator[str]:
    """Yields the lines of one k and task over the layers, with both axes."""
    layers = len(row[SERIES[0]]["mass"])
    position = [round(WIDTH * (layer + 0.5) / layers, 1) for layer in range(layers)]
    yield f'<text class="title" y="-8">{row["task"]}, k = {row["k"]}</text>'
    for share in (0, 0.5, 1):
        y = height_of(share)
        yield f'<line class="grid" x2="{WIDTH}" y1="{y}" y2="{y}"/><text x="-8" y="{y + 4}" text-anchor="end">{share:g}</text>'
    for layer, x in enumerate(position):
        yield f'<text x="{x}" y="{HEIGHT + 17}" text-anchor="middle">{"layer " * (not layer)}{layer}</text>'
    for number, name in reversed(list(enumerate(SERIES))):
        points = [(x, height_of(share)) for x, share in zip(position, row[name]["mass"], strict=True)]
        yield f'<polyline class="s{number}" points="{" ".join(f"{x},{y}" for x, y in points)}"/>'
        for (x, y), share in zip(points, row[name]["mass"], strict=True):
            yield f'<circle class="d{number}" cx="{x}" cy="{y}" r="3"><title>{name}: {share:.3f}</title></circle>'


def height_of(share: float) -> float:
    """Returns the distance of a share's point from the panel's top."""
    return round(HEIGHT * (1 - share), 1)
