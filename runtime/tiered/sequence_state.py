"""Sequences whose tokens are in tiers: one page table for each tier, which all layers and KV heads fill alike."""

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

MOST_KNOWN = 4096  # lengths whose slots are cached


class RowSlots(NamedTuple):
    """What follows from the lengths of a row and of its prompt: slots in use of the stored tiers (`held`) and of the exact
    window (`exact`), and slots (`filled`) and pages of every table."""

    held: list[int]
    exact: int
    filled: list[int]
    pages: tuple[int, ...]


class BatchSlots(NamedTuple):
    """The slots in use and pages of all rows (`RowSlots`), and how decode steps change them.

    Each of the next `steps`, with one token in every row, adds `held_grows` to the stored tiers (None: nothing in any row) and
    `exact_grows` to the exact window; pages stay the same. `tiers` says for each row where its token goes (`NextTokens`).
    """

    held: list[list[int]]
    exact: list[int]
    pages: tuple[tuple[int, ...], ...]
    tiers: list[int | None]
    held_grows: list[list[int]] | None
    exact_grows: list[int]
    steps: int

    def next(self) -> "BatchSlots":
        """The slots after one of these steps."""
        held, grows = self.held, self.held_grows
        if grows is not None:
            held = [list(map(add, *of_row)) for of_row in zip(held, grows, strict=True)]
        exact = list(map(add, self.exact, self.exact_grows))
        return BatchSlots(held, exact, self.pages, self.tiers, grows, self.exact_grows, self.steps - 1)


class TieredSequenceState(SequenceState):
    """Lengths, prompts and pages. Which token is in a slot differs by layer and head; how many slots are in use does not."""

    def __init__(
        self,
        tiering: Tiering,
        page_tokens: Sequence[int],
        layers: int,
        sliding: int | None = None,
        row_params: bool = False,
    ) -> None:
        """`page_tokens` are those of the stored tiers; where the tiering has one more tier, its tokens are evicted.

        With `row_params`, a row also has one page for the parameters that its first segment shares, from its first encoded
        token on.
        """
        self.tiering, self.stored = tiering, len(page_tokens)
        self.sinks = tiering.exact_sinks
        self.first = tiering.slots_from
        self.probe_rows = ProbeRows()
        self._known: dict[tuple[int, int], RowSlots] = {}
        # The last forward's result: the rows' lengths and prompts after it, and their slots.
        self._latest: tuple[tuple[list[int], list[int]], BatchSlots] | None = None
        super().__init__(layers, sliding, [*page_tokens, 1] if row_params else page_tokens)

    @property
    def row_params(self) -> PageTable | None:
        """The table of the parameters that rows' first segments share; None without such parameters."""
        return self.tables[-1] if len(self.tables) > self.stored else None

    def clear(self) -> None:
        """Removes every row, with its prompt's length."""
        super().clear()
        self.prompts: list[int] = []

    def held(self, row: int, length: int) -> list[int]:
        """Slots in use of each stored tier when `row` holds `length` tokens."""
        return self._at(row, length).held

    def exact(self, row: int, length: int) -> int:
        """Slots in use of the exact window when `row` holds `length` tokens."""
        return self._at(row, length).exact

    def slots(self, forward: Forward) -> tuple[BatchSlots, BatchSlots]:
        """The slots before and after a forward whose pages are reserved; computed once."""
        found: tuple[BatchSlots, BatchSlots] | None = forward.readings.get(BatchSlots)
        if found is None:
            before = self._of_lengths(forward.before)
            # A step of one token in every row follows from the one before, as long as tokens go to the same tiers and pages.
            steps = before.steps > 1 and forward.width == 1 and forward.columns is None
            after = before.next() if steps else self._of_lengths(forward.after)
            self._latest = (forward.after, list(self.prompts)), after
            found = forward.readings[BatchSlots] = before, after
        return found

    def _of_lengths(self, lengths: list[int]) -> BatchSlots:
        """The slots of rows of these lengths; the last forward's result is reused as the next one's start."""
        if self._latest is not None and self._latest[0] == (lengths, self.prompts):
            return self._latest[1]
        prompts, steps = self.prompts or [0] * len(lengths), NO_END
        rows, tiers, grows = list[RowSlots](), list[int | None](), list[list[int]]()
        for row, (length, prompt) in enumerate(zip(lengths, prompts, strict=True)):
            own, (tier, tokens) = self._at(row, length), self.tiering.next_tokens(length, prompt)
            if tier is not None and tier < self.stored:
                # Only as many as fit in pages that the row has.
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
        """As in `ReadableRows`."""
        return self.slots(forward)[0].held

    def exact_before(self, forward: Forward) -> list[int]:
        """As in `ReadableRows`."""
        return self.slots(forward)[0].exact

    def _at(self, row: int, length: int) -> RowSlots:
        """The `RowSlots` of a row that holds `length` tokens."""
        key = (length, self.prompts[row] if self.prompts else 0)
        return self._known.get(key) or self._known_from_now(key)

    def _known_from_now(self, key: tuple[int, int]) -> RowSlots:
        """Computes and caches them, because rows of one length and consecutive steps need the same."""
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
        """The largest number of window slots that any of the `rows` uses."""
        key = ("most exact", rows)
        if key not in forward.readings:  # the same for every layer
            forward.readings[key] = max(self.slots(forward)[0].exact[rows.start : rows.stop])
        found: int = forward.readings[key]
        return found

    def kept(self, row: int, length: int) -> int:
        """How many tokens of `row` are in the cache when it has seen `length`."""
        return sum(self.held(row, length)) + self.exact(row, length)

    def encoded(self, row: int, length: int) -> int:
        """How many tokens are not in the window: encoded or evicted ones."""
        return length - self.exact(row, length)

    def positions(self, forward: Forward, rows: range, slots: int, device: torch.device) -> Tensor:
        """As in `ReadableRows`: sinks, then the newest tokens."""

        def encoded(step: Forward) -> list[int]:
            own = slice(rows.start, rows.stop)
            return list(map(sub, step.before[own], self.slots(step)[0].exact[own]))

        away = forward.tensor(f"encoded of {rows}", encoded, device)
        slot = torch.arange(slots, device=device)
        return slot + away[:, None] * (slot >= self.sinks)

    def prompt(self, row: int) -> int:
        """The length of the row's first forward; 0 before it is stored."""
        return self.prompts[row] if self.prompts else 0

    def equal_length_groups(self, forward: Forward) -> list[list[int]]:
        """`forward.equal_length_groups`, split further by the lengths of prompts."""
        groups: dict[tuple[int, int], list[int]] = {}
        for number, rows in enumerate(forward.equal_length_groups):
            for row in rows:
                groups.setdefault((number, self.prompt(row)), []).append(row)
        return list(groups.values())

    def graph_key(self, forward: Forward) -> Hashable:
        """A key of the shapes of a `ReadPlan`: equal in all steps of a block."""
        pages = self.slots(forward)[0].pages
        asked = tuple([table.version for table in self.tables]), pages
        if asked != self._alike[0]:
            self._alike = asked, asked if self.sliding is not None else self._with_room(pages)
        return self._alike[1]

    def _with_room(self, pages: tuple[tuple[int, ...], ...]) -> Hashable:
        """A key that rows with so many `pages` in each table share with rows that have a few more. It includes each table's
        longest row after the forward, which is the width of the table's tensor."""
        of_tables = enumerate(zip(self.tables, map(max, zip(*pages, strict=True)), strict=True))
        return tuple(
            (
                table.moves if self.gains(number) else table.version,
                *(self.room(number, count) for count in (most, table.longest)),
            )
            for number, (table, most) in of_tables
        )

    def slots_with_room(self, forward: Forward) -> int:
        """How many slots of all tiers together the steps of a block read of a row, from this forward on."""
        of_tiers = zip(self.tables, zip(*self.slots(forward)[0].pages, strict=True), strict=True)
        return sum(
            self.room(number, max(pages)) * table.page_tokens
            for number, (table, pages) in enumerate(of_tiers)
            if number < self.stored
        )

    def gains(self, table: int) -> bool:
        """As in `SequenceState`; tables of tiers whose slots are rewritten do not only gain."""
        return super().gains(table) and table < self.stored and not self.tiering.rewritten(table)

    def reserve(self, forward: Forward) -> None:
        """Reserves pages for the tokens that each tier gains; in tiers that rewrite slots, shared pages become the row's own."""
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
        """Lengths, pages and prompts."""
        return super().state() | {"prompts": self.prompts}

    def restore_own(self, state: State) -> None:
        """Restores the prompts. Raises StateError where they do not fit the lengths."""
        self.prompts = wholes(state, "prompts")
        fits = len(self.prompts) == len(self.lengths) and all(
            min(length, 1) <= prompt <= length for prompt, length in zip(self.prompts, self.lengths, strict=True)
        )
        if not fits:
            raise StateError(
                f"prompts have {printable(self.prompts)} tokens, expected at most each row's {printable(self.lengths)}"
            )

    def pages_of(self, row: int, length: int) -> tuple[int, ...]:
        """The pages of the row's slots in each table."""
        return self._at(row, length).pages

    def pages_behind(self, forward: Forward) -> tuple[tuple[int, ...], ...]:
        """The pages of every row after the forward is stored."""
        return self.slots(forward)[1].pages

    def permute(self, sources: list[int]) -> list[list[int] | None]:
        """As in `SequenceState`, with the prompts."""
        kept = super().permute(sources)
        self.prompts = [self.prompts[source] for source in sources] if self.prompts else []
        return kept
