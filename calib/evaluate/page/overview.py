"""Table of methods by columns that headings sort; without the script the methods are in the order of the request."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from calib.evaluate.cache_size import is_encoded
from calib.evaluate.figures import interval, number, scalars, spoken
from calib.evaluate.run_file import Row, Run, rows, titles
from calib.evaluate.unsolved import marked, note, unsolved
from calib.html_page.table import words

Cell = Mapping[str, Any]
FAILED = "failed"
EARLY = "nothing is encoded yet: every token is still exact in the window"
PAPER = "paper"  # heading of the bits as counted by the method's paper

SORTING = """
for (const table of document.querySelectorAll("table.sorted")) {
  const body = table.tBodies[0], rows = [...body.rows], heads = [...table.tHead.rows].pop().cells;
  const value = (row, at) => row.cells[at].dataset.value ?? row.cells[at].textContent;
  const order = (at, sign) => (one, other) => {
    const [a, b] = [value(one, at), value(other, at)];
    if (!a || !b) return !a - !b;
    return sign * (isNaN(a) || isNaN(b) ? a.localeCompare(b) : a - b);
  };
  [...heads].forEach((head, at) => {
    const button = document.createElement("button");
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const last = head.getAttribute("aria-sort");
      for (const other of heads) other.removeAttribute("aria-sort");
      const next = last === "ascending" ? "descending" : last === "descending" ? null : "ascending";
      if (!next) return body.append(...rows);
      head.setAttribute("aria-sort", next);
      const methods = rows.filter((row) => !row.classList.contains("group"));
      body.replaceChildren(...methods.sort(order(at, next === "ascending" ? 1 : -1)));
    });
  });
}
"""


@dataclass(frozen=True)
class Part:
    """One column of the HTML table: a figure, the bits or the paper's bits of the cells of one column of the run."""

    title: str
    name: str
    first: bool  # whether it is the first one of its column of the run

    def shown(self, cell: Cell | None) -> str:
        """Returns the HTML of the table's cell; empty if there is no value."""
        look = ' class="first"' if self.first else ""
        if cell is not None and "error" in cell and self.first:
            return f'<td class="first failed" data-value="" title="{words(cell["error"])}">{FAILED}</td>'
        value = None if cell is None or "error" in cell else self.value(cell)
        if value is None:
            return f"<td{look}></td>"
        assert cell is not None
        text = f"{value:.2f}" if self.name in BITS else number(value)
        if self.name == "bits" and not is_encoded(cell["sizes"]):
            return f'<td{look} data-value="{value!r}" title="{EARLY}">{text}*</td>'
        around = interval(cell["figures"], self.name)
        small = f" <small>[{number(around[0])}, {number(around[1])}]</small>" if around else ""
        return f'<td{look} data-value="{value!r}">{text}{small}</td>'

    def value(self, cell: Cell) -> float | None:
        """Returns the cell's value, or None if it has none."""
        found: float | None = BITS[self.name](cell) if self.name in BITS else cell["figures"].get(self.name)
        return found


BITS = {
    "bits": lambda cell: cell["sizes"]["bits_per_value"],
    PAPER: lambda cell: cell["sizes"].get("paper_counting"),
}


def overview(run: Run) -> Iterator[str]:
    """Yields the HTML of the table; on a narrow screen it scrolls sideways, and the methods' names stay visible."""
    found, parts, nothing = rows(run), list[Part](), unsolved(run)
    for title in titles(run):
        names = (*figures_of(found, title), *BITS)
        parts += [Part(title, name, place == 0) for place, name in enumerate(names)]
    yield '<div class="scroll"><table class="sorted"><thead><tr><td></td>'
    for title in titles(run):
        wide = sum(part.title == title for part in parts)
        yield f'<th class="over" colspan="{wide}" scope="colgroup">{words(marked(title, nothing, title))}</th>'
    yield '</tr><tr><th scope="col">method</th>'
    yield "".join(f'<th scope="col">{words(spoken(part.name))}</th>' for part in parts)
    yield "</tr></thead><tbody>"
    group = ""
    for row in found:
        if row.group != group:
            group = row.group
            yield f'<tr class="group"><th colspan="{1 + len(parts)}" scope="rowgroup">{words(group)}</th></tr>'
        cells = "".join(part.shown(row.cells.get(part.title)) for part in parts)
        yield f'<tr><th scope="row">{words(row.name)}</th>{cells}</tr>'
    yield "</tbody></table></div>"
    yield from (f"<p>{words(note(title, why))}</p>" for title, why in nothing.items())
    if any("sizes" in cell and not is_encoded(cell["sizes"]) for cell in run["cells"]):
        yield f"<p>* {EARLY}, so the size does not show what the method saves; such a cell is on no Pareto front.</p>"


def figures_of(found: Sequence[Row], title: str) -> list[str]:
    """Returns the names of the figures of a column's cells, the quality first."""
    return scalars(figures(row, title) for row in found)


def figures(row: Row, title: str) -> Mapping[str, Any]:
    """Returns the figures of a row's cell; empty if it failed or is missing."""
    found: Mapping[str, Any] = row.cells.get(title, {}).get("figures", {})
    return found
