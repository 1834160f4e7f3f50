"""Tables of texts and their HTML."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True)
class Table:
    """A table of texts. A header of empty names is not shown; a table with `by_layer` may be split between columns."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    by_layer: bool = False


def section(table: Table, titled: bool = True) -> Iterator[str]:
    """Yields the HTML of a table under its title; on a narrow screen it scrolls sideways."""
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
    """Returns the HTML of a table row."""
    return f"<tr>{''.join(f'<{tag}>{words(cell)}</{tag}>' for cell in cells)}</tr>"


def words(text: str) -> str:
    """Escape text for HTML, and replace characters that cannot be printed."""
    return escape(printable(text), quote=True)


def printable(text: str) -> str:
    """Replaces every unprintable character of `text` by a question mark, since some are control codes of terminals or browsers."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
