"""Prints tables for a terminal of 80 columns, with rich if it is installed."""

import sys
import textwrap
from collections.abc import Iterator, Sequence

from calib.html_page.table import Table, printable

WIDTH = 80  # columns of the narrowest terminal that the tables fit


def show(tables: Sequence[Table]) -> None:
    """Prints all tables; tables by layer are split between columns to fit the width."""
    for table in tables:
        for part in columns_that_fit(table) if table.by_layer else (table,):
            # Names and values come from a file: their control characters must not reach the terminal.
            print_table(part.title, *([printable(cell) for cell in row] for row in (part.header, *part.rows)))


def columns_that_fit(table: Table) -> Iterator[Table]:
    """Yields the table split into tables that fit the width, each with the first column in front."""
    columns = list(zip(table.header, *table.rows, strict=True))
    widths = [2 + max(map(len, column)) for column in columns]
    parts: list[list[int]] = [[]]
    room = WIDTH
    for index in range(1, len(columns)):
        if parts[-1] and widths[index] > room:
            parts.append([])
        room = (room if parts[-1] else WIDTH - widths[0]) - widths[index]
        parts[-1].append(index)
    for number, part in enumerate(parts):
        title = table.title + (f" ({number + 1} of {len(parts)})" if len(parts) > 1 else "")
        header, *rows = zip(columns[0], *(columns[index] for index in part), strict=True)
        yield Table(title, header, rows)


def print_table(title: str, header: Sequence[str], *rows: Sequence[str]) -> None:
    """Prints one table, with rich if it is installed."""
    try:
        from rich.console import Console
        from rich.table import Table as Drawn
        from rich.text import Text
    except ImportError:
        print_plain(title, header, rows)
        return
    drawn = Drawn(box=None, show_header=any(header), padding=(0, 2, 0, 0), header_style="bold")
    for index, name in enumerate(header):
        drawn.add_column(Text(name), justify="left" if index == 0 or not any(header) else "right", overflow="fold")
    for row in rows:
        drawn.add_row(*map(Text, row))
    console = Console(file=sys.stdout)
    console.print(Text(title, style="bold"))
    console.print(drawn)
    console.print()


def print_plain(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints one table as plain text: first column left-aligned, others right-aligned; texts of a pair table are wrapped."""
    named = any(header)
    widths = [max(map(len, column)) for column in zip(*([header] if named else []), *rows, strict=True)]
    print(title)
    for row in [header, *rows] if named else rows:
        if named:
            cells = [
                cell.ljust(width) if index == 0 else cell.rjust(width)
                for index, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            print("  ".join(cells).rstrip())
            continue
        room = WIDTH - widths[0] - 2
        chunks = textwrap.wrap(row[1], room) or [""]
        for index, chunk in enumerate(chunks):
            print(f"{row[0] if index == 0 else '':<{widths[0]}}  {chunk}")
    print()
