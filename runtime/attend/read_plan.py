"""What the queries of one forward read: pages, window slots, new tokens and masks. The same for every layer, so the first layer
computes it and the others reuse it.

Rows of equal length with one query each need no masks: they are read by slices.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from calib.kernels.attend.operation import PageSpan
from calib.kernels.dispatch import prefers_compiled, prefers_triton
from calib.kernels.upload import upload
from calib.runtime.paging.forward import Forward
from calib.runtime.paging.page_numbers import Pages
from calib.runtime.paging.pages import PageTable


class ReadableRows(Protocol):
    """What a read plan needs to know of the rows; a sequence state provides it. The slots of tier i are in the pages of
    `tables[i]`.

    `first` is the position of slot 0 where a row's tokens are in pages in order of position; None where they are in any order.
    """

    tables: list[PageTable]
    first: int | None

    def first_page(self, length: int) -> int:
        """The first page that a query after `length` tokens of a row may read; earlier ones are outside the sliding window."""
        ...

    def held_before(self, forward: Forward) -> list[list[int]]:
        """The slots in use of each tier, for every row, before the forward."""
        ...

    def exact_before(self, forward: Forward) -> list[int]:
        """The slots in use of the exact window, for every row, before the forward."""
        ...

    def room(self, tier: int, pages: int) -> int:
        """How many pages of a tier the steps of a block read, where a row has `pages`."""
        ...

    def positions(self, forward: Forward, rows: range, slots: int, device: torch.device) -> Tensor:
        """int64 `[len(rows), slots]`: the position of the token in each of the window's first slots; in unused slots any number
        that is not less than the row's length."""
        ...


class ReadRequest(NamedTuple):
    """A request for the plan of the query columns `queries` of `rows`, with a `sliding` window or None, in tiles of at most
    `tile` tokens. `window` slots of the exact window are read.

    With `trims`, rows of equal length are read by slices: only slots in use, of pages and window. With `fused`, one kernel
    reads all pages.
    """

    rows: range
    queries: range
    sliding: int | None
    tile: int
    window: int
    device: torch.device
    trims: bool = False
    fused: bool = False


@dataclass
class Tile:
    """Pages of a tier, and the range [start, stop) of their slots that is read."""

    pages: Pages
    start: int
    stop: int
    mask: Callable[[], Tensor | None]

    @cached_property
    def hidden(self) -> Tensor | None:
        """Which slots are hidden: bool `[rows or 1, 1, queries or 1, slots]` or None. Not computed for a kernel that reads all
        pages."""
        return self.mask()


@dataclass(frozen=True)
class ReadPlan:
    """Pages and masks that some queries read.

    Attributes:
        asked: the request.
        tiers: the tiles of each tier. Slots without a token are hidden; so are those outside a sliding window, where tokens are
            in order.
        page_spans: for each tier all these slots as one span for a kernel; None where no slot is in use.
        window: how many leading slots of the exact window are read.
        new: the new tokens that are read: none after the last query, none outside the first query's sliding window.
        hidden: mask of the window's slots and those new tokens together, `[rows or 1, 1, queries or 1, tokens]` or None.
        back: int64 `[rows, 1, queries, 1]`: tokens up to this position are outside the query's sliding window; None without one.
        trimmed: whether last tile and window end with the last token that rows hold, all of equal length.
    """

    asked: ReadRequest
    tiers: list[list[Tile]]
    page_spans: list[PageSpan | None]
    window: int
    new: slice
    hidden: Tensor | None
    back: Tensor | None
    trimmed: bool

    @staticmethod
    def of(state: ReadableRows, forward: Forward, asked: ReadRequest) -> "ReadPlan":
        """The plan for a request; computed by the first layer that asks."""
        if asked not in forward.readings:
            forward.readings[asked] = _Planner(state, forward, asked).plan()
        plan: ReadPlan = forward.readings[asked]
        return plan

    def read_of(self, new: Tensor) -> Tensor:
        """The part of the new tokens `[rows, heads, n, D]` that is read."""
        return new if (self.new.start, self.new.stop) == (0, new.shape[2]) else new[:, :, self.new]


def starts(forward: Forward, rows: range, device: torch.device) -> Tensor:
    """int64 `[rows, 1]`: the position of each row's first new token."""
    return forward.tensor(f"tokens before of {rows}", lambda step: step.before[rows.start : rows.stop], device)[:, None]


def page_numbers(table: PageTable, forward: Forward, rows: range, pages: range, device: torch.device) -> Tensor:
    """Page numbers int32 `[rows, pages]` for a kernel. On a CPU they are kept for this forward only: a table's copies count as
    memory."""
    if forward.of_block:
        return table.numbers_with_room(device)[rows.start : rows.stop, pages.start : pages.stop]
    if prefers_triton(device):
        return table.numbers(device)[rows.start : rows.stop, pages.start : pages.stop]
    key = ("page numbers", table, rows, pages)
    if key not in forward.readings:
        numbers = [table.pages(row, pages.start, len(pages)) for row in rows]
        forward.readings[key] = upload(numbers, torch.int32, device)
    found: Tensor = forward.readings[key]
    return found


def exact_positions(state: ReadableRows, forward: Forward, asked: ReadRequest, window: int) -> Tensor:
    """int64 `[rows, 1, tokens]`: the positions of the window's first slots and of the new tokens that are read."""
    key = ("exact positions", asked, window)
    if key not in forward.readings:
        new = torch.arange(_first_new(asked), asked.queries.stop, device=asked.device)
        held = state.positions(forward, asked.rows, window, asked.device)
        found = torch.cat([held, starts(forward, asked.rows, asked.device) + new], -1)
        forward.readings[key] = found[:, None]
    positions: Tensor = forward.readings[key]
    return positions


def _first_new(asked: ReadRequest) -> int:
    return 0 if asked.sliding is None else max(0, asked.queries.start - asked.sliding + 1)


class _Planner:
    def __init__(self, state: ReadableRows, forward: Forward, asked: ReadRequest) -> None:
        self.state, self.forward, self.asked = state, forward, asked
        self.before = [forward.before[row] for row in asked.rows]
        self.held = state.held_before(forward)
        self.counts = list(zip(*(self.held[row] for row in asked.rows), strict=True))  # of each tier, by row
        exact = set(state.exact_before(forward)[asked.rows.start : asked.rows.stop])
        # No masks only for one query per row, and not in the fixed shapes of a block.
        single = len(asked.queries) == 1 and asked.sliding is None and not forward.of_block
        self.trimmed = single and asked.trims and asked.queries.stop == 1 and len(set(self.before)) == 1
        none = exact == {0} and not forward.of_block
        self.window = max(exact) if self.trimmed or none else asked.window
        self.hidden: Tensor | None = None
        self.back: Tensor | None = None
        if not (single and exact == {self.window}):
            self._hide()

    def plan(self) -> ReadPlan:
        pages = [self._pages(tier) for tier in range(len(self.counts))]
        tiers = [self._tiles(tier, own) for tier, own in enumerate(pages)]
        spans = [self._page_span(tier, own) for tier, own in enumerate(pages)]
        new = slice(_first_new(self.asked), self.asked.queries.stop)
        return ReadPlan(self.asked, tiers, spans, self.window, new, self.hidden, self.back, self.trimmed)

    def _hide(self) -> None:
        """Masks the window and the new tokens: unused slots, later tokens, and tokens outside the sliding window."""
        asked, device = self.asked, self.asked.device
        start = starts(self.forward, asked.rows, device)[:, :, None, None]
        positions = exact_positions(self.state, self.forward, asked, self.window)[:, :, None]
        queries = start + torch.arange(asked.queries.start, asked.queries.stop, device=device)[:, None]
        self.hidden = positions > queries
        self.hidden[..., : self.window] |= positions[..., : self.window] >= start
        if asked.sliding is not None:
            self.back = queries - asked.sliding
            self.hidden |= positions <= self.back

    def _pages(self, tier: int) -> range:
        """The range of pages of a tier that any row reads, from the page of the oldest token that the first query sees. In the
        steps of a block it is the same for all rows of the batch, with spare pages."""
        page, start, of_block = self.state.tables[tier].page_tokens, self.asked.queries.start, self.forward.of_block
        counts, before = self.counts[tier], self.before
        if of_block:
            counts, before = tuple(held[tier] for held in self.held), self.forward.before
        first = [self.state.first_page(length + start) for length in before]
        read = [(own, count) for own, count in zip(first, counts, strict=True) if own * page < count] or [(0, 0)]
        stop = -(-max(count for _, count in read) // page)
        return range(min(own for own, _ in read), self.state.room(tier, stop) if of_block else stop)

    def _tiles(self, tier: int, pages: range) -> list[Tile]:
        """The tiles of these pages, each with at most `asked.tile` tokens of all rows together."""
        asked, table, counts = self.asked, self.state.tables[tier], self.counts[tier]
        page, tiles = table.page_tokens, []
        step = max(1, asked.tile // (len(asked.rows) * page))
        for at in range(pages.start, pages.stop, step):
            last = min(at + step, pages.stop)
            slots = range(at * page, min(last * page, counts[0]) if self.trimmed else last * page)
            selected = table.select(asked.rows, at, last, asked.device, room=self.forward.of_block)
            tiles.append(Tile(selected, slots.start, slots.stop, partial(self._unused, tier, slots)))
        return tiles

    def _unused(self, tier: int, slots: range) -> Tensor | None:
        """Mask of the slots that a row does not use, or its queries do not see; None if there are none."""
        counts, device, first = self.counts[tier], self.asked.device, self.state.first
        behind = self.back is not None and first is not None
        if min(counts) >= slots.stop and not behind:
            return None
        numbers = torch.arange(slots.start, slots.stop, device=device)
        level = len(set(counts)) == 1 and not self.forward.of_block
        used = counts[0] if level else self._used(tier, torch.int64)[:, None]
        hidden = (numbers >= used).view(-1, 1, 1, len(slots))
        return hidden if self.back is None or first is None else hidden | (numbers + first <= self.back)

    def _page_span(self, tier: int, pages: range) -> PageSpan | None:
        """The span of these pages for a kernel; slots are counted from the first of them. None without pages or without a
        kernel."""
        device = self.asked.device
        if not pages or not (prefers_triton(device) or prefers_compiled(device)):
            return None
        table, rows = self.state.tables[tier], self.asked.rows
        numbers = page_numbers(table, self.forward, rows, pages, device)
        used, back = self._used(tier, torch.int32), None if self.back is None else self.back.flatten(1).int()
        first = pages.start * table.page_tokens
        if first:
            used, back = used - first, None if back is None else back - first
        return PageSpan(numbers, used, back=back)

    def _used(self, tier: int, dtype: torch.dtype) -> Tensor:
        """How many slots of a tier each row uses, `[rows]`."""
        rows, state = self.asked.rows, self.state

        def used(step: Forward) -> list[int]:
            held = state.held_before(step)
            return [held[row][tier] for row in rows]

        return self.forward.tensor(f"slots of tier {tier} of {rows}, {dtype}", used, self.asked.device, dtype)
