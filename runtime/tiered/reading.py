"""What the queries of one forward read of each tier, of the window and of the new tokens; the same for every layer."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from calib.runtime.pages import TIER_PAGE_TOKENS, Pages, upload
from calib.runtime.rows import Forward
from calib.runtime.tiered.rows import TieredRows


class Asked(NamedTuple):
    """Query columns `queries` of rows `rows`, under a sliding window or none, in tiles of `tile` tokens."""

    rows: range
    queries: range
    sliding: int | None
    tile: int
    device: torch.device


@dataclass(frozen=True)
class TieredReading:
    """Pages and masks.

    Attributes:
        tiers: of each tier its (pages, hidden); `hidden` bool `[rows or 1, 1, 1, tokens]` or None: slots without a token.
        window: leading slots of the exact window that any row uses.
        new: the new tokens that are read: none after the last query, none before the first one's sliding window.
        hidden: mask of the window's slots and those new tokens together, `[rows or 1, 1, queries or 1, tokens]` or None.
        back: int64 `[rows, 1, queries, 1]`: a token at this position or before is behind the query's sliding window.
    """

    tiers: list[list[tuple[Pages, Tensor | None]]]
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
    tiers = [_tiles(state, asked, tier, [counts[tier] for counts in held]) for tier in range(len(state.tables))]
    exact = [state.exact(row, length) for row, length in zip(asked.rows, before, strict=True)]
    first = 0 if asked.sliding is None else max(0, asked.queries.start - asked.sliding + 1)
    new, window = slice(first, asked.queries.stop), max(exact)
    if len(asked.queries) == 1 and asked.sliding is None and len(set(exact)) == 1:
        return TieredReading(tiers, window, new, None, None)
    # By position: a row's window ends where its new tokens begin.
    start, used = (_numbers(numbers, asked.device)[:, None, None, None] for numbers in (before, exact))
    slots, columns = (torch.arange(*ends, device=asked.device) for ends in ((0, window), (first, asked.queries.stop)))
    queries = start + torch.arange(asked.queries.start, asked.queries.stop, device=asked.device)[:, None]
    places = torch.cat([(start - used + slots), start + columns], -1)
    hidden = places > queries
    hidden[..., :window] |= slots >= used
    back = None if asked.sliding is None else queries - asked.sliding
    return TieredReading(tiers, window, new, hidden if back is None else hidden | (places <= back), back)


def _tiles(state: TieredRows, asked: Asked, tier: int, counts: list[int]) -> list[tuple[Pages, Tensor | None]]:
    last, step = -(-max(counts) // TIER_PAGE_TOKENS), max(1, asked.tile // (len(asked.rows) * TIER_PAGE_TOKENS))
    tiles: list[tuple[Pages, Tensor | None]] = []
    for at in range(0, last, step):
        stop = min(at + step, last)
        pages, hidden = state.tables[tier].select(asked.rows, at, stop, asked.device), None
        if min(counts) < stop * TIER_PAGE_TOKENS:
            slots = torch.arange(at * TIER_PAGE_TOKENS, stop * TIER_PAGE_TOKENS, device=asked.device)
            used = counts[0] if len(set(counts)) == 1 else _numbers(counts, asked.device)[:, None]
            hidden = (slots >= used).view(-1, 1, 1, len(slots))
        tiles.append((pages, hidden))
    return tiles


def _numbers(numbers: list[int], device: torch.device) -> Tensor:
    return upload(numbers, torch.int64, device)
