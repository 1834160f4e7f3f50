"""Markdown with names and messages that come from files, escaped so that none of them acts as markup."""

import re
from collections.abc import Iterator, Sequence

from calib.html_page.table import Table, printable

MARKUP = re.compile(r"[\\`|<*]|&(?=#?\w+;)|(?<=\])\(")  # code, cells, HTML, emphasis, entities, links


def plain(text: str) -> str:
    """Returns `text` as one line of plain text: line breaks and control characters become question marks, markup is escaped."""
    return MARKUP.sub(lambda found: f"\\{found[0]}", printable(text))


def code(text: str) -> str:
    """Returns `text` as a code block of one line, in which nothing is markup."""
    return f"    {printable(text)}"


def heading(parts: Sequence[str]) -> Iterator[str]:
    """Yields the first two lines of a table: its header and the separator."""
    yield line(parts)
    yield "|" + "---|" * len(parts)


def line(parts: Sequence[str], bold: bool = False) -> str:
    """Returns one line of a table; with `bold`, its first cell is bold."""
    first, *rest = map(plain, parts)
    return f"| {' | '.join([f'**{first}**' if bold else first, *rest])} |"


def section(table: Table) -> list[str]:
    """Returns the lines of a table under its title."""
    return [f"## {plain(table.title)}", "", *heading(table.header), *(line(row) for row in table.rows), ""]
