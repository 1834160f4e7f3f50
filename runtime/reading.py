"""What the queries of one forward read, worked out once and used by every layer: page tiles, window slots, masks."""

from dataclasses import dataclass

import torch
from torch import Tensor

from calib.runtime.pages import PAGE_TOKENS
from calib.runtime.rows import Forward, Rows
from calib.runtime.stream import TILE_TOKENS


@dataclass(frozen=True)
class Logits:
    """How a model turns q.k into logits: `scale`, then a soft cap, and a sliding window of that many tokens."""

    scale: float
    softcap: float | None = None
    sliding: int | None = None


@dataclass(frozen=True)
class Reading:
    """Everything but the tokens themselves, for the query columns `queries` of the rows `rows`.

    Attributes:
        tiles: (pages, hidden) of the tokens whose key and value are packed, at most TILE_TOKENS over all rows each;
            `hidden` bool `[rows, 1, query rows or 1, tokens]` or None. The last one has `last_tile_tokens` tokens and
            its mask is part of `hidden` below.
        recent: pages of keys already packed whose values may still be exact, or None; they reach back over the whole
            last tile where they can (`recent_holds_tile`), so that its keys are unpacked once.
        window: int64 `[rows, 1, 1, slots]`: where the key of each slot of the value window is found among the key
            window's slots followed by the `recent` pages' tokens; None without a window.
        hidden: mask of the last tile, the window and the new tokens together, or None where all are seen.
    """

    rows: range
    queries: range
    tiles: list[tuple[Tensor | slice, Tensor | None]]
    last_tile_tokens: int
    recent: Tensor | slice | None
    recent_holds_tile: bool
    window: Tensor | None
    hidden: Tensor | None

    @staticmethod
    def of(
        state: Rows,
        forward: Forward,
        rows: range,
        queries: range,
        sliding: int | None,
        windows: tuple[int, int],
        device: torch.device,
    ) -> "Reading":
        """The reading of a forward; made by the first layer that asks. `windows`: slots of the key and value windows."""
        key = (rows, queries, sliding, windows, device)
        if key not in forward.readings:
            forward.readings[key] = _Planner(state, forward, rows, queries, sliding, windows, device).reading()
        reading: Reading = forward.readings[key]
        return reading


class _Planner:
    def __init__(
        self,
        state: Rows,
        forward: Forward,
        rows: range,
        queries: range,
        sliding: int | None,
        windows: tuple[int, int],
        device: torch.device,
    ) -> None:
        self.state, self.rows, self.queries, self.sliding, self.windows, self.device = (
            state,
            rows,
            queries,
            sliding,
            windows,
            device,
        )
        self.before = [forward.before[row] for row in rows]
        self.attended = [state.packed(length) for length in self.before]
        self.packed = [state.keys.packed(length) for length in self.before]
        self.held = self._upload(forward, "before", self.before)
        self.limit = self._upload(forward, "attended", self.attended)
        self.forward = forward

    def reading(self) -> Reading:
        stop = -(-max(self.attended) // PAGE_TOKENS)
        step = max(1, TILE_TOKENS // (len(self.rows) * PAGE_TOKENS))
        spans = [range(at, min(at + step, stop)) for at in range(self._first_visible() // PAGE_TOKENS, stop, step)]
        tiles = [
            (self.state.table.select(self.rows, span.start, span.stop, self.device), self._tile_hidden(span))
            for span in spans
        ]
        holds_tile = len(spans) > 0 and spans[-1].start <= min(self.attended) // PAGE_TOKENS
        window, absent, recent = self._window(spans[-1].start if holds_tile else None)
        masks: list[tuple[Tensor | None, int]] = [
            (mask, len(span) * PAGE_TOKENS) for (_, mask), span in zip(tiles[-1:], spans[-1:], strict=True)
        ]
        masks += [(absent, self.windows[1])] if window is not None else []
        masks.append((self._new_hidden(), self.queries.stop))
        return Reading(
            self.rows,
            self.queries,
            tiles,
            sum(len(span) for span in spans[-1:]) * PAGE_TOKENS,
            recent,
            holds_tile and recent is not None,
            window,
            self._joined(masks),
        )

    def _tile_hidden(self, span: range) -> Tensor | None:
        """Tokens of a span of pages that a row does not read from pages, or that its queries do not see."""
        if min(self.attended) >= span.stop * PAGE_TOKENS and self.sliding is None:
            return None
        places = torch.arange(span.start * PAGE_TOKENS, span.stop * PAGE_TOKENS, device=self.device)[None]
        return self._unseen(places, (places >= self.limit)[:, None, None])

    def _new_hidden(self) -> Tensor | None:
        """Causality among the new tokens; those after the last query of this reading are not read at all."""
        if len(self.queries) == 1 and self.sliding is None:
            return None
        places = self.held + torch.arange(self.queries.stop, device=self.device)
        queries = self._query_places()
        return self._unseen(places, places[:, None, None, :] > queries)

    def _window(self, tile_start: int | None) -> tuple[Tensor | None, Tensor | None, Tensor | slice | None]:
        """Index of the value window's keys, the mask of its slots, and the pages of keys packed ahead of their values."""
        slots, size = self.windows[1], self.state.values.window()
        if slots == 0 or self.attended == self.before:  # these rows hold nothing exact, whatever others do
            return None, None, None
        # The newest token that falls on each slot, and whether the row holds it there.
        age = (self.held - 1 - torch.arange(slots, device=self.device)) % size
        tokens = self.held - 1 - age
        absent = (tokens < self.limit) | (tokens < 0)
        places = tokens % max(1, self.state.keys.window())
        recent: Tensor | slice | None = None
        if self.packed != self.attended:
            first = [count // PAGE_TOKENS if tile_start is None else tile_start for count in self.attended]
            reach = max(-(-stop // PAGE_TOKENS) - start for stop, start in zip(self.packed, first, strict=True))
            if len(self.rows) == 1:
                recent = self.state.table.select(self.rows, first[0], first[0] + reach, self.device)
            else:
                held = [
                    self.state.table.rows[row][start : start + reach]
                    for row, start in zip(self.rows, first, strict=True)
                ]
                flat = [page for pages in held for page in (pages + [0] * reach)[:reach]]
                recent = self._upload(self.forward, "recent", flat).view(len(self.rows), reach)
            start = self._upload(self.forward, "recent first", first) * PAGE_TOKENS
            encoded = tokens < self._upload(self.forward, "packed", self.packed)
            places = torch.where(encoded, self.windows[0] + tokens - start, places)
        index = torch.where(absent, torch.zeros_like(places), places)[:, None, None]
        filled = all(
            min(length, size) == slots and start <= length - slots
            for length, start in zip(self.before, self.attended, strict=True)
        )
        return index, None if filled and self.sliding is None else self._unseen(tokens, absent[:, None, None]), recent

    def _unseen(self, places: Tensor, hidden: Tensor) -> Tensor:
        """`hidden`, and beyond it what the sliding window hides of the tokens at `places [rows or 1, tokens]`."""
        return (
            hidden
            if self.sliding is None
            else hidden | (places[:, None, None, :] <= self._query_places() - self.sliding)
        )

    def _query_places(self) -> Tensor:
        """The token number of each query row: `[rows, 1, tokens of the tile, 1]`."""
        return (self.held + torch.arange(self.queries.start, self.queries.stop, device=self.device))[:, None, :, None]

    def _joined(self, masks: list[tuple[Tensor | None, int]]) -> Tensor | None:
        if all(mask is None for mask, _ in masks):
            return None
        length = max(1 if mask is None else mask.shape[2] for mask, _ in masks)
        nothing = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=self.device)
        full = [(nothing if mask is None else mask).expand(len(self.rows), 1, length, width) for mask, width in masks]
        return torch.cat(full, -1)

    def _first_visible(self) -> int:
        """The earliest token that any query sees."""
        return 0 if self.sliding is None else max(0, min(self.before) + self.queries.start - self.sliding + 1)

    def _upload(self, forward: Forward, name: str, numbers: list[int]) -> Tensor:
        return forward.tensor(f"{name} {self.rows}", numbers, self.device)[:, None]
