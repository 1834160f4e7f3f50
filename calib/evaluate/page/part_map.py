"""Figures by depth, layer or another part as a coloured table (heat map): methods are rows, parts are columns."""

from collections.abc import Iterator, Sequence

from calib.evaluate.figures import PLACE, maps, number, spoken
from calib.evaluate.page.overview import figures
from calib.evaluate.run_file import Row
from calib.html_page.table import words


def part_maps(found: Sequence[Row], title: str) -> Iterator[str]:
    """Yields a map for each kind of figure with a number in its name that the cells of the column `title` have."""
    names = list(dict.fromkeys(name for row in found for name in maps(figures(row, title))))
    for name in names:
        cells = {row.name: values(row, title, name) for row in found}
        yield from part_map({row: parts for row, parts in cells.items() if parts}, name)


def values(row: Row, title: str, name: str) -> dict[float, float]:
    """Returns a method's figures by part; empty if it has none."""
    known = figures(row, title)
    return {part: float(known[figure]) for part, figure in maps(known).get(name, {}).items()}


def part_map(cells: dict[str, dict[float, float]], name: str) -> Iterator[str]:
    """Yields the HTML of one map; larger figures have more colour."""
    parts = sorted({part for row in cells.values() for part in row})
    every = [value for row in cells.values() for value in row.values()]
    low, high = min(every), max(every)
    before, _, after = (text.strip() for text in spoken(name).partition(PLACE))
    yield f"<h3>{words(before)} &hellip; {words(after)}</h3>"
    yield f"<p>Without colour {number(low)}, full colour {number(high)}.</p>"
    yield '<div class="scroll"><table class="parts"><thead><tr><th scope="col">method</th>'
    yield "".join(f'<th scope="col">{part:g}</th>' for part in parts)
    yield "</tr></thead><tbody>"
    for row, found in cells.items():
        shown = "".join(square(found.get(part), low, high) for part in parts)
        yield f'<tr><th scope="row">{words(row)}</th>{shown}</tr>'
    yield "</tbody></table></div>"


def square(value: float | None, low: float, high: float) -> str:
    """Returns the HTML of one cell of the map, whose share of the full colour shows its value between `low` and `high`."""
    if value is None:
        return "<td></td>"
    share = round(100 * (value - low) / (high - low)) if high > low else 0
    return f'<td style="--share:{share}%">{number(value)}</td>'
