"""Sequences whose tokens lie in tiers: a table of pages for each, filled alike by every layer and KV head."""

from collections.abc import Hashable, Sequence
from operator import add, sub
from typing import NamedTuple

import torch
from torch import Tensor

from calib.runtime.files.state import State, StateError, wholes
from calib.runtime.messages.printable import printable
from calib.runtime.paging.forward import Forward
from calib.runtime.paging.pages import PageTable
from calib.runtime.paging.sequence_state import SequenceState
from calib.runtime.stages.selection import NO_END, Tiering
from calib.runtime.tiered.probe_rows import ProbeRows

MOST_KNOWN = 4096  # lengths whose slots are remembered


class RowSlots(NamedTuple):
    """What follows from the lengths of a row and of its prompt: slots in use of the stored tiers and of the exact window, and slots
    and pages of every table."""

    held: list[int]
    exact: int
    filled: list[int]
    pages: tuple[int, ...]


class BatchSlots(NamedTuple):
    """Slots in use and pages of all rows, see `RowSlots`, and what each of the next `steps`, one token in every row, adds to them:
    `held_grows` to the stored tiers (None: nothing in any row), `exact_grows` to the exact window. Pages stay the same. `tiers` say
    where each row's token goes, see `NextTokens`."""

    held: list[list[int]]
    exact: list[int]
    pages: tuple[tuple[int, ...], ...]
    tiers: list[int | None]
    held_grows: list[list[int]] | None
    exact_grows: list[int]
    steps: int

    def next(self) -> "BatchSlots":
        """Behind one of these steps."""
        held, grows = self.held, self.held_grows
        if grows is not None:
            held = [list(map(add, *of_row)) for of_row in zip(held, grows, strict=True)]
        exact = list(map(add, self.exact, self.exact_grows))
        return BatchSlots(held, exact, self.pages, self.tiers, grows, self.exact_grows, self.steps - 1)


class TieredSequenceState(SequenceState):
    """Lengths, prompts and pages. Which tokens a slot holds differs by layer and head; how many slots are in use does not."""

    def __init__(
        self,
        tiering: Tiering,
        page_tokens: Sequence[int],
        layers: int,
        sliding: int | None = None,
        row_params: bool = False,
    ) -> None:
        """`page_tokens` of the tiers that are stored; where the tiering names one more, its tokens are evicted.

        With `row_params` a row has, besides, one page of what its first segment shares, from when anything is encoded.
        """
        self.tiering, self.stored = tiering, len(page_tokens)
        self.sinks = tiering.exact_sinks
        self.first = tiering.slots_from
        self.probe_rows = ProbeRows()
        self._known: dict[tuple[int, int], RowSlots] = {}
        # Of the rows as a forward has left them: their lengths, those of their prompts, and what follows from them.
        self._latest: tuple[tuple[list[int], list[int]], BatchSlots] | None = None
        super().__init__(layers, sliding, [*page_tokens, 1] if row_params else page_tokens)

    @property
    def row_params(self) -> PageTable | None:
        """The table of what rows' first segments share."""
        return self.tables[-1] if len(self.tables) > self.stored else None

    def clear(self) -> None:
        """Also the prompts' lengths."""
        super().clear()
        self.prompts: list[int] = []

    def held(self, row: int, length: int) -> list[int]:
        """Slots in use of each stored tier when `row` holds `length` tokens."""
        return self._at(row, length).held

    def exact(self, row: int, length: int) -> int:
        """Slots in use of the exact window then."""
        return self._at(row, length).exact

    def slots(self, forward: Forward) -> tuple[BatchSlots, BatchSlots]:
        """Before and behind a forward that pages are reserved for; worked out once."""
        found: tuple[BatchSlots, BatchSlots] | None = forward.readings.get(BatchSlots)
        if found is None:
            before = self._of_lengths(forward.before)
            # A step of one token in every row follows from the one before, until behind it a row's tokens go elsewhere.
            steps = before.steps > 1 and forward.width == 1 and forward.columns is None
            after = before.next() if steps else self._of_lengths(forward.after)
            self._latest = (forward.after, list(self.prompts)), after
            found = forward.readings[BatchSlots] = before, after
        return found

    def _of_lengths(self, lengths: list[int]) -> BatchSlots:
        """See `BatchSlots`; what a forward ends with is what the next one begins with."""
        if self._latest is not None and self._latest[0] == (lengths, self.prompts):
            return self._latest[1]
        prompts, steps = self.prompts or [0] * len(lengths), NO_END
        rows, tiers, grows = list[RowSlots](), list[int | None](), list[list[int]]()
        for row, (length, prompt) in enumerate(zip(lengths, prompts, strict=True)):
            own, (tier, tokens) = self._at(row, length), self.tiering.next_tokens(length, prompt)
            if tier is not None and tier < self.stored:
                # In a page that the row has.
                tokens = min(tokens, own.pages[tier] * self.tables[tier].page_tokens - own.held[tier])
            rows.append(own)
            tiers.append(tier)
            grows.append([int(number == tier) for number in range(self.stored)])
            steps = min(steps, tokens)
        held, exact, _, pages = zip(*rows, strict=True) if rows else ((), (), (), ())
        some = grows if any(map(any, grows)) else None
        return BatchSlots(
            list(held), list(exact), tuple(pages), tiers, some, [int(tier is None) for tier in tiers], steps
        )

    def held_before(self, forward: Forward) -> list[list[int]]:
        """See `ReadableRows`."""
        return self.slots(forward)[0].held

    def exact_before(self, forward: Forward) -> list[int]:
        """See `ReadableRows`."""
        return self.slots(forward)[0].exact

    def _at(self, row: int, length: int) -> RowSlots:
        """See `RowSlots`."""
        key = (length, self.prompts[row] if self.prompts else 0)
        return self._known.get(key) or self._known_from_now(key)

    def _known_from_now(self, key: tuple[int, int]) -> RowSlots:
        """Remembered, because rows of one length and consecutive steps ask again."""
        if len(self._known) > MOST_KNOWN:
            self._known.clear()
        found = self._known[key] = self._row_of(*key)
        return found

    def _row_of(self, length: int, prompt: int) -> RowSlots:
        held = self.tiering.held(length, prompt)[: self.stored]
        filled = held if self.row_params is None else [*held, int(sum(held) > 0)]
        pages = tuple([-(-slots // table.page_tokens) for slots, table in zip(filled, self.tables, strict=True)])
        return RowSlots(held, self.tiering.exact(length, prompt), filled, pages)

    def most_exact(self, forward: Forward, rows: range) -> int:
        """Slots of the window that any of the `rows` uses."""
        key = ("most exact", rows)
        if key not in forward.readings:  # the same for every layer
            forward.readings[key] = max(self.slots(forward)[0].exact[rows.start : rows.stop])
        found: int = forward.readings[key]
        return found

    def kept(self, row: int, length: int) -> int:
        """Tokens of `row` in the cache when it has seen `length`."""
        return sum(self.held(row, length)) + self.exact(row, length)

    def encoded(self, row: int, length: int) -> int:
        """All that are not in the window."""
        return length - self.exact(row, length)

    def positions(self, forward: Forward, rows: range, slots: int, device: torch.device) -> Tensor:
        """See `ReadableRows`: sinks, then the newest."""

        def encoded(step: Forward) -> list[int]:
            own = slice(rows.start, rows.stop)
            return list(map(sub, step.before[own], self.slots(step)[0].exact[own]))

        away = forward.tensor(f"encoded of {rows}", encoded, device)
        slot = torch.arange(slots, device=device)
        return slot + away[:, None] * (slot >= self.sinks)

    def prompt(self, row: int) -> int:
        """Tokens of the row's first forward; 0 before it is stored."""
        return self.prompts[row] if self.prompts else 0

    def equal_length_groups(self, forward: Forward) -> list[list[int]]:
        """`forward.equal_length_groups`, with rows of prompts of different length in groups of their own."""
        groups: dict[tuple[int, int], list[int]] = {}
        for number, rows in enumerate(forward.equal_length_groups):
            for row in rows:
                groups.setdefault((number, self.prompt(row)), []).append(row)
        return list(groups.values())

    def graph_key(self, forward: Forward) -> Hashable:
        """What the shapes of a `ReadPlan` follow from: equal in the steps of a block."""
        pages = self.slots(forward)[0].pages
        asked = tuple([table.version for table in self.tables]), pages
        if asked != self._alike[0]:
            self._alike = asked, asked if self.sliding is not None else self._with_room(pages)
        return self._alike[1]

    def _with_room(self, pages: tuple[tuple[int, ...], ...]) -> Hashable:
        """What rows that have so many `pages` of each table share with those that have a few more. A table's numbers are as wide as
        its longest row has pages behind the forward."""
        of_tables = enumerate(zip(self.tables, map(max, zip(*pages, strict=True)), strict=True))
        return tuple(
            (
                table.moves if self.gains(number) else table.version,
                *(self.room(number, count) for count in (most, table.longest)),
            )
            for number, (table, most) in of_tables
        )

    def slots_with_room(self, forward: Forward) -> int:
        """Slots of all tiers that the steps of a block read of a row, from before the forward on."""
        of_tiers = zip(self.tables, zip(*self.slots(forward)[0].pages, strict=True), strict=True)
        return sum(
            self.room(number, max(pages)) * table.page_tokens
            for number, (table, pages) in enumerate(of_tiers)
            if number < self.stored
        )

    def gains(self, table: int) -> bool:
        """Not those of tiers whose tokens are exchanged."""
        return super().gains(table) and table < self.stored and not self.tiering.rewritten(table)

    def reserve(self, forward: Forward) -> None:
        """Pages for what each tier gains; the pages of a tier whose slots are used again become the row's own."""
        if not self.prompts:
            self.prompts = [0] * len(forward.before)
        for row, (before, count) in enumerate(zip(forward.before, forward.counts, strict=True)):
            if count and not before:
                self.prompts[row] = count
        held = [
            list(zip(self._at(row, before).filled, self._at(row, after).filled, strict=True))
            for row, (before, after) in enumerate(zip(forward.before, forward.after, strict=True))
        ]
        forward.copies = []
        for tier, table in enumerate(self.tables):
            spans, page = [of_row[tier] for of_row in held], table.page_tokens
            rewritten = tier < self.stored and self.tiering.rewritten(tier)
            pages = [-(-after // page) for _, after in spans]
            self.free_pages(tier, pages, [len(own) for own in table.rows])
            copies = []
            for row, ((before, after), count) in enumerate(zip(spans, pages, strict=True)):
                first = 0 if rewritten else before // page
                changes = after > before or (forward.counts[row] and rewritten)
                copies += table.reserve(row, count, range(first, count) if changes else ())
            forward.copies.append(copies)

    def state(self) -> State:
        """Also the prompts."""
        return super().state() | {"prompts": self.prompts}

    def restore_own(self, state: State) -> None:
        """The prompts."""
        self.prompts = wholes(state, "prompts")
        fits = len(self.prompts) == len(self.lengths) and all(
            min(length, 1) <= prompt <= length for prompt, length in zip(self.prompts, self.lengths, strict=True)
        )
        if not fits:
            raise StateError(
                f"prompts of {printable(self.prompts)} tokens, expected the first of each row's {printable(self.lengths)}"
            )

    def pages_of(self, row: int, length: int) -> tuple[int, ...]:
        """What its slots take."""
        return self._at(row, length).pages

    def pages_behind(self, forward: Forward) -> tuple[tuple[int, ...], ...]:
        """Of every row once the forward is stored."""
        return self.slots(forward)[1].pages

    def permute(self, sources: list[int]) -> list[list[int] | None]:
        """Also the prompts."""
        kept = super().permute(sources)
        self.prompts = [self.prompts[source] for source in sources] if self.prompts else []
        return kept
