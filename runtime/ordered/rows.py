"""Rows whose tokens lie in pages in their order: token t in a row's page t // PAGE_TOKENS, in the fields of both streams."""

from collections.abc import Hashable

from calib.runtime.pages import PAGE_TOKENS, PageTable
from calib.runtime.rows import Forward, Rows
from calib.runtime.stages.contract import Schedule


class OrderedRows(Rows):
    """One table of pages for keys and values; the schedules say how many of a row's tokens are in them."""

    def __init__(self, keys: Schedule, values: Schedule, layers: int, sliding: int | None = None) -> None:
        """The schedules of both streams, the number of layers that share these rows, and their sliding window."""
        self.keys, self.values = keys, values
        super().__init__(layers, sliding)

    @property
    def table(self) -> PageTable:
        """The only table."""
        return self.tables[0]

    def packed(self, length: int) -> int:
        """Tokens of which key and value are both encoded: what attention reads from pages alone."""
        return min(self.keys.packed(length), self.values.packed(length))

    def encoded(self, row: int, length: int) -> int:
        """Tokens whose key is."""
        return self.keys.packed(length)

    def block(self, forward: Forward) -> Hashable:
        """What the shapes of `Reading` follow from: equal in the steps of a block."""
        ends = [(held, self.packed(held), self.keys.packed(held)) for held in forward.before]
        return self.table.version, tuple(
            (-(-read // PAGE_TOKENS), -(-keys // PAGE_TOKENS), keys > read, held == read) for held, read, keys in ends
        )

    def reserve(self, forward: Forward) -> None:
        """Pages for what both schedules encode; those that a sliding window has left behind are given back."""
        table, pages, writes = self.table, [], []
        first = [self._oldest(after) // PAGE_TOKENS for after in forward.after]
        forward.oldest = [page * PAGE_TOKENS for page in first]
        for row, (before, after) in enumerate(zip(forward.before, forward.after, strict=True)):
            table.release(row, self._oldest(before) // PAGE_TOKENS)
            spans = [(s.encoded(before), s.encoded(after)) for s in (self.keys, self.values)]
            pages.append(max(-(-stop // PAGE_TOKENS) for _, stop in spans))
            touched = {
                page
                for start, stop in spans
                for page in range(max(start // PAGE_TOKENS, first[row]), -(-stop // PAGE_TOKENS))
                if stop > start
            }
            writes.append(sorted(touched))
        held = map(len, table.rows)
        table.prepare(sum(max(0, n - max(h, f)) for n, h, f in zip(pages, held, first, strict=True)))
        copies = []
        for row, (count, positions) in enumerate(zip(pages, writes, strict=True)):
            copies += table.reserve(row, count, positions, first[row])
        forward.copies = [copies]

    def _oldest(self, length: int) -> int:
        """The oldest token that a query behind `length` tokens can see; its own row always keeps its newest."""
        return 0 if self.sliding is None else max(0, length - max(self.sliding - 1, 1))
