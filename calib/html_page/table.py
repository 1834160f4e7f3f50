"""Tables of texts, and how they stand on a page."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True)
class Table:
    """A table of texts. A header of empty names is not shown; `by_layer` tables may be cut between columns."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    by_layer: bool = False


def section(table: Table, titled: bool = True) -> Iterator[str]:
    """One table under its title; on a narrow screen it scrolls sideways by itself."""
    if titled:
        yield f"<h2>{words(table.title)}</h2>"
    named = any(table.header)
    yield f'<div class="scroll"><table{"" if named else " class=pairs"}>'
    if named:
        yield row(table.header, "th")
    for cells in table.rows:
        yield row(cells, "td")
    yield "</table></div>"


def row(cells: Sequence[str], tag: str) -> str:
    """A table's row."""
    return f"<tr>{''.join(f'<{tag}>{words(cell)}</{tag}>' for cell in cells)}</tr>"


def words(text: str) -> str:
    """Text out of a file, fit for a page."""
    return escape(printable(text), quote=True)


def printable(text: str) -> str:
    """`text` with a question mark for every character that would not be printed: a terminal or a browser obeys some."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
