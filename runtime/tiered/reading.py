"""What the queries of one forward read of each tier, of the window and of the new tokens; the same for every layer."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from calib.kernels.attend.operation import Stretch
from calib.kernels.dispatch import prefers_triton
from calib.runtime.pages import Pages, upload
from calib.runtime.rows import Forward
from calib.runtime.tiered.rows import TieredRows


class Asked(NamedTuple):
    """Query columns `queries` of rows `rows`, under a sliding window or none, in tiles of `tile` tokens."""

    rows: range
    queries: range
    sliding: int | None
    tile: int
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
        window: leading slots of the exact window that any row uses.
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
    tiers = [_tiles(state, asked, tier, counts) for tier, counts in enumerate(used_of)]
    stretches = [_stretch(state, asked, tier, counts) for tier, counts in enumerate(used_of)]
    records = None if state.records is None else state.records.select(asked.rows, 0, 1, asked.device)
    exact = [state.exact(row, length) for row, length in zip(asked.rows, before, strict=True)]
    first = 0 if asked.sliding is None else max(0, asked.queries.start - asked.sliding + 1)
    new, window = slice(first, asked.queries.stop), max(exact)
    if len(asked.queries) == 1 and asked.sliding is None and len(set(exact)) == 1:
        return TieredReading(tiers, stretches, records, window, new, None, None)
    # By position: a row's window ends where its new tokens begin.
    start, used = (_numbers(numbers, asked.device)[:, None, None, None] for numbers in (before, exact))
    slots, columns = (torch.arange(*ends, device=asked.device) for ends in ((0, window), (first, asked.queries.stop)))
    queries = start + torch.arange(asked.queries.start, asked.queries.stop, device=asked.device)[:, None]
    places = torch.cat([(start - used + slots), start + columns], -1)
    hidden = places > queries
    hidden[..., :window] |= slots >= used
    back = None if asked.sliding is None else queries - asked.sliding
    if back is not None:
        hidden |= places <= back
        unseen = back.flatten(1).int()
        stretches = [None if stretch is None else replace(stretch, back=unseen) for stretch in stretches]
    return TieredReading(tiers, stretches, records, window, new, hidden, back)


def _tiles(state: TieredRows, asked: Asked, tier: int, counts: list[int]) -> list[Tile]:
    table = state.tables[tier]
    page = table.page_tokens
    last, step = -(-max(counts) // page), max(1, asked.tile // (len(asked.rows) * page))
    tiles = []
    for at in range(0, last, step):
        stop = min(at + step, last)
        hidden = None
        if min(counts) < stop * page:
            slots = torch.arange(at * page, stop * page, device=asked.device)
            used = counts[0] if len(set(counts)) == 1 else _numbers(counts, asked.device)[:, None]
            hidden = (slots >= used).view(-1, 1, 1, len(slots))
        tiles.append(Tile(table.select(asked.rows, at, stop, asked.device), at * page, stop * page, hidden))
    return tiles


def _stretch(state: TieredRows, asked: Asked, tier: int, counts: list[int]) -> Stretch | None:
    table, pages = state.tables[tier], -(-max(counts) // state.tables[tier].page_tokens)
    if not pages or not prefers_triton(asked.device):
        return None
    numbers = table.numbers(asked.device)[asked.rows.start : asked.rows.stop, :pages]
    return Stretch(numbers, upload(counts, torch.int32, asked.device))


def _numbers(numbers: list[int], device: torch.device) -> Tensor:
    return upload(numbers, torch.int64, device)
