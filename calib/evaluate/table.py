"""The table that `calib eval` prints, and its progress bar."""

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from calib.evaluate.cell import Cell, Result
from calib.evaluate.evaluation import Evaluation
from calib.evaluate.report import FAILED, bits, names, rows
from calib.evaluate.tasks import Column

WIDEST = 10_000  # characters; no table needs more
SPEED_PERIOD = 600  # seconds the time left is judged by: methods differ in speed


def print_table(evaluation: Evaluation, results: Mapping[str, Result]) -> None:
    """Methods by columns, grouped as they were asked for."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("method", no_wrap=True)
    for column in evaluation.columns:
        table.add_column("\n".join(names(column)), justify="right", no_wrap=True)
        table.add_column("bits\n(paper)", justify="right", no_wrap=True)
    group = ""
    for name, label, cells in rows(evaluation, results):
        if name != group:
            table.add_section()
            table.add_row(f"[bold]{name}[/bold]")
            group = name
        found = {cell.column.title: result for cell, result in cells}
        parts = [label]
        for column in evaluation.columns:
            result = found.get(column.title)
            parts += [brief(column, result), bits(result)]
        table.add_row(*(part.replace("[", r"\[") for part in parts))
    console, needed = Console(), Console(width=WIDEST).measure(table).maximum
    # A narrower terminal wraps lines rather than losing figures.
    (console if console.width >= needed else Console(width=needed)).print(table)


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
            TextColumn("{task.description}"),
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

    def advance_cell(self, cell: Cell, tokens: float) -> None:
        """Tells that `tokens` more of `cell` went through."""
        self.update(self.bar, advance=tokens, description=f"{cell.entry.label}, {cell.column.title}")
