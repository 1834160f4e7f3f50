"""Attention over several tiers, the exact window and the tokens just arrived: one running softmax over all of them.

Every tier is met in packed form, its transform folded into the query and the output. Order does not matter: keys carry
their positions (they are stored after RoPE), so a mask is needed only for empty slots, for the new tokens among
themselves and under a sliding window.

What saliency needs comes out of the same pass: the probabilities of chosen parts (an important tier's slots, the window,
the new tokens), summed over the query rows of a KV head. `Seen` holds those sums, O(T).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from calib.kernels.attend.operation import Attended, Stretch, served
from calib.kernels.attend.reference import RunningSoftmax
from calib.kernels.desparsify_attend.operation import served as pairs_served
from calib.runtime.beside import Beside, newest
from calib.runtime.logits import Logits
from calib.runtime.pages import TIER_PAGE_TOKENS, upload
from calib.runtime.rotation import Rotation
from calib.runtime.rows import Forward
from calib.runtime.stages.saliency.probes import share_of
from calib.runtime.tiered.met import MetTier
from calib.runtime.tiered.reading import Asked, TieredReading, Tile
from calib.runtime.tiered.rows import TieredRows
from calib.runtime.tiered.tier import Tier
from calib.runtime.tiered.turned import turned_to_places, turns_up_to
from calib.runtime.window import Window

# Query rows of a KV head that are scored at once: bounds the scores of a long chunk against a tile.
QUERY_ROWS = 1024

# Logits of all heads and tokens together, where what a record adds to them is worked out for all tiles at once.
LISTED_LOGITS = 2**24


@dataclass
class Seen:
    """Attention mass by KV head, float32: on slots of the watched tier or the window `held [rows, kv_heads, slots]`, and
    on the new tokens `new [rows, kv_heads, n]`."""

    held: Tensor
    new: Tensor


@dataclass(frozen=True)
class Watch:
    """What is looked at: the slots of the first tier, or of the window; with `weights [rows, n, window + n]`, or all rows alike."""

    tier: bool
    weights: Tensor | None = None


@dataclass
class _Part:
    """A stretch of tokens: its logits, masked, how weights mix its values, and whether its probabilities are wanted. What a
    kernel attended in one has its mixture already, and its logits where anybody wants them.

    `left`: what has more to add once the final probabilities of all its parts are known. `places` of its tokens,
    `[rows, kv_heads or 1, tokens]` or a stretch, where something is asked about them.
    """

    scores: Tensor
    mix: Callable[[Tensor], Tensor] | Attended
    watched: bool
    left: Callable[[Tensor], Tensor] | None = None
    places: Tensor | slice | None = None


@dataclass
class TieredAttention:
    """What one layer holds for the rows `rows` of the batch, and how it is read."""

    tiers: list[Tier]
    windows: tuple[Window, Window] | None
    state: TieredRows
    forward: Forward
    rows: range
    logits: Logits
    rotation: Rotation | None = None
    kept: float | None = None
    before_rope: bool = False
    beside: Beside | None = None

    @property
    def is_prompt(self) -> bool:
        """Whether these rows hold nothing yet and plain causal attention does."""
        logits, width = self.logits, self.forward.counts[self.rows.start]
        plain = logits.softcap is None and (logits.sliding is None or width <= logits.sliding)
        return plain and width > 1 and not any(self.forward.before[row] for row in self.rows)

    def prompt(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Exact causal attention of rows that hold nothing yet."""
        return F.scaled_dot_product_attention(
            query, keys, values, is_causal=True, scale=self.logits.scale, enable_gqa=True
        )

    def output(
        self, query: Tensor, new_keys: Tensor, new_values: Tensor, watch: Watch | None = None
    ) -> tuple[Tensor, Seen | None]:
        """Attention of queries none of whose columns is padding.

        `query [rows, heads, n, D]`, new tokens `[rows, kv_heads, n, D]` -> `[rows, heads, n, D]` in the query's dtype, and
        what was seen of what `watch` asks for.
        """
        length, kv_heads = query.shape[2], new_keys.shape[1]
        step = min(max(1, QUERY_ROWS * kv_heads // query.shape[1]), self._listed_step(query.shape[1]))
        outputs, seen = [], None if watch is None else self._nothing_seen(watch, new_keys)
        for at in range(0, length, step):
            tile = query[:, :, at : at + step] if length > step else query
            queries = range(at, at + tile.shape[2])
            asked = Asked(self.rows, queries, self.logits.sliding, self.tiers[0].tile_tokens, query.device)
            reading = TieredReading.of(self.state, self.forward, asked)
            # Query rows of a KV head: group-major, then the tokens of the tile.
            grouped = (tile.float() * self.logits.scale).unflatten(1, (kv_heads, -1)).flatten(2, 3)
            softmax, watched, asked_about = RunningSoftmax(), [], []
            left: dict[Callable[[Tensor], Tensor], list[Tensor]] = {}
            parts = self._parts(reading, grouped, new_keys, new_values, watch)
            for part in parts if self.kept is None else self._heaviest(list(parts), queries):
                if isinstance(part.mix, Attended):
                    softmax.join(part.mix.top, part.mix.mass, part.mix.mixed)
                else:
                    softmax.add(part.mix(softmax.weights(part.scores)))
                if part.watched:
                    watched.append(part.scores)
                if part.places is not None:
                    asked_about.append(part)
                if part.left is not None:
                    left.setdefault(part.left, []).append(part.scores)
            mixed = softmax.output()
            for added, scores in left.items():
                mixed = mixed + added(softmax.probabilities(torch.cat(scores, -1)))
            if self.beside is not None and asked_about:
                normaliser = newest(softmax.normaliser(), query.shape[1] // kv_heads)
                for part in asked_about:
                    assert part.places is not None
                    self.beside.add(part.places, part.scores, normaliser)
            if watch is not None and seen is not None:
                self._look(watch, seen, watched, softmax, reading, queries)
            outputs.append(mixed.unflatten(2, (-1, len(queries))).flatten(1, 2).to(query.dtype))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2), seen

    def _parts(
        self, reading: TieredReading, query: Tensor, new_keys: Tensor, new_values: Tensor, watch: Watch | None
    ) -> Iterator[_Part]:
        turned = None
        if self.before_rope and self.rotation is not None:
            turned = partial(turned_to_places, self.forward, self.rotation)
        for number, (tier, tiles) in enumerate(zip(self.tiers, reading.tiers, strict=True)):
            if not tiles:
                continue
            asked = self._relocated(query) if tier.relocated else query
            met = MetTier(tier, self.rows, asked, reading.records, tiles[-1].stop, turned)
            wanted = watch is not None and watch.tier and number == 0
            stretch = reading.stretches[number]
            if stretch is not None and self.kept is None:
                if served(query.shape[2], *met.streams()):
                    yield self._in_one(met, tiles, stretch, wanted)
                    continue
                if self.beside is None and not wanted and pairs_served(met.query, *met.pairs()):
                    yield self._pairs_in_one(met, stretch, query)
                    continue
            for tile in tiles:
                hidden, places = tile.hidden, None
                if reading.back is not None or self.beside is not None:
                    places = self._places(tier, tile)
                if reading.back is not None:
                    assert isinstance(places, Tensor)
                    gone = places[:, :, None] <= reading.back
                    hidden = gone if hidden is None else gone | hidden
                if self.beside is not None and places is not None:
                    twins = self.beside.hides(places)
                    hidden = twins if hidden is None else twins | hidden
                yield _Part(
                    _masked(self.logits.capped(met.scores(tile)), hidden),
                    lambda weights, met=met, tile=tile: met.mix(weights, tile),  # type: ignore[misc]
                    wanted,
                    met.listed_mix if met.lists_values else None,
                    places if self._asks else None,
                )
        if self.beside is not None and self.beside.places.shape[2]:
            yield self._fetched(self.beside, query, reading.back)
        keys, values = new_keys[:, :, reading.new], new_values[:, :, reading.new]
        if self.windows is not None and reading.window:
            held = (window.tokens[self.rows.start : self.rows.stop, :, : reading.window] for window in self.windows)
            keys, values = (torch.cat(pair, 2) for pair in zip(held, (keys, values), strict=True))
        exact = _masked(self.logits.capped(query @ keys.float().mT), reading.hidden)
        places = self._exact_places(reading, query.device) if self._asks else None
        yield _Part(exact, lambda weights: weights @ values.float(), watch is not None, places=places)

    def _in_one(self, met: MetTier, tiles: list[Tile], stretch: Stretch, wanted: bool) -> _Part:
        """A tier by one kernel."""
        places: Tensor | slice | None = None
        if self.beside is not None:
            slots = Tile(stretch.table, 0, stretch.table.shape[1] * met.tier.pool.page_tokens, None)
            places = self._places(met.tier, slots)
            stretch = replace(stretch, hidden=self.beside.hides(places)[:, :, 0])
        found = met.in_one(tiles, stretch, self.logits.softcap, wanted or self._asks or met.corrected)
        scores = found.mass if found.scores is None else found.scores
        left = partial(met.corrections, tiles) if met.corrected else None
        return _Part(scores, found, wanted, left, places if self._asks else None)

    def _pairs_in_one(self, met: MetTier, stretch: Stretch, query: Tensor) -> _Part:
        """A tier of sparse pairs by one kernel."""
        turns = None
        if self.before_rope and self.rotation is not None:
            longest = max(self.forward.before[row] for row in self.rows)
            turns = turns_up_to(self.forward, self.rotation, longest, query)
        found = met.pairs_in_one(stretch, turns, self.logits.softcap)
        return _Part(found.mass, found, False)

    @property
    def _asks(self) -> bool:
        return self.beside is not None and self.beside.asks

    def _fetched(self, beside: Beside, query: Tensor, back: Tensor | None) -> _Part:
        """The pairs beside, met where the query is turned to."""
        asked = query if beside.turns is None else Rotation.turned(query, *beside.turns)
        scores = _masked(self.logits.capped(asked @ beside.keys.float().mT), beside.hidden(back))
        places = beside.places if beside.asks else None
        return _Part(scores, lambda weights: weights @ beside.values.float(), False, places=places)

    @staticmethod
    def _places(tier: Tier, tile: Tile) -> Tensor | slice:
        """Of a tile's tokens; a tier without positions is the only one, and slot t holds token t."""
        return tier.places(tile.pages) if tier.positions else slice(tile.start, tile.stop)

    def _exact_places(self, reading: TieredReading, device: torch.device) -> Tensor:
        """int64 `[rows, 1, tokens]` of the window's slots and the new tokens; another's where a slot is not in use."""
        key = ("exact places", self.rows, reading.window, reading.new.stop, device)
        if key not in self.forward.readings:
            before = [self.forward.before[row] for row in self.rows]
            exact = [self.state.exact(row, length) for row, length in zip(self.rows, before, strict=True)]
            start, used = (upload(part, torch.int64, device)[:, None, None] for part in (before, exact))
            slots = torch.arange(reading.window, device=device)
            new = torch.arange(reading.new.start, reading.new.stop, device=device)
            self.forward.readings[key] = torch.cat([start - used + slots, start + new], -1)
        places: Tensor = self.forward.readings[key]
        return places

    @torch.no_grad()
    def _look(
        self,
        watch: Watch,
        seen: Seen,
        watched: list[Tensor],
        softmax: RunningSoftmax,
        reading: TieredReading,
        queries: range,
    ) -> None:
        """Adds a tile's probabilities: its logits are still there, and the log-sum-exp of its rows is known now."""
        parts = [softmax.probabilities(scores) for scores in watched]
        if watch.weights is not None:
            window, new = watch.weights[..., : reading.window], watch.weights[..., reading.window :][..., reading.new]
            weights = torch.cat([window, new], -1)[:, None, None, queries.start : queries.stop]
            parts = [(part.unflatten(2, (-1, len(queries))) * weights).flatten(2, 3) for part in parts]
        sums = torch.cat([part.sum(2) for part in parts], -1)
        fresh = reading.new.stop - reading.new.start
        seen.held += sums[..., : sums.shape[-1] - fresh]
        seen.new[..., reading.new] += sums[..., sums.shape[-1] - fresh :]

    def _listed_step(self, heads: int) -> int:
        """Query columns whose biases by the rows' records stay small."""
        if not any(tier.records is not None for tier in self.tiers):
            return QUERY_ROWS
        longest = max(sum(self.state.held(row, self.forward.before[row])) for row in self.rows)
        return max(1, LISTED_LOGITS // max(1, len(self.rows) * heads * longest))

    def _nothing_seen(self, watch: Watch, new_keys: Tensor) -> Seen:
        before = self.forward.before
        if watch.tier:
            slots = max(
                -(-self.state.held(row, before[row])[0] // TIER_PAGE_TOKENS) * TIER_PAGE_TOKENS for row in self.rows
            )
        else:
            slots = max(self.state.exact(row, before[row]) for row in self.rows)
        held = torch.zeros(*new_keys.shape[:2], slots, device=new_keys.device)
        return Seen(held, torch.zeros(new_keys.shape[:3], device=new_keys.device))

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

    def _heaviest(self, parts: list[_Part], queries: range) -> list[_Part]:
        """Oracle eviction: each query row keeps the logits of its heaviest tokens alone, earlier ones where they tie."""
        assert self.kept is not None
        scores = torch.cat([part.scores for part in parts], -1)
        held = [self.forward.before[row] for row in self.rows]
        # A row that holds nothing yet reads its prompt, which is exact whatever the method.
        reach = self.logits.sliding or max(self.forward.after)
        counts = [[share_of(self.kept if n else 1, min(n + column + 1, reach)) for column in queries] for n in held]
        most = torch.tensor(counts, device=scores.device).repeat(1, scores.shape[2] // len(queries))[:, None, :, None]
        rank = scores.argsort(dim=-1, descending=True, stable=True).argsort(-1)
        found = scores.masked_fill(rank >= most, -torch.inf).split([part.scores.shape[-1] for part in parts], -1)
        return [replace(part, scores=own) for own, part in zip(found, parts, strict=True)]


def _masked(scores: Tensor, hidden: Tensor | None) -> Tensor:
    """-inf where `hidden [rows, 1 or kv_heads, n or 1, tokens]`; query rows are group-major, so groups share the mask."""
    if hidden is None:
        return scores
    by_group = scores.unflatten(2, (-1, hidden.shape[2])) if hidden.shape[2] > 1 else scores.unsqueeze(3)
    return by_group.masked_fill(hidden.unsqueeze(2), -torch.inf).flatten(2, 3)
