"""Sequences whose tokens are in pages in order of position: token t in a row's page t // P, for keys and values alike, where a
page has P = `table.page_tokens` slots."""

from collections.abc import Hashable
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from calib.runtime.attend.read_plan import starts
from calib.runtime.files.state import State
from calib.runtime.paging.forward import Forward
from calib.runtime.paging.pages import GROWTH, PageTable
from calib.runtime.paging.sequence_state import SequenceState
from calib.runtime.stages.selection import Schedule

MOST_KNOWN = 4096  # lengths whose `OrderedRow` is cached


class RowShape(NamedTuple):
    """The shape of what a row's queries read: `first`, its first page; how many pages have tokens that are read from pages alone
    (`packed`), and packed keys; whether keys are packed ahead of their values; whether no token is exact."""

    first: int
    packed: int
    packed_keys: int
    is_ahead: bool
    has_no_exact: bool


class OrderedRow(NamedTuple):
    """What follows from a row's length and the `page` size: how many tokens are read from pages alone, the start of the page
    that the next of them falls in, how many keys are packed, the row's pages, and the `shape` that read plans depend on."""

    page: int
    packed: int
    page_start: int
    packed_keys: int
    pages: tuple[int, ...]
    shape: RowShape


class OrderedSequenceState(SequenceState):
    """Rows with one page table for keys and values; the schedules say how many of a row's tokens are encoded."""

    first: int | None = 0

    def __init__(
        self,
        keys: Schedule,
        values: Schedule,
        layers: int,
        sliding: int | None = None,
        growth: int = GROWTH,
        fitted: bool = False,
    ) -> None:
        """`keys` and `values` are the schedules of both; pages may be `fitted` to short rows (`PageTable`); the other arguments
        are those of `SequenceState`."""
        self.keys, self.values, self.fitted = keys, values, fitted
        self._known: dict[int, OrderedRow] = {}
        # The last forward's result: the page size, the rows' lengths after it, and their `OrderedRow`s.
        self._latest: tuple[tuple[int, list[int]], list[OrderedRow]] = (0, []), []
        super().__init__(layers, sliding, growth=growth)

    def clear(self) -> None:
        """Removes every row, and resets the page size where pages are fitted."""
        super().clear()
        self.tables = [PageTable(growth=self._growth, fitted=self.fitted)]

    @property
    def table(self) -> PageTable:
        """The only table."""
        return self.tables[0]

    def packed(self, length: int) -> int:
        """How many tokens have both key and value encoded: attention reads these from pages alone."""
        return self._at(length).packed

    def _rows(self, forward: Forward) -> tuple[list[OrderedRow], list[OrderedRow]]:
        """The `OrderedRow` of every row before and after a forward; computed once."""
        page = self.tables[0].page_tokens
        found: tuple[list[OrderedRow], list[OrderedRow]] | None = forward.readings.get((OrderedRow, page))
        if found is None:
            asked, before = self._latest
            if asked != (page, forward.before):  # else these are the rows after the last forward
                before = [self._at(length) for length in forward.before]
            after = [self._at(length) for length in forward.after]
            self._latest = (page, forward.after), after
            found = forward.readings[OrderedRow, page] = before, after
        return found

    def _at(self, length: int) -> OrderedRow:
        """The `OrderedRow` of a length; cached, because rows of one length and consecutive steps need the same."""
        found, page = self._known.get(length), self.tables[0].page_tokens
        if found is None or found.page != page:
            if len(self._known) > MOST_KNOWN:
                self._known.clear()
            found = self._known[length] = self._row_of(length, page)
        return found

    def _row_of(self, length: int, page: int) -> OrderedRow:
        keys, encoded = self.keys.packed(length), max(self.keys.encoded(length), self.values.encoded(length))
        packed = min(keys, self.values.packed(length))
        shape = RowShape(self.first_page(length), -(-packed // page), -(-keys // page), keys > packed, length == packed)
        return OrderedRow(page, packed, packed // page * page, keys, (-(-encoded // page),), shape)

    def held_before(self, forward: Forward) -> list[list[int]]:
        """The slots in use of the only tier, for every row."""
        return [[row.packed] for row in self._rows(forward)[0]]

    def exact_before(self, forward: Forward) -> list[int]:
        """The number of each row's tokens in the window of values."""
        return [length - row.packed for length, row in zip(forward.before, self._rows(forward)[0], strict=True)]

    def pages_behind(self, forward: Forward) -> tuple[tuple[int, ...], ...]:
        """The pages of every row after the forward is stored."""
        return tuple([row.pages for row in self._rows(forward)[1]])

    def exact(self, row: int, length: int) -> int:
        """The number of tokens in the window of values."""
        return length - self.packed(length)

    def numbers(self, forward: Forward, rows: range, field: str, device: torch.device) -> Tensor:
        """int64 `[rows, 1]`: one field of each row's `OrderedRow` before the forward."""

        def of_rows(step: Forward) -> list[int]:
            return list(map(attrgetter(field), self._rows(step)[0][rows.start : rows.stop]))

        return forward.tensor(f"{field} of {rows}", of_rows, device)[:, None]

    def positions(self, forward: Forward, rows: range, slots: int, device: torch.device) -> Tensor:
        """As in `ReadableRows`: each slot of the ring has the newest position that falls on it, if the window still holds it."""
        start = starts(forward, rows, device)
        read = self.numbers(forward, rows, "packed", device)
        tokens = start - 1 - (start - 1 - torch.arange(slots, device=device)) % max(1, self.values.window())
        return torch.where(tokens < read, start, tokens)

    def encoded(self, row: int, length: int) -> int:
        """How many tokens have an encoded key."""
        return self.keys.packed(length)

    def graph_key(self, forward: Forward) -> Hashable:
        """A key of the shapes of a `ReadPlan`: equal in all steps of a block."""
        asked = self.table.version, tuple([row.shape for row in self._rows(forward)[0]])
        if asked != self._alike[0]:
            self._alike = asked, asked if self.sliding is not None else self._with_room(asked[1])
        return self._alike[1]

    def _with_room(self, rows: tuple[RowShape, ...]) -> Hashable:
        """A key that these rows share with rows that have a few more pages."""
        _, packed, packed_keys, ahead, _ = zip(*rows, strict=True)
        pages = max(packed), max(packed_keys), self.table.longest
        return self.table.moves, any(ahead), *(self.room(0, count) for count in pages)

    def packs_ahead(self, forward: Forward) -> bool:
        """Whether any row has encoded keys whose values are still exact, before the forward."""
        return any(row.shape.is_ahead for row in self._rows(forward)[0])

    def reserve(self, forward: Forward) -> None:
        """Reserves pages for what both schedules encode, and frees those outside the sliding window."""
        table, pages, writes = self.table, list[int](), []
        table.fit(max((s.encoded(after) for s in (self.keys, self.values) for after in forward.after), default=0))
        size = table.page_tokens
        first = [self.first_page(after) for after in forward.after]
        forward.oldest = [page * size for page in first]
        for row, (before, after) in enumerate(zip(forward.before, forward.after, strict=True)):
            table.release(row, self.first_page(before))
            spans = [(s.encoded(before), s.encoded(after)) for s in (self.keys, self.values)]
            pages += self.pages_of(row, after)
            touched = {
                page
                for start, stop in spans
                for page in range(max(start // size, first[row]), -(-stop // size))
                if stop > start
            }
            writes.append(sorted(touched))
        held = [max(len(own), start) for own, start in zip(table.rows, first, strict=True)]
        self.free_pages(0, pages, held)
        copies = []
        for row, (count, positions) in enumerate(zip(pages, writes, strict=True)):
            copies += table.reserve(row, count, positions, first[row])
        forward.copies = [copies]

    def restore_own(self, state: State) -> None:
        """Nothing besides lengths and pages."""

    def pages_of(self, row: int, length: int) -> tuple[int, ...]:
        """The pages for the longer of encoded keys and encoded values."""
        return self._at(length).pages

    def first_page(self, length: int) -> int:
        """The page of the oldest token that a query after `length` tokens can see."""
        return 0 if self.sliding is None else max(0, length - max(self.sliding - 1, 1)) // self.table.page_tokens
