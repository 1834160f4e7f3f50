"""Where the keys of the exact window lie: KIVI encodes a block of keys while the values of the same tokens are still exact.

    tokens of a row   0 ........ attended ........ packed keys ........ before ........ after
    keys              | packed pages ............................| key window  | this forward
    values            | packed pages   | value window .......................  | this forward

A row reads keys and values from pages up to `attended`. Beyond it the values are exact, and the keys packed ahead of them,
the `recent` ones, are met in their pages.
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
    """For each slot of the value window its key.

    Attributes:
        recent_pages: gives those of the recent keys, for a trimmed plan together with the last tile's; None where there are none.
        index: int64 `[rows, 1, 1, slots]`, among the key window's slots followed by the tokens of `pages`; None where a plan is
            trimmed.
        exact: leading slots of the key window in use: they are the value window's first ones, because both rings have the
            same size. The others belong, in order, to `recent`.
        recent: among the tokens of `pages`, where a plan is trimmed.
        positions: of the tokens of `pages`: a stretch, or int64 `[rows, tokens]`, of slots without a token anything; None where
            there are none.
    """

    recent_pages: Callable[[], Pages] | None
    index: Tensor | None = None
    exact: int = 0
    recent: slice | None = None
    positions: slice | Tensor | None = None
    ahead_index: Tensor | None = None

    @cached_property
    def pages(self) -> Pages | None:
        """`recent_pages`; a kernel that reads all pages does not ask."""
        return None if self.recent_pages is None else self.recent_pages()

    @property
    def ahead(self) -> int:
        """How many keys of a trimmed plan are packed ahead of their values."""
        return 0 if self.recent is None else self.recent.stop - self.recent.start

    @staticmethod
    def of(state: OrderedSequenceState, forward: Forward, plan: ReadPlan, key_slots: int) -> "WindowKeys":
        """What goes with the plan of a forward, of key windows of `key_slots`; made by the first layer that asks."""
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
    """Of rows that hold equally much."""
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
    """Of any rows."""
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
    if forward.of_block:  # whatever its steps find, unless every page has been given back
        some = state.packs_ahead(forward) and state.table.capacity > 0
        reach = -(-state.values.window() // page) + 1
    if some:
        recent = partial(_recent, state, forward, asked, reach)
        ends, firsts = (state.numbers(forward, rows, field, device) for field in ("packed_keys", "page_start"))
        index = torch.where(positions < ends, key_slots + positions - firsts, index)
        read = state.numbers(forward, rows, "packed", device)
        # What is hidden has a score's number, whatever it is: the slot's key need not be there.
        ahead = torch.where(positions < ends, positions - read, -1).masked_fill_(absent, 0).int()
        of_recent = firsts + torch.arange(reach * page, device=device)
    return WindowKeys(
        recent,
        torch.where(absent, torch.zeros_like(index), index)[:, None, None],
        positions=of_recent,
        ahead_index=ahead,
    )


def _recent(state: OrderedSequenceState, forward: Forward, asked: ReadRequest, reach: int) -> Tensor:
    """So many pages of each row, from the one on that has the next token that is attended: int64 `[rows, reach]`."""
    rows, device, table = asked.rows, asked.device, state.table
    if forward.of_block:  # in which they change
        held = table.numbers_with_room(device)[rows.start : rows.stop].long()
        first = state.numbers(forward, rows, "page_start", device) // table.page_tokens
        return held.gather(1, (first + torch.arange(reach, device=device)).clamp_(max=held.shape[1] - 1))
    first_pages = [state.packed(forward.before[row]) // table.page_tokens for row in rows]
    flat = [number for row, at in zip(rows, first_pages, strict=True) for number in table.pages(row, at, reach)]
    return forward.tensor(f"recent {rows} {asked.queries}", lambda _: flat, device).view(len(rows), reach)
