"""The table that `calib eval` prints, and its progress bar."""

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from calib.evaluate.cache_size import is_encoded
from calib.evaluate.cell import Cell, Result
from calib.evaluate.evaluation import Evaluation
from calib.evaluate.report import FAILED, NOT_ENCODED, bits, document, measured, names, rows
from calib.evaluate.tasks import Column
from calib.evaluate.unsolved import marked, note, unsolved
from calib.log_lines import CELLS

WIDEST = 10_000  # characters; no table needs more
SPEED_PERIOD = 600  # seconds over which speed is averaged for the time left, since methods differ in speed


def print_table(evaluation: Evaluation, results: Mapping[str, Result]) -> None:
    """Prints the table of methods by columns, in the groups of the request."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    # Names are passed as `Text`, since brackets in a user's names (`kivi [2 bits]`) are not rich's markup.
    table.add_column("method", no_wrap=True)
    nothing = unsolved(document(evaluation, results))
    for column in evaluation.columns:
        heading = marked("\n".join(names(column)), nothing, column.title)
        table.add_column(Text(heading), justify="right", no_wrap=True)
        table.add_column("bits\n(paper)", justify="right", no_wrap=True)
    group = ""
    for name, label, cells in rows(evaluation, results):
        if name != group:
            table.add_section()
            table.add_row(Text(name, style="bold"))
            group = name
        found = {cell.column.title: result for cell, result in cells}
        parts = [label]
        for column in evaluation.columns:
            result = found.get(column.title)
            parts += [brief(column, result), bits(result)]
        table.add_row(*map(Text, parts))
    console, needed = Console(), Console(width=WIDEST).measure(table).maximum
    # On a narrower terminal the lines wrap; rich would cut off figures.
    (console if console.width >= needed else Console(width=needed)).print(table)
    if not all(is_encoded(result["sizes"]) for result in measured(results)):
        print(NOT_ENCODED.removeprefix("\\"))
    for title, why in nothing.items():
        print(note(title, why))


def told(cell: Cell, result: Result, position: str) -> str:
    """Returns one line on a finished or failed cell; `position` says which of how many it is."""
    found = (
        f"{FAILED}: {result['error']}"
        if "error" in result
        else f"{with_measures(cell.column, result['figures'])}, {bits(result)} bits"
    )
    seconds = f", {result['seconds']:.1f} s" if "seconds" in result else ""
    return f"{position}: {cell.entry.label}, {cell.column.title}: {found}{seconds}"


def with_measures(column: Column, figures: dict[str, float | int]) -> str:
    """Returns a cell's figures with the names of their measures, such as "0.750 exact answers, -0.099 log p"."""
    found, measures = column.brief(figures), column.measure_name.split(", ")
    values = found.split()
    if len(values) != len(measures) or not values[0][-1].isdigit():  # in words, such as "20.0% kept" or "exact"
        return found
    return ", ".join(f"{value} {measure}" for value, measure in zip(values, measures, strict=True))


def brief(column: Column, result: Result | None) -> str:
    """Returns the cell's figures without their intervals, "failed", or "" if there is no result."""
    return "" if result is None else FAILED if "error" in result else column.brief(result["figures"])


class CellProgress(Progress):
    """A progress bar on stderr over all tokens that have to go through the model, with the name of the current cell.

    Args:
        cells: the cells to be measured.
    """

    def __init__(self, cells: Sequence[Cell]) -> None:
        super().__init__(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            speed_estimate_period=SPEED_PERIOD,
            transient=True,
        )
        self.bar = self.add_task("", total=sum(cell.tokens for cell in cells) or 1)
        self.tried, self.count = 0, len(cells)

    def finish_cell(self, cell: Cell, result: Result) -> None:
        """Logs one line on a finished or failed cell, for runs without a visible bar."""
        self.tried += 1
        CELLS.info("%s", told(cell, result, f"{self.tried} of {self.count} cells"))

    def advance_cell(self, cell: Cell, tokens: float) -> None:
        """Advance the bar by `tokens` tokens of `cell`."""
        self.update(self.bar, advance=tokens, description=f"{cell.entry.label}, {cell.column.title}")
