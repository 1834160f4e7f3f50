"""Sequences whose tokens lie in pages in their order: token t in a row's page t // P, in the fields of both streams, where a page
has P = `table.page_tokens` slots."""

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

MOST_KNOWN = 4096  # lengths that are remembered


class RowShape(NamedTuple):
    """Of a row: where the pages begin that it reads, how many have tokens that are read from pages alone, and packed keys; whether
    keys are packed ahead of their values, and whether nothing is exact."""

    first: int
    packed: int
    packed_keys: int
    is_ahead: bool
    has_no_exact: bool


class OrderedRow(NamedTuple):
    """What follows from a row's length and the slots of a `page`: tokens that are read from pages alone, where the page begins that
    the next one is for, tokens whose keys are packed, pages of the only table, and what a `ReadPlan`'s shapes follow from."""

    page: int
    packed: int
    page_start: int
    packed_keys: int
    pages: tuple[int, ...]
    shape: RowShape


class OrderedSequenceState(SequenceState):
    """One table of pages for keys and values; the schedules say how many of a row's tokens are in them."""

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
        """The schedules of both streams, the others as `SequenceState` has them, and whether pages are `fitted` to short rows
        (`PageTable`)."""
        self.keys, self.values, self.fitted = keys, values, fitted
        self._known: dict[int, OrderedRow] = {}
        # Of the rows as a forward has left them: the slots of a page, their lengths, and what follows from them.
        self._latest: tuple[tuple[int, list[int]], list[OrderedRow]] = (0, []), []
        super().__init__(layers, sliding, growth=growth)

    def clear(self) -> None:
        """Also the slots of a page, where they are fitted."""
        super().clear()
        self.tables = [PageTable(growth=self._growth, fitted=self.fitted)]

    @property
    def table(self) -> PageTable:
        """The only table."""
        return self.tables[0]

    def packed(self, length: int) -> int:
        """Tokens of which key and value are both encoded: what attention reads from pages alone."""
        return self._at(length).packed

    def _rows(self, forward: Forward) -> tuple[list[OrderedRow], list[OrderedRow]]:
        """See `OrderedRow`: before and behind a forward; worked out once."""
        page = self.tables[0].page_tokens
        found: tuple[list[OrderedRow], list[OrderedRow]] | None = forward.readings.get((OrderedRow, page))
        if found is None:
            asked, before = self._latest
            if asked != (page, forward.before):  # else those that the last forward has left
                before = [self._at(length) for length in forward.before]
            after = [self._at(length) for length in forward.after]
            self._latest = (page, forward.after), after
            found = forward.readings[OrderedRow, page] = before, after
        return found

    def _at(self, length: int) -> OrderedRow:
        """See `OrderedRow`; remembered, because rows of one length and consecutive steps ask again."""
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
        """The same for every row, as slots of the only tier."""
        return [[row.packed] for row in self._rows(forward)[0]]

    def exact_before(self, forward: Forward) -> list[int]:
        """Of each row's tokens those in the window of values."""
        return [length - row.packed for length, row in zip(forward.before, self._rows(forward)[0], strict=True)]

    def pages_behind(self, forward: Forward) -> tuple[tuple[int, ...], ...]:
        """Of every row once the forward is stored."""
        return tuple([row.pages for row in self._rows(forward)[1]])

    def exact(self, row: int, length: int) -> int:
        """Tokens in the window of values."""
        return length - self.packed(length)

    def numbers(self, forward: Forward, rows: range, field: str, device: torch.device) -> Tensor:
        """int64 `[rows, 1]`: a field of each `OrderedRow` before the forward."""

        def of_rows(step: Forward) -> list[int]:
            return list(map(attrgetter(field), self._rows(step)[0][rows.start : rows.stop]))

        return forward.tensor(f"{field} of {rows}", of_rows, device)[:, None]

    def positions(self, forward: Forward, rows: range, slots: int, device: torch.device) -> Tensor:
        """See `ReadableRows`: in each slot the newest token that falls on it, if the row holds it there."""
        start = starts(forward, rows, device)
        read = self.numbers(forward, rows, "packed", device)
        tokens = start - 1 - (start - 1 - torch.arange(slots, device=device)) % max(1, self.values.window())
        return torch.where(tokens < read, start, tokens)

    def encoded(self, row: int, length: int) -> int:
        """Tokens whose key is."""
        return self.keys.packed(length)

    def graph_key(self, forward: Forward) -> Hashable:
        """What the shapes of a `ReadPlan` follow from: equal in the steps of a block."""
        asked = self.table.version, tuple([row.shape for row in self._rows(forward)[0]])
        if asked != self._alike[0]:
            self._alike = asked, asked if self.sliding is not None else self._with_room(asked[1])
        return self._alike[1]

    def _with_room(self, rows: tuple[RowShape, ...]) -> Hashable:
        """What rows of these shapes share with those that have a few pages more."""
        _, packed, packed_keys, ahead, _ = zip(*rows, strict=True)
        pages = max(packed), max(packed_keys), self.table.longest
        return self.table.moves, any(ahead), *(self.room(0, count) for count in pages)

    def packs_ahead(self, forward: Forward) -> bool:
        """Whether any row has keys in pages while their values are exact, before the forward."""
        return any(row.shape.is_ahead for row in self._rows(forward)[0])

    def reserve(self, forward: Forward) -> None:
        """Pages for what both schedules encode; those that a sliding window has left behind are given back."""
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
        """Nothing besides."""

    def pages_of(self, row: int, length: int) -> tuple[int, ...]:
        """What the stream needs that encodes more."""
        return self._at(length).pages

    def first_page(self, length: int) -> int:
        """Where the oldest token lies that a query behind `length` tokens can see; its own row always keeps its newest."""
        return 0 if self.sliding is None else max(0, length - max(self.sliding - 1, 1)) // self.table.page_tokens
