"""The parts that attention over tiers is put together from: each tier's tiles, what lies beside, the window and the new tokens.

Every tier is met in packed form, its transform folded into the query and the output. Order does not matter: keys carry
their positions (they are stored after RoPE), so a mask is needed only for empty slots, for the new tokens among
themselves and under a sliding window.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import or_

import torch
from torch import Tensor

from calib.kernels.attend.operation import Attended, Stretch, served
from calib.kernels.desparsify_attend.operation import served as pairs_served
from calib.runtime.beside import Beside
from calib.runtime.logits import Logits, masked
from calib.runtime.numbers import upload
from calib.runtime.rotation import Rotation
from calib.runtime.rows import Forward
from calib.runtime.tiered.met import MetTier
from calib.runtime.tiered.reading import TieredReading, Tile
from calib.runtime.tiered.rows import TieredRows
from calib.runtime.tiered.tier import Tier
from calib.runtime.tiered.turned import ToPlaces, tables_between, turns_between
from calib.runtime.window import Window


@dataclass
class Part:
    """A stretch of tokens: its logits, masked, how weights mix its values, and whether its probabilities are wanted. What a
    kernel attended in one has its mixture already, and its logits where anybody wants them.

    `left`: what has more to add once the final probabilities of all its parts are known. `places` of its tokens,
    `[rows, kv_heads or 1, tokens]` or a stretch, where something is asked about them. `is_last`: no other follows, and every
    query row meets a token of it.
    """

    scores: Tensor
    mix: Callable[[Tensor], Tensor] | Attended
    watched: bool
    left: Callable[[Tensor], Tensor] | None = None
    places: Tensor | slice | None = None
    is_last: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether nothing but its weights and its mixture is asked for, and no kernel has attended it."""
        return not (isinstance(self.mix, Attended) or self.watched or self.left or self.places is not None)

    def with_last(self, last: "Part") -> "Part":
        """This part and the `last`, both plain, as one."""
        count, mixes = self.scores.shape[-1], (self.mix, last.mix)

        def mix(weights: Tensor) -> Tensor:
            assert callable(mixes[0]) and callable(mixes[1])
            return mixes[0](weights[..., :count]) + mixes[1](weights[..., count:])

        return Part(torch.cat([self.scores, last.scores], -1), mix, False, is_last=True)


@dataclass
class Parts:
    """What one layer holds for the rows `rows` of the batch. `in_one`: a kernel may take a whole tier, its logits unseen."""

    tiers: list[Tier]
    windows: tuple[Window, Window] | None
    state: TieredRows
    forward: Forward
    rows: range
    logits: Logits
    rotation: Rotation | None
    before_rope: bool
    beside: Beside | None
    in_one: bool

    def window_slots(self) -> int:
        """Leading slots of the window that are met: those that any row uses, or all where shapes are a block's."""
        if self.windows is not None and self.forward.fed is not None:
            return self.windows[0].tokens.shape[2]
        return max(self.state.exact(row, self.forward.before[row]) for row in self.rows)

    def met_by(
        self,
        query: Tensor,
        reading: TieredReading,
        new_keys: Tensor,
        new_values: Tensor,
        watched: bool,
        first_watched: bool,
    ) -> Iterator[Part]:
        """What `query [rows, kv_heads, query rows, D]`, float32 and scaled, meets; the window and the new tokens may be
        `watched`, and the first tier. The last tile, the window and the new tokens are one part where they may be: most caches
        are no longer than that."""
        waiting: Part | None = None
        for part in self._in_tiers(query, reading, first_watched):
            if waiting is not None:
                yield waiting
            waiting = part
        exact = self._exact(query, reading, new_keys, new_values, watched)
        if waiting is not None and waiting.is_plain and exact.is_plain:
            exact = waiting.with_last(exact)
        elif waiting is not None:
            yield waiting
        yield exact

    def _in_tiers(self, query: Tensor, reading: TieredReading, first_watched: bool) -> Iterator[Part]:
        """All tiers, tile by tile, and what lies beside."""
        turned = None
        if self.before_rope and self.rotation is not None:
            turned = ToPlaces(self.forward, self.rotation)
        for number, (tier, tiles) in enumerate(zip(self.tiers, reading.tiers, strict=True)):
            if not tiles:
                continue
            asked = self._relocated(query) if tier.relocated else query
            met = MetTier(tier, self.rows, asked, reading.records, tiles[-1].stop, turned)
            wanted = first_watched and number == 0
            stretch = reading.stretches[number]
            if stretch is not None and self.in_one:
                if served(query.shape[2], *met.streams(), turning=turned is not None):
                    yield self._tier_in_one(met, tiles, stretch, wanted)
                    continue
                if self.beside is None and not wanted and pairs_served(met.query, *met.pairs()):
                    yield self._pairs_in_one(met, stretch, query)
                    continue
            for tile in tiles:
                hidden, places = tile.hidden, None
                if reading.back is not None or self.beside is not None:
                    places = tier.places(*tile[:3])
                    hidden = self._hidden(places, hidden, reading.back)
                yield Part(
                    masked(self.logits.capped(met.scores(tile)), hidden),
                    lambda weights, met=met, tile=tile: met.mix(weights, tile),  # type: ignore[misc]
                    wanted,
                    met.listed_mix if met.lists_values else None,
                    places if self._asks else None,
                )
        if self.beside is not None and self.beside.places.shape[2]:
            yield self._fetched(self.beside, query, reading.back)

    def _exact(
        self, query: Tensor, reading: TieredReading, new_keys: Tensor, new_values: Tensor, watched: bool
    ) -> Part:
        """The window and the new tokens; every query meets one of them at least."""
        keys, values = new_keys[:, :, reading.new], new_values[:, :, reading.new]
        if self.windows is not None and reading.window:
            held = (window.tokens[self.rows.start : self.rows.stop, :, : reading.window] for window in self.windows)
            keys, values = (torch.cat(pair, 2) for pair in zip(held, (keys, values), strict=True))
        exact = masked(self.logits.capped(query @ keys.float().mT), reading.hidden)
        places = self._exact_places(reading, query.device) if self._asks else None
        return Part(exact, lambda weights: weights @ values.float(), watched, places=places, is_last=True)

    def _tier_in_one(self, met: MetTier, tiles: list[Tile], stretch: Stretch, wanted: bool) -> Part:
        """A tier by one kernel."""
        places: Tensor | slice | None = None
        if self.beside is not None:
            places = met.tier.places(stretch.table, 0, stretch.table.shape[1] * met.tier.pool.page_tokens)
            stretch = replace(stretch, hidden=self.beside.hides(places)[:, :, 0])
        turns = None
        if self.before_rope and self.rotation is not None:
            turns = tables_between(self.forward, self.rotation, *self._span(met.tier, stretch), met.query)
        scored = wanted or self._asks or met.corrected
        found = met.in_one(tiles, stretch, self.logits.softcap, scored, turns)
        scores = found.mass if found.scores is None else found.scores
        left = partial(met.corrections, tiles) if met.corrected else None
        return Part(scores, found, wanted, left, places if self._asks else None)

    def _pairs_in_one(self, met: MetTier, stretch: Stretch, query: Tensor) -> Part:
        """A tier of sparse pairs by one kernel."""
        turns = None
        if self.before_rope and self.rotation is not None:
            turns = turns_between(self.forward, self.rotation, *self._span(met.tier, stretch), query)
        found = met.pairs_in_one(stretch, turns, self.logits.softcap)
        return Part(found.mass, found, False)

    def _span(self, tier: Tier, stretch: Stretch) -> tuple[int, int]:
        """The places of a tier's slots, where they lie in order; else of all tokens in tiers."""
        if tier.first is not None:
            return tier.first, tier.first + stretch.table.shape[1] * tier.pool.page_tokens
        longest = max(self.state.encoded(row, self.forward.before[row]) for row in self.rows)
        return 0, self.state.sinks + longest

    @property
    def _asks(self) -> bool:
        return self.beside is not None and self.beside.asks

    def _fetched(self, beside: Beside, query: Tensor, back: Tensor | None) -> Part:
        """The pairs beside, met where the query is turned to."""
        asked = query if beside.turns is None else Rotation.turned(query, *beside.turns)
        scores = masked(self.logits.capped(asked @ beside.keys.float().mT), beside.hidden(back))
        places = beside.places if beside.asks else None
        return Part(scores, lambda weights: weights @ beside.values.float(), False, places=places)

    def _hidden(self, places: Tensor | slice, hidden: Tensor | None, back: Tensor | None) -> Tensor:
        """`hidden` slots, those behind the queries' sliding window, and those whose tokens are attended beside."""
        masks = [] if hidden is None else [hidden]
        if back is not None:
            if isinstance(places, slice):
                masks.append(torch.arange(places.start, places.stop, device=back.device) <= back)
            else:
                masks.append(places[:, :, None] <= back)
        if self.beside is not None:
            masks.append(self.beside.hides(places))
        return reduce(or_, masks)

    def _exact_places(self, reading: TieredReading, device: torch.device) -> Tensor:
        """int64 `[rows, 1, tokens]` of the window's slots and the new tokens; another's where a slot is not in use."""
        key = ("exact places", self.rows, reading.window, reading.new.stop, device)
        if key not in self.forward.readings:
            start = upload([self.forward.before[row] for row in self.rows], torch.int64, device)[:, None]
            held = self.state.places(self.forward, self.rows, reading.window, device)
            new = torch.arange(reading.new.start, reading.new.stop, device=device)
            self.forward.readings[key] = torch.cat([held, start + new], -1)[:, None]
        places: Tensor = self.forward.readings[key]
        return places

    def _relocated(self, query: Tensor) -> Tensor:
        """The query where it stands inside the cache: as many positions back as its row has dropped tokens."""
        assert self.rotation is not None
        key = ("relocated", self.rows, query.device)
        if key not in self.forward.readings:
            before = [self.forward.before[row] for row in self.rows]
            dropped = [self.state.kept(row, n) - n for row, n in zip(self.rows, before, strict=True)]
            if self.beside is not None and self.beside.turns is not None:
                dropped = [places + (places < 0) for places in dropped]  # what was fetched takes one place
            self.forward.readings[key] = self.rotation.turns(dropped, query.device)
        return Rotation.turned(query, *self.forward.readings[key])
