"""What the queries of one forward read, worked out once and used by every layer: page tiles, window slots, masks.

`LevelStep` serves the decode step of rows that hold equally much, in numbers of the host alone; `Reading` everything
else (ragged rows, several queries, sliding windows) with an index and masks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from calib.kernels.attend.operation import Stretch
from calib.kernels.dispatch import prefers_triton
from calib.runtime.numbers import Numbers
from calib.runtime.ordered.rows import OrderedRows
from calib.runtime.pages import PAGE_TOKENS, Pages
from calib.runtime.rows import Forward


class Asked(NamedTuple):
    """Who reads: query columns `queries` of rows `rows`, under a sliding window or none, in tiles of `tile` tokens.

    `windows` are the allocated slots of the key and value windows.
    """

    rows: range
    queries: range
    sliding: int | None
    windows: tuple[int, int]
    tile: int
    device: torch.device


@dataclass(frozen=True)
class LevelStep:
    """One query column for rows of the same length L, without a sliding window.

    Attributes:
        tiles: pages of the tokens whose key and value are packed, all but the last tile.
        last, last_keys: pages of the last tile, for values and, reaching on over the keys packed ahead, for keys; None
            where nothing is packed. `last` holds `last_tokens` tokens of which the first `read` are read.
        exact_keys: leading slots of the key window in use.
        recent: the keys packed ahead of their values, among the tokens of `last_keys`.
        slots: leading slots of the value window in use: its first `exact_keys` belong to exact keys, the others, in
            order, to `recent`, because both rings have the same size.
    """

    tiles: list[Pages]
    last: Pages | None
    last_keys: Pages
    last_tokens: int
    read: int
    exact_keys: int
    recent: slice
    slots: int

    @staticmethod
    def of(state: OrderedRows, forward: Forward, asked: Asked) -> "LevelStep | None":
        """The step of a forward, made by the first layer that asks; None where the rows are not level."""
        if asked.queries.stop > 1 or asked.sliding is not None or state.keys.window() != state.values.window():
            return None
        if forward.fed is not None:  # its shapes are one step's
            return None
        key = (LevelStep, asked)
        if key not in forward.readings:
            lengths = {forward.before[row] for row in asked.rows}
            forward.readings[key] = LevelStep._made(state, lengths.pop(), asked) if len(lengths) == 1 else None
        step: LevelStep | None = forward.readings[key]
        return step

    @staticmethod
    def _made(state: OrderedRows, length: int, asked: Asked) -> "LevelStep":
        rows, device = asked.rows, asked.device
        attended, packed = state.packed(length), state.keys.packed(length)
        spans = tile_spans(0, attended, len(rows), asked.tile)
        tiles = [state.table.select(rows, span.start, span.stop, device) for span in spans]
        slots, exact_keys = state.values.slots(length), state.keys.slots(length)
        if packed == 0:
            return LevelStep([], None, slice(0), 0, 0, exact_keys, slice(0), slots)
        first = spans[-1].start if spans else 0
        stop = max(-(-packed // PAGE_TOKENS), spans[-1].stop if spans else 0)
        return LevelStep(
            tiles[:-1],
            tiles[-1] if tiles else state.table.select(rows, 0, 1, device),
            state.table.select(rows, first, stop, device),
            len(spans[-1]) * PAGE_TOKENS if spans else PAGE_TOKENS,
            attended - first * PAGE_TOKENS,
            exact_keys,
            slice(attended - first * PAGE_TOKENS, packed - first * PAGE_TOKENS),
            slots,
        )


@dataclass(frozen=True)
class Reading:
    """Everything but the tokens themselves, for some query columns of some rows.

    Attributes:
        stretch: the tokens whose key and value are packed, all at once, for a kernel; None where there are none.
        tiles: (pages, hidden) of the same tokens, at most `tile` over all rows each;
            `hidden` bool `[rows, 1, query rows or 1, tokens]` or None. The last one's mask is part of `hidden` below.
        starts: the place of each tile's first token; the last tile has `last_tokens`.
        recent: pages of keys already packed whose values are still exact, or None.
        window: int64 `[rows, 1, 1, slots]`: where the key of each slot of the value window is found among the key
            window's slots followed by the `recent` pages' tokens; None without a window.
        places: int64 `[rows, 1, slots]`: the token of each of those slots, negative where none lies.
        new: the new tokens that are read: none after the last query, none before the first one's sliding window.
        held: int64 `[rows, 1]`: the place of each row's first new token.
        hidden: mask of the last tile, the window and those new tokens together, or None where all are seen.
        back: int64 `[rows, 1, queries, 1]`: a token at this place or before is behind the query's sliding window.
    """

    stretch: Stretch | None
    tiles: list[tuple[Pages, Tensor | None]]
    starts: list[int]
    last_tokens: int
    recent: Pages | None
    window: Tensor | None
    places: Tensor | None
    new: slice
    held: Tensor
    hidden: Tensor | None
    back: Tensor | None

    @cached_property
    def last(self) -> Tensor:
        """int64 `[rows, 1, tokens]`: the places of the last tile's tokens, the window's and the new ones that are read; where
        no token lies any place that is not negative."""
        device, rows = self.held.device, len(self.held)
        parts = [
            torch.arange(start, start + self.last_tokens, device=device).expand(rows, 1, -1)
            for start in self.starts[-1:]
        ]
        parts += [] if self.places is None else [self.places.clamp(min=0)]
        parts.append((self.held + torch.arange(self.new.start, self.new.stop, device=device))[:, None])
        return torch.cat(parts, -1)

    @staticmethod
    def of(state: OrderedRows, forward: Forward, asked: Asked) -> "Reading":
        """The reading of a forward; made by the first layer that asks."""
        key = (Reading, asked)
        if key not in forward.readings:
            forward.readings[key] = _Planner(state, forward, asked).reading()
        reading: Reading = forward.readings[key]
        return reading


def tile_spans(start: int, stop: int, rows: int, tile: int) -> list[range]:
    """Ranges of page positions that cover the tokens [start, stop) of `rows` rows, at most `tile` tokens each."""
    last, step = -(-stop // PAGE_TOKENS), max(1, tile // (rows * PAGE_TOKENS))
    return [range(at, min(at + step, last)) for at in range(start // PAGE_TOKENS, last, step)]


class _Planner:
    def __init__(self, state: OrderedRows, forward: Forward, asked: Asked) -> None:
        self.state, self.forward = state, forward
        self.rows, self.queries, self.sliding, self.windows, self.tile, self.device = asked
        self.before = [forward.before[row] for row in asked.rows]
        self.attended = [state.packed(length) for length in self.before]
        self.packed = [state.keys.packed(length) for length in self.before]
        # The oldest token that the first of these queries sees; pages before it may be gone.
        back = None if asked.sliding is None else asked.queries.start - asked.sliding + 1
        self.seen = [0 if back is None else max(0, length + back) for length in self.before]
        self.held = self._upload("before", lambda length: length)
        self.limit = self._upload("attended", state.packed)

    def reading(self) -> Reading:
        read = [(seen, stop) for seen, stop in zip(self.seen, self.attended, strict=True) if seen < stop] or [(0, 0)]
        spans = tile_spans(min(seen for seen, _ in read), max(stop for _, stop in read), len(self.rows), self.tile)
        tiles = [
            (self.state.table.select(self.rows, span.start, span.stop, self.device), self._tile_hidden(span))
            for span in spans
        ]
        window, places, absent, recent = self._window()
        masks = [(mask, len(span) * PAGE_TOKENS) for (_, mask), span in zip(tiles[-1:], spans[-1:], strict=True)]
        masks += [(absent, self.windows[1])] if window is not None else []
        first = 0 if self.sliding is None else max(0, self.queries.start - self.sliding + 1)
        masks.append((self._new_hidden(first), self.queries.stop - first))
        new = slice(first, self.queries.stop)
        starts = [span.start * PAGE_TOKENS for span in spans]
        back = None if self.sliding is None else self._query_places() - self.sliding
        last = len(spans[-1]) * PAGE_TOKENS if spans else 0
        in_one = bool(spans) and prefers_triton(self.device)
        stretch = self._stretch(range(spans[0].start, spans[-1].stop), back) if in_one else None
        return Reading(stretch, tiles, starts, last, recent, window, places, new, self.held, self._joined(masks), back)

    def _stretch(self, pages: range, back: Tensor | None) -> Stretch:
        """By slots of `pages`: the first of them is token 0."""
        first = pages.start * PAGE_TOKENS
        numbers = self.state.table.numbers(self.device)[self.rows.start : self.rows.stop, pages.start : pages.stop]
        unseen = None if back is None else (back - first).flatten(1).int()
        return Stretch(numbers, (self.limit - first).int(), back=unseen)

    def _tile_hidden(self, span: range) -> Tensor | None:
        """Tokens of a span of pages that a row does not read from pages, or that its queries do not see."""
        if min(self.attended) >= span.stop * PAGE_TOKENS and self.sliding is None:
            return None
        places = torch.arange(span.start * PAGE_TOKENS, span.stop * PAGE_TOKENS, device=self.device)[None]
        return self._unseen(places, (places >= self.limit)[:, None, None])

    def _new_hidden(self, first: int) -> Tensor | None:
        """Causality among the new tokens from the `first` to the last query's."""
        if len(self.queries) == 1 and self.sliding is None:
            return None
        places = self.held + torch.arange(first, self.queries.stop, device=self.device)
        return self._unseen(places, places[:, None, None, :] > self._query_places())

    def _window(self) -> tuple[Tensor | None, Tensor | None, Tensor | None, Pages | None]:
        """Index of the value window's keys, the slots' tokens, their mask, and the pages of keys packed ahead of their values."""
        slots, size = self.windows[1], self.state.values.window()
        if slots == 0 or self.attended == self.before:
            return None, None, None, None
        # The newest token that falls on each slot, and whether the row holds it there.
        tokens = self.held - 1 - (self.held - 1 - torch.arange(slots, device=self.device)) % size
        absent = (tokens < self.limit) | (tokens < 0)
        if self.sliding is not None:
            back = self.queries.start - self.sliding + 1
            absent |= tokens < self._upload("seen", lambda length: max(0, length + back))
        places = tokens % max(1, self.state.keys.window())
        recent: Pages | None = None
        if any(stop > max(place) for stop, *place in zip(self.packed, self.attended, self.seen, strict=True)):
            first = [count // PAGE_TOKENS for count in self.attended]
            reach = max(-(-stop // PAGE_TOKENS) - start for stop, start in zip(self.packed, first, strict=True))
            table = self.state.table
            flat = [page for row, at in zip(self.rows, first, strict=True) for page in table.pages(row, at, reach)]
            recent = self._numbers("recent", lambda _: flat).view(len(self.rows), reach)
            encoded = tokens < self._upload("packed", self.state.keys.packed)
            start = self._upload("first", lambda length: self.state.packed(length) // PAGE_TOKENS * PAGE_TOKENS)
            places = torch.where(encoded, self.windows[0] + tokens - start, places)
        index = torch.where(absent, torch.zeros_like(places), places)[:, None, None]
        return index, tokens[:, None], self._unseen(tokens, absent[:, None, None]), recent

    def _unseen(self, places: Tensor, hidden: Tensor) -> Tensor:
        """`hidden`, and beyond it what the sliding window hides of the tokens at `places [rows or 1, tokens]`."""
        if self.sliding is None:
            return hidden
        return hidden | (places[:, None, None, :] <= self._query_places() - self.sliding)

    def _query_places(self) -> Tensor:
        """The token number of each query row: `[rows, 1, tokens of the tile, 1]`."""
        columns = torch.arange(self.queries.start, self.queries.stop, device=self.device)
        return (self.held + columns)[:, None, :, None]

    def _joined(self, masks: list[tuple[Tensor | None, int]]) -> Tensor | None:
        if all(mask is None for mask, _ in masks):
            return None
        length = max(1 if mask is None else mask.shape[2] for mask, _ in masks)
        nothing = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=self.device)
        full = [(nothing if mask is None else mask).expand(len(self.rows), 1, length, width) for mask, width in masks]
        return torch.cat(full, -1)

    def _upload(self, name: str, of_length: Callable[[int], int]) -> Tensor:
        """int64 `[rows, 1]`: a number that follows from how many tokens a row holds."""
        rows = self.rows
        return self._numbers(name, lambda forward: [of_length(forward.before[row]) for row in rows])[:, None]

    def _numbers(self, name: str, numbers: Numbers[Forward]) -> Tensor:
        return self.forward.tensor(f"{name} {self.rows} {self.queries}", numbers, self.device)
