"""The tokens of a tiered layer as spans: each tier, tile by tile or by one kernel, then fetched tokens, the window and new
tokens.

Tiers are attended in packed form, with their transforms folded into query and output. The order of tokens does not matter: keys
carry their positions (they are stored after RoPE), so a mask is needed only for empty slots, for the new tokens among
themselves and under a sliding window.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import add

import torch
from torch import Tensor

from calib.kernels.attend.operation import Attended, ExactGroup, ExactTokens, PageSpan, exact_supported, supported
from calib.kernels.desparsify_attend.operation import supported as pairs_supported
from calib.kernels.dispatch import prefers_triton
from calib.kernels.upload import upload
from calib.runtime.attend.attention_stats import Observed
from calib.runtime.attend.grouped_query import GroupedQuery
from calib.runtime.attend.layer_tokens import LayerTokens
from calib.runtime.attend.read_plan import ReadPlan, ReadRequest, Tile, exact_positions
from calib.runtime.attend.scored_span import ExactSpan, ScoredSpan, joined
from calib.runtime.logits import either, masked
from calib.runtime.paging.forward import Forward
from calib.runtime.paging.window import Window
from calib.runtime.rotation import Rotation
from calib.runtime.stages.saliency.probes import share_of
from calib.runtime.tiered.rope_on_read import RopeOnRead, cos_sin_between, tables_between
from calib.runtime.tiered.sequence_state import TieredSequenceState
from calib.runtime.tiered.tier import Tier
from calib.runtime.tiered.tier_view import TierView

# The most logits of all heads and tokens together for which the scores of listed outliers are computed for all tiles at once.
LISTED_LOGITS = 2**24


@dataclass
class TieredTokens(LayerTokens):
    """The tiers and the window of a layer (`LayerTokens`). With `oracle_share` each query attends only that share of its tokens."""

    state: TieredSequenceState
    tiers: list[Tier]
    windows: tuple[Window, Window] | None
    rotation: Rotation | None
    before_rope: bool
    oracle_share: float | None

    def window_slots(self) -> int:
        """How many leading window slots are read: those that any row uses, or all of them in the fixed shapes of a block."""
        if self.windows is not None and self.forward.of_block:
            return self.windows[0].tokens.shape[2]
        return self.state.most_exact(self.forward, self.rows)

    def plan(self, queries: range, query_rows: int) -> ReadPlan:
        """The read plan, with masks for slots that rows do not use."""
        tier = self.tiers[0]
        sizes = self.logits.sliding, tier.tile_tokens, self.window_slots()
        return ReadPlan.of(self.state, self.forward, ReadRequest(self.rows, queries, *sizes, tier.pool.device))

    def columns_at_once(self, heads: int, columns: int) -> int:
        """At most so many that the scores of outliers in the rows' parameters stay below `LISTED_LOGITS`."""
        if not any(tier.row_params is not None for tier in self.tiers):
            return columns
        held = self.state.held_before(self.forward)
        longest = max(sum(held[row]) for row in self.rows)
        return min(columns, max(1, LISTED_LOGITS // max(1, len(self.rows) * heads * longest)))

    def spans(
        self, query: GroupedQuery, plan: ReadPlan, new_keys: Tensor, new_values: Tensor, observed: Observed | None
    ) -> Iterator[ScoredSpan | ExactSpan]:
        """The spans. If `observed`, the window and new tokens are watched, and the first tier where `observed.tier` says so.
        The last tile, window and new tokens are one span where possible: most caches are no longer than that."""
        spans = self._one_by_one(query, plan, new_keys, new_values, observed)
        if self.oracle_share is None:
            return spans
        return iter(self._heaviest([span for span in spans if isinstance(span, ScoredSpan)], plan))

    def _one_by_one(
        self, query: GroupedQuery, plan: ReadPlan, new_keys: Tensor, new_values: Tensor, observed: Observed | None
    ) -> Iterator[ScoredSpan | ExactSpan]:
        tokens, first_watched = self._exact_tokens(plan, new_keys, new_values), observed is not None and observed.tier
        if self.oracle_share is None and exact_supported(query.for_kernels[0], tokens):
            yield from self._in_tiers(query, plan, first_watched, runs=True)
            positions = self._exact_positions(plan)
            yield ExactSpan(tokens, observed is not None, () if positions is None else (positions,))
            return
        waiting: ScoredSpan | None = None
        for span in self._in_tiers(query, plan, first_watched, runs=False):
            if waiting is not None:
                yield waiting
            waiting = span
        exact = self._exact(query, plan, new_keys, new_values, observed is not None)
        if waiting is not None and not (waiting.is_asked or exact.is_asked or isinstance(waiting.mix, Attended)):
            both = joined([waiting, exact], [0, 1])
            exact = replace(both, mix=partial(_summed, both), is_last=True)
        elif waiting is not None:
            yield waiting
        yield exact

    def _in_tiers(self, query: GroupedQuery, plan: ReadPlan, first_watched: bool, runs: bool) -> Iterator[ScoredSpan]:
        """The spans of all tiers, and of the fetched tokens; with `runs` a kernel's result may be in parts that are still to be
        merged."""
        rotated, row_params = None, None
        if self.before_rope and self.rotation is not None:
            rotated = RopeOnRead(self.forward, self.rotation)
        if self.state.row_params is not None:
            device, table = query.given.device, self.state.row_params
            row_params = (
                table.select_first(self.rows, device)
                if prefers_triton(device)
                else table.select(self.rows, 0, 1, device)
            )
        for number, (tier, tiles) in enumerate(zip(self.tiers, plan.tiers, strict=True)):
            if not tiles:
                continue
            asked, back, span = self._relocated(query) if tier.relocated else query, plan.back, plan.page_spans[number]
            # Beside fetched tokens, sinks are hidden by their own positions.
            if tier.relocated and back is not None and self.fetched is None:
                back, of_span = self._relocated_back(plan.asked, back)
                span = None if span is None else replace(span, back=of_span)
            view = TierView(tier, self.rows, asked, row_params, tiles[-1].stop, rotated)
            wanted = first_watched and number == 0
            if span is not None and self.oracle_share is None:  # the oracle needs every logit
                asked_of_span = wanted or view.corrected or self.fetched is not None or plan.back is not None
                first_slots = not (asked_of_span or (rotated is not None and tier.stores_positions))
                if supported(query.given.shape[2], *view.streams, rotated is not None, first_slots):
                    yield self._tier_in_one(view, tiles, span, wanted, runs)
                    continue
                if self.fetched is None and not wanted and pairs_supported(view.query, *view.pairs()):
                    yield self._pairs_in_one(view, span, query.given, runs)
                    continue
            for tile in tiles:
                hidden, positions = tile.hidden, None
                if plan.back is not None or self.fetched is not None:
                    positions = tier.positions(tile.pages, tile.start, tile.stop)
                    replaced = None if self.fetched is None else self.fetched.hides(positions)
                    hidden = either(hidden, _behind(positions, back), replaced)
                yield ScoredSpan(
                    masked(self.logits.capped(view.scores(tile)), hidden),
                    partial(_mixed, view, tile),
                    wanted,
                    view.listed_mix if view.lists_values else None,
                    positions if self.asks else None,
                )
        if self.fetched is not None and self.fetched.positions.shape[2]:
            yield self.fetched.span(query.scaled, self.logits, plan.back)

    def _exact_tokens(self, plan: ReadPlan, new_keys: Tensor, new_values: Tensor) -> ExactTokens:
        """The window and the new tokens, without a copy."""
        new = ExactGroup(plan.read_of(new_values), plan.read_of(new_keys))
        if self.windows is None or not plan.window:
            return ExactTokens((new,), plan.hidden)
        keys, values = self.windows[0].leading(self.rows, plan.window), self.windows[1].leading(self.rows, plan.window)
        return ExactTokens((ExactGroup(values, keys), new), plan.hidden)

    def _exact(
        self, query: GroupedQuery, plan: ReadPlan, new_keys: Tensor, new_values: Tensor, watched: bool
    ) -> ScoredSpan:
        """The window and the new tokens as a span; every query sees at least one of them."""
        groups = self._exact_tokens(plan, new_keys, new_values).groups
        of_keys, of_values = (
            [group.keys for group in groups if group.keys is not None],
            [group.values for group in groups],
        )
        keys, values = (own[0] if len(own) == 1 else torch.cat(own, 2) for own in (of_keys, of_values))
        exact = masked(self.logits.capped(query.scaled @ keys.float().mT), plan.hidden)
        return ScoredSpan(
            exact,
            lambda weights: (weights @ values.float(),),
            watched,
            positions=self._exact_positions(plan),
            is_last=True,
        )

    def _exact_positions(self, plan: ReadPlan) -> Tensor | None:
        """The positions of the window's tokens and of the new ones, where mass by position is wanted."""
        return exact_positions(self.state, self.forward, plan.asked, plan.window) if self.asks else None

    def _tier_in_one(self, view: TierView, tiles: list[Tile], span: PageSpan, wanted: bool, runs: bool) -> ScoredSpan:
        """Attends a tier with one kernel."""
        positions: Tensor | slice | None = None
        if self.fetched is not None:
            positions = view.tier.positions(span.table, 0, span.table.shape[1] * view.tier.pool.page_tokens)
            span = replace(span, hidden=self.fetched.hides(positions)[:, :, 0])
        cos_sin = None
        if self.before_rope and self.rotation is not None:
            cos_sin = tables_between(self.forward, self.rotation, *self._span(view.tier, span), view.asked.given)
        scored = wanted or self.asks or view.leaves_values
        found = view.fused(tiles, span, self.logits.softcap, scored, cos_sin, runs)
        scores = found.mass if found.scores is None else found.scores
        left = partial(view.corrections, tiles) if view.leaves_values else None
        return ScoredSpan(scores, found, wanted, left, positions if self.asks else None)

    def _pairs_in_one(self, view: TierView, span: PageSpan, query: Tensor, runs: bool) -> ScoredSpan:
        """Attends a tier of sparse pairs with one kernel."""
        cos_sin = None
        if self.before_rope and self.rotation is not None:
            cos_sin = cos_sin_between(self.forward, self.rotation, *self._span(view.tier, span), query)
        found = view.pairs_fused(span, cos_sin, self.logits.softcap, runs)
        return ScoredSpan(found.mass, found, False)

    def _span(self, tier: Tier, span: PageSpan) -> tuple[int, int]:
        """The range of positions of a tier's slots, where tokens are in order; else of all tokens in tiers."""
        if tier.first is not None:
            return tier.first, tier.first + span.table.shape[1] * tier.pool.page_tokens
        if self.forward.of_block:  # the most that any of its steps may have
            return 0, self.state.sinks + self.state.slots_with_room(self.forward)
        longest = max(self.state.encoded(row, self.forward.before[row]) for row in self.rows)
        return 0, self.state.sinks + longest

    def _relocated(self, query: GroupedQuery) -> GroupedQuery:
        """The query rotated to its position inside the cache: back by as many positions as its row has dropped tokens."""
        assert self.rotation is not None
        key = ("relocated", self.rows, query.given.device)
        if key not in self.forward.readings:
            self.forward.readings[key] = self.rotation.at(self._dropped(query.given.device)[:, None, None])
        return GroupedQuery(Rotation.rotated(query.scaled, *self.forward.readings[key]), 1.0)

    def _relocated_back(self, asked: ReadRequest, back: Tensor) -> tuple[Tensor, Tensor]:
        """`back` of a plan for sinks: the model's sliding window counts positions inside the cache too. Also returned as in a
        `PageSpan` from the first page on."""
        key = ("relocated back", asked)
        if key not in self.forward.readings:
            found = back + self._dropped(back.device)[:, None, None, None]
            self.forward.readings[key] = found, found.flatten(1).int()
        relocated: tuple[Tensor, Tensor] = self.forward.readings[key]
        return relocated

    def _dropped(self, device: torch.device) -> Tensor:
        """Minus the number of tokens that each row has dropped, int64 `[rows]`."""
        # Fetched tokens together take one position, if any token was dropped.
        spared = int(self.fetched is not None and self.fetched.cos_sin is not None)

        def dropped(step: Forward) -> list[int]:
            found = ((row, step.before[row]) for row in self.rows)
            return [min(0, self.state.kept(row, n) - n + spared) for row, n in found]

        return self.forward.tensor(f"tokens dropped of {self.rows}", dropped, device)

    def _heaviest(self, spans: list[ScoredSpan], plan: ReadPlan) -> list[ScoredSpan]:
        """Oracle eviction: each query row keeps only the logits of its heaviest tokens, earlier ones on ties."""
        assert self.oracle_share is not None
        share, queries = self.oracle_share, plan.asked.queries
        scores = torch.cat([span.scores for span in spans], -1)
        held = [self.forward.before[row] for row in self.rows]
        # A row without tokens reads its prompt, which is exact in any method.
        reach = self.logits.sliding or max(self.forward.after)
        counts = [[share_of(share if n else 1, min(n + column + 1, reach)) for column in queries] for n in held]
        most = upload(counts, torch.int64, scores.device).repeat(1, scores.shape[2] // len(queries))[:, None, :, None]
        rank = scores.argsort(dim=-1, descending=True, stable=True).argsort(-1)
        found = scores.masked_fill(rank >= most, -torch.inf).split([span.scores.shape[-1] for span in spans], -1)
        return [replace(span, scores=own) for own, span in zip(found, spans, strict=True)]


def _behind(positions: Tensor | slice, back: Tensor | None) -> Tensor | None:
    """Mask of tokens outside the queries' sliding window; None for tokens in order, which the plan's masks cover."""
    return None if back is None or isinstance(positions, slice) else positions[:, :, None] <= back


def _mixed(view: TierView, tile: Tile, weights: Tensor) -> tuple[Tensor]:
    return (view.mix(weights, tile),)


def _summed(span: ScoredSpan, weights: Tensor) -> tuple[Tensor]:
    assert callable(span.mix)
    return (reduce(add, span.mix(weights)),)
