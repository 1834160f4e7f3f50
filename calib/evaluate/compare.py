"""Compares two runs: every row and column in the current run ("now") and the earlier one ("then"), and whether intervals overlap.

Disjoint intervals show a change; overlapping ones do not prove that there is none.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from calib.artifact_view.tables import inline
from calib.evaluate.figures import interval, number, scalars, spoken
from calib.evaluate.run_file import Row, Run, rows, titles
from calib.html_page.table import Table

FAILED = "failed"
SAME = "model, settings and versions are the same"
TOLD = ("title", "measures", "chance")  # entries of a column that are not settings which its data depend on


def compared(now: Run, then: Run, name: str) -> list[Table]:
    """Returns a table of the differences of the runs' settings, then a table for each common column.

    `name` is the earlier run's file.
    """
    return [Table(f"Compared with {name}", ["", ""], list(notes(now, then))), *tables(now, then)]


def notes(now: Run, then: Run) -> Iterator[tuple[str, str]]:
    """Yields (heading, text): differences of model, settings and versions; rows and columns of only one run; changed options."""
    kinds = ("architecture", "config_hash", "weights")
    model = [spoken(kind) for kind in kinds if now["model"].get(kind) != then["model"].get(kind)]
    others = [f"another model ({', '.join(model)})"] * bool(model)
    mine, theirs = ({"products": "model", **run["config"]} for run in (now, then))  # earlier releases had no other
    others += [*differing(mine, theirs, "name"), *differing(now["versions"], then["versions"])]
    yield "earlier run", "; ".join(others) or SAME
    my_rows, their_rows = ({row.name: row for row in rows(run)} for run in (now, then))
    my_columns, their_columns = ({column["title"]: column for column in run["columns"]} for run in (now, then))
    for what, here, there in (("columns", my_columns, their_columns), ("methods", my_rows, their_rows)):
        for which, names in (("this run", here.keys() - there), ("the earlier run", there.keys() - here)):
            if names:
                yield f"{what} only in {which}", ", ".join(name for name in (*here, *there) if name in names)
    for title in (title for title in my_columns if title in their_columns):
        other = "; ".join(differing(my_columns[title], their_columns[title], *TOLD))
        if other:
            yield f"column '{title}'", f"other data: {other}"
    for name in (name for name in my_rows if name in their_rows):
        yield from changed(my_rows[name], their_rows[name])


def changed(row: Row, old: Row) -> Iterator[tuple[str, str]]:
    """Yields a line for each column on which rows of the same name have another method or other options."""
    for title in (title for title in row.cells if title in old.cells):
        asked, was = ({"method": cell["method"], **cell["options"]} for cell in (row.cells[title], old.cells[title]))
        other = "; ".join(differing(asked, was))
        if other:
            yield f"{row.name}, {title}", f"other options: {other}"


def differing(now: Mapping[str, Any], then: Mapping[str, Any], *but: str) -> Iterator[str]:
    """Yields "seed 21 (now 20)" for every entry that differs; the keys `but` are ignored."""
    for key in dict.fromkeys([*now, *then]):
        if key not in but and now.get(key) != then.get(key):
            yield f"{spoken(key)} {inline(then.get(key))} (now {inline(now.get(key))})"


def tables(now: Run, then: Run) -> list[Table]:
    """Returns a table for each column of both runs, with a line for each method that either run measured on it."""
    mine, theirs = ({row.name: row for row in rows(run)} for run in (now, then))
    found = []
    for title in (title for title in titles(now) if title in titles(then)):
        pairs = {
            name: tuple(side[name].cells.get(title) if name in side else None for side in (mine, theirs))
            for name in dict.fromkeys([*mine, *theirs])
        }
        known = [cell["figures"] for pair in pairs.values() for cell in pair if cell is not None and "figures" in cell]
        names = scalars(known)
        header = ["method"]
        for position, name in enumerate((*names, "bits")):
            header += [spoken(name), "earlier", "difference", *(["intervals"] if position == 0 and names else [])]
        lines = [line(name, names, *pair) for name, pair in pairs.items() if any(pair)]
        found.append(Table(f"{title}: this run and the earlier one", header, lines, by_layer=True))
    return found


def line(method: str, names: Sequence[str], now: Any, then: Any) -> list[str]:
    """The table cells of one method on one column."""
    parts = [method]
    for position, name in enumerate(names):
        parts += triple(shown(now, name), shown(then, name))
        parts += [overlap(now, then, name)] if position == 0 else []
    return parts + triple(bits(now), bits(then))


def shown(cell: Mapping[str, Any] | None, name: str) -> float | str:
    """A cell's figure, "failed", or a dash if the cell has no such figure."""
    if cell is None or "error" in cell:
        return FAILED if cell else "-"
    value: float | str = cell["figures"].get(name, "-")
    return value


def bits(cell: Mapping[str, Any] | None) -> float | str:
    """A cell's bits per value, or a dash if it has none."""
    found: float | str = "-" if cell is None or "error" in cell else cell["sizes"]["bits_per_value"]
    return found


def triple(now: float | str, then: float | str) -> list[str]:
    """Both values as text, and their difference if both are numbers (empty for equal values)."""
    told = [value if isinstance(value, str) else number(value) for value in (now, then)]
    if isinstance(now, str) or isinstance(then, str):
        return [*told, "-"]
    sign = "+" if now > then else "-"
    return [*told, "" if now == then else f"{sign}{number(abs(now - then))}"]


def overlap(now: Any, then: Any, name: str) -> str:
    """Whether the two cells' intervals of the figure `name` overlap ("overlap" or "apart"); a dash if one has no interval."""
    if any(cell is None or "error" in cell for cell in (now, then)):
        return "-"
    ends = [interval(cell["figures"], name) for cell in (now, then)]
    if ends[0] is None or ends[1] is None:
        return "-"
    return "overlap" if ends[0][0] <= ends[1][1] and ends[1][0] <= ends[0][1] else "apart"
