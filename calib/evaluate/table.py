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
SPEED_PERIOD = 600  # seconds the time left is judged by: methods differ in speed


def print_table(evaluation: Evaluation, results: Mapping[str, Result]) -> None:
    """Methods by columns, grouped as they were asked for."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    # Names are the user's, and what stands in brackets is no mark-up of rich's: `kivi [2 bits]`.
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
    # A narrower terminal wraps lines rather than losing figures.
    (console if console.width >= needed else Console(width=needed)).print(table)
    if not all(is_encoded(result["sizes"]) for result in measured(results)):
        print(NOT_ENCODED.removeprefix("\\"))
    for title, why in nothing.items():
        print(note(title, why))


def told(cell: Cell, result: Result, position: str) -> str:
    """A cell that has been tried in a line; `position` says which of how many it is."""
    found = (
        f"{FAILED}: {result['error']}"
        if "error" in result
        else f"{cell.column.brief(result['figures'])}, {bits(result)} bits"
    )
    seconds = f", {result['seconds']:.1f} s" if "seconds" in result else ""
    return f"{position}: {cell.entry.label}, {cell.column.title}: {found}{seconds}"


def brief(column: Column, result: Result | None) -> str:
    """The cell's figures without their interval."""
    return "" if result is None else FAILED if "error" in result else column.brief(result["figures"])


class CellProgress(Progress):
    """A bar over all tokens that have to go through the model, on stderr; says which cell is under way.

    Args:
        cells: those to be measured.
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
        """A line of it, where the bar is not seen."""
        self.tried += 1
        CELLS.info("%s", told(cell, result, f"{self.tried} of {self.count} cells"))

    def advance_cell(self, cell: Cell, tokens: float) -> None:
        """Tells that `tokens` more of `cell` went through."""
        self.update(self.bar, advance=tokens, description=f"{cell.entry.label}, {cell.column.title}")
