"""What the queries of one forward read of each tier, of the window and of the new tokens; the same for every layer."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from calib.kernels.attend.operation import Stretch
from calib.kernels.dispatch import prefers_triton
from calib.runtime.pages import Pages
from calib.runtime.rows import Forward
from calib.runtime.tiered.rows import TieredRows


class Asked(NamedTuple):
    """Query columns `queries` of rows `rows`, under a sliding window or none, in tiles of `tile` tokens; they meet `window`
    slots of the exact window."""

    rows: range
    queries: range
    sliding: int | None
    tile: int
    window: int
    device: torch.device


class Tile(NamedTuple):
    """Pages of a tier, their slots, and which of these are without a token: `hidden` bool `[rows or 1, 1, 1, slots]` or None."""

    pages: Pages
    start: int
    stop: int
    hidden: Tensor | None


@dataclass(frozen=True)
class TieredReading:
    """Pages and masks.

    Attributes:
        tiers: the tiles of each.
        stretches: the same slots all at once, for a kernel; None where a tier has none in use.
        records: the pages of the rows' records, where there are any.
        window: leading slots of the exact window that are read.
        new: the new tokens that are read: none after the last query, none before the first one's sliding window.
        hidden: mask of the window's slots and those new tokens together, `[rows or 1, 1, queries or 1, tokens]` or None.
        back: int64 `[rows, 1, queries, 1]`: a token at this position or before is behind the query's sliding window.
    """

    tiers: list[list[Tile]]
    stretches: list[Stretch | None]
    records: Pages | None
    window: int
    new: slice
    hidden: Tensor | None
    back: Tensor | None

    @staticmethod
    def of(state: TieredRows, forward: Forward, asked: Asked) -> "TieredReading":
        """The reading of a forward; made by the first layer that asks."""
        if asked not in forward.readings:
            forward.readings[asked] = _made(state, forward, asked)
        reading: TieredReading = forward.readings[asked]
        return reading


def _made(state: TieredRows, forward: Forward, asked: Asked) -> TieredReading:
    before = [forward.before[row] for row in asked.rows]
    held = [state.held(row, length) for row, length in zip(asked.rows, before, strict=True)]
    used_of = [[counts[tier] for counts in held] for tier in range(state.stored)]
    tiers = [_tiles(state, forward, asked, tier, counts) for tier, counts in enumerate(used_of)]
    stretches = [_stretch(state, forward, asked, tier, counts) for tier, counts in enumerate(used_of)]
    records = None if state.records is None else state.records.select(asked.rows, 0, 1, asked.device)
    exact = [state.exact(row, length) for row, length in zip(asked.rows, before, strict=True)]
    first = 0 if asked.sliding is None else max(0, asked.queries.start - asked.sliding + 1)
    new, window = slice(first, asked.queries.stop), asked.window
    if len(asked.queries) == 1 and asked.sliding is None and set(exact) == {window} and forward.fed is None:
        return TieredReading(tiers, stretches, records, window, new, None, None)
    # By position: a row's window ends where its new tokens begin.
    rows, device = asked.rows, asked.device
    start = forward.tensor(f"held by {rows}", lambda step: [step.before[row] for row in rows], device)
    used = forward.tensor(f"exact of {rows}", lambda step: [state.exact(row, step.before[row]) for row in rows], device)
    start, used = start[:, None, None, None], used[:, None, None, None]
    columns = torch.arange(first, asked.queries.stop, device=device)
    queries = start + torch.arange(asked.queries.start, asked.queries.stop, device=device)[:, None]
    of_window = state.places(forward, rows, window, device)[:, None, None]
    places = torch.cat([of_window, start + columns], -1)
    hidden = places > queries
    hidden[..., :window] |= torch.arange(window, device=device) >= used
    back = None if asked.sliding is None else queries - asked.sliding
    if back is not None:
        hidden |= places <= back
        unseen = back.flatten(1).int()
        stretches = [None if stretch is None else replace(stretch, back=unseen) for stretch in stretches]
    return TieredReading(tiers, stretches, records, window, new, hidden, back)


def _tiles(state: TieredRows, forward: Forward, asked: Asked, tier: int, counts: list[int]) -> list[Tile]:
    table = state.tables[tier]
    page = table.page_tokens
    last, step = -(-max(counts) // page), max(1, asked.tile // (len(asked.rows) * page))
    tiles = []
    for at in range(0, last, step):
        stop = min(at + step, last)
        hidden = None
        if min(counts) < stop * page:
            slots = torch.arange(at * page, stop * page, device=asked.device)
            level = len(set(counts)) == 1 and forward.fed is None
            used = counts[0] if level else _counts(state, forward, asked, tier, torch.int64)[:, None]
            hidden = (slots >= used).view(-1, 1, 1, len(slots))
        tiles.append(Tile(table.select(asked.rows, at, stop, asked.device), at * page, stop * page, hidden))
    return tiles


def _stretch(state: TieredRows, forward: Forward, asked: Asked, tier: int, counts: list[int]) -> Stretch | None:
    table, pages = state.tables[tier], -(-max(counts) // state.tables[tier].page_tokens)
    if not pages or not prefers_triton(asked.device):
        return None
    numbers = table.numbers(asked.device)[asked.rows.start : asked.rows.stop, :pages]
    return Stretch(numbers, _counts(state, forward, asked, tier, torch.int32))


def _counts(state: TieredRows, forward: Forward, asked: Asked, tier: int, dtype: torch.dtype) -> Tensor:
    """Slots of a tier that each row uses, `[rows]`."""
    rows = asked.rows
    name = f"slots of tier {tier} of {rows}, {dtype}"
    return forward.tensor(
        name, lambda step: [state.held(row, step.before[row])[tier] for row in rows], asked.device, dtype
    )
