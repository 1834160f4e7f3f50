"""Where the keys of the exact window are: KIVI encodes a block of keys while the values of the same tokens are still exact.

    tokens of a row   0 ........ attended ........ packed keys ........ before ........ after
    keys              | packed pages ............................| key window  | this forward
    values            | packed pages   | value window .......................  | this forward

A row reads keys and values from pages up to `attended`. After it the values are exact. The keys that are packed ahead of them,
the `recent` ones, are scored from their pages.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from calib.runtime.attend.read_plan import ReadPlan, ReadRequest, starts
from calib.runtime.ordered.sequence_state import OrderedSequenceState
from calib.runtime.paging.forward import Forward
from calib.runtime.paging.page_numbers import Pages


@dataclass(frozen=True)
class WindowKeys:
    """Where the key for each slot of the value window is.

    Attributes:
        recent_pages: returns the pages of the recent keys, for a trimmed plan together with the last tile's; None without any.
        index: int64 `[rows, 1, 1, slots]`, an index into the key window's slots followed by the tokens of `pages`; None for a
            trimmed plan.
        exact: leading slots of the key window in use: they match the value window's first slots, because both rings have the
            same size. The other slots belong, in order, to `recent`.
        recent: the recent keys' range among the tokens of `pages`, for a trimmed plan.
        positions: positions of the tokens of `pages`: a slice, or int64 `[rows, tokens]`, undefined in empty slots; None without
            pages.
        ahead_index: int32 `[rows, slots]`: for each window slot its key's index among the packed keys ahead, -1 where the key is
            exact; None without such keys.
    """

    recent_pages: Callable[[], Pages] | None
    index: Tensor | None = None
    exact: int = 0
    recent: slice | None = None
    positions: slice | Tensor | None = None
    ahead_index: Tensor | None = None

    @cached_property
    def pages(self) -> Pages | None:
        """The pages of `recent_pages`; not computed for a kernel that reads all pages."""
        return None if self.recent_pages is None else self.recent_pages()

    @property
    def ahead(self) -> int:
        """How many keys of a trimmed plan are packed ahead of their values."""
        return 0 if self.recent is None else self.recent.stop - self.recent.start

    @staticmethod
    def of(state: OrderedSequenceState, forward: Forward, plan: ReadPlan, key_slots: int) -> "WindowKeys":
        """The window keys for a plan, with key windows of `key_slots`; computed by the first layer that asks."""
        key = (WindowKeys, plan.asked, key_slots)
        if key not in forward.readings:
            made = (
                _trimmed(state, forward, plan)
                if plan.trimmed
                else _indexed(state, forward, plan.asked, plan.window, key_slots)
            )
            forward.readings[key] = made
        found: WindowKeys = forward.readings[key]
        return found


def _trimmed(state: OrderedSequenceState, forward: Forward, plan: ReadPlan) -> WindowKeys:
    """For rows of equal length, which are read by slices."""
    rows, tiles, page = plan.asked.rows, plan.tiers[0], state.table.page_tokens
    length = forward.before[rows.start]
    attended, packed, exact = state.packed(length), state.keys.packed(length), state.keys.slots(length)
    if packed == 0:
        return WindowKeys(None, exact=exact)
    start, last = tiles[-1].start if tiles else 0, -(-packed // page)
    pages = state.table.select(rows, start // page, last, plan.asked.device)
    recent = slice(attended - start, packed - start)
    return WindowKeys(lambda: pages, exact=exact, recent=recent, positions=slice(start // page * page, last * page))


def _indexed(
    state: OrderedSequenceState, forward: Forward, asked: ReadRequest, slots: int, key_slots: int
) -> WindowKeys:
    """For rows of any lengths."""
    rows, device = asked.rows, asked.device
    before, page = [forward.before[row] for row in rows], state.table.page_tokens
    attended, packed = ([of(length) for length in before] for of in (state.packed, state.keys.packed))
    back = None if asked.sliding is None else asked.queries.start - asked.sliding + 1
    seen = [0 if back is None else length + back for length in before]
    start, positions = starts(forward, rows, device), state.positions(forward, rows, slots, device)
    absent = positions >= start if back is None else (positions >= start) | (positions < start + back)
    index = positions % max(1, state.keys.window())
    recent: Callable[[], Pages] | None = None
    of_recent, ahead = None, None
    some = any(stop > max(read, oldest) for stop, read, oldest in zip(packed, attended, seen, strict=True))
    reach = max(-(-stop // page) - count // page for stop, count in zip(packed, attended, strict=True))
    if forward.of_block:  # the same in all its steps, unless every page has been freed
        some = state.packs_ahead(forward) and state.table.capacity > 0
        reach = -(-state.values.window() // page) + 1
    if some:
        recent = partial(_recent, state, forward, asked, reach)
        ends, firsts = (state.numbers(forward, rows, field, device) for field in ("packed_keys", "page_start"))
        index = torch.where(positions < ends, key_slots + positions - firsts, index)
        read = state.numbers(forward, rows, "packed", device)
        # A hidden slot gets the index of some score, because its key need not be there.
        ahead = torch.where(positions < ends, positions - read, -1).masked_fill_(absent, 0).int()
        of_recent = firsts + torch.arange(reach * page, device=device)
    return WindowKeys(
        recent,
        torch.where(absent, torch.zeros_like(index), index)[:, None, None],
        positions=of_recent,
        ahead_index=ahead,
    )


def _recent(state: OrderedSequenceState, forward: Forward, asked: ReadRequest, reach: int) -> Tensor:
    """`reach` pages of each row, from the page of the row's next attended token on: int64 `[rows, reach]`."""
    rows, device, table = asked.rows, asked.device, state.table
    if forward.of_block:  # page numbers change within a block
        held = table.numbers_with_room(device)[rows.start : rows.stop].long()
        first = state.numbers(forward, rows, "page_start", device) // table.page_tokens
        return held.gather(1, (first + torch.arange(reach, device=device)).clamp_(max=held.shape[1] - 1))
    first_pages = [state.packed(forward.before[row]) // table.page_tokens for row in rows]
    flat = [number for row, at in zip(rows, first_pages, strict=True) for number in table.pages(row, at, reach)]
    return forward.tensor(f"recent {rows} {asked.queries}", lambda _: flat, device).view(len(rows), reach)
