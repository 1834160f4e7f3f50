"""The tokens of an ordered layer as spans: its pages, tile by tile or by one kernel, then the last tile, the exact window, the
new tokens and fetched ones as one span, because most caches are no longer than that."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from calib.kernels.attend.operation import (
    Attended,
    ExactGroup,
    ExactTokens,
    PackedStream,
    PageSpan,
    attend_pages,
    exact_supported,
    supported,
)
from calib.kernels.dispatch import prefers_triton
from calib.kernels.fetched_masks.operation import fetched_masks
from calib.runtime.attend.attention_stats import Observed
from calib.runtime.attend.grouped_query import GroupedQuery
from calib.runtime.attend.layer_tokens import LayerTokens
from calib.runtime.attend.read_plan import ReadPlan, ReadRequest, Tile, exact_positions, page_numbers
from calib.runtime.attend.scored_span import ExactSpan, ScoredSpan, joined
from calib.runtime.logits import either, masked
from calib.runtime.ordered.sequence_state import OrderedSequenceState
from calib.runtime.ordered.stream import Stream
from calib.runtime.ordered.window_keys import WindowKeys
from calib.runtime.paging.forward import Forward
from calib.runtime.paging.page_numbers import Pages


@dataclass
class OrderedTokens(LayerTokens):
    """Keys and values of a layer (`LayerTokens`)."""

    state: OrderedSequenceState
    keys: Stream
    values: Stream

    def plan(self, queries: range, query_rows: int) -> ReadPlan:
        """The read plan; with slices instead of masks where rows have equal lengths and nothing is fetched."""
        device, window = self.keys.pool.device, self.values.window.tokens.shape[2]
        # No kernel adds a folded bias to scores.
        fused = prefers_triton(device) and self.keys.bias is None and supported(query_rows, *self._streams)
        trims = not fused and self.fetched is None and self.state.keys.window() == self.state.values.window()
        sizes = self.logits.sliding, self.keys.tile_tokens, window
        return ReadPlan.of(
            self.state, self.forward, ReadRequest(self.rows, queries, *sizes, device, trims=trims, fused=fused)
        )

    def spans(
        self, query: GroupedQuery, plan: ReadPlan, new_keys: Tensor, new_values: Tensor, observed: Observed | None
    ) -> Iterator[ScoredSpan | ExactSpan]:
        """The spans. Nothing is watched: slots follow from positions, so storing needs no attention mass."""
        scorer, tiles = _Scorer(self.keys, query, self.forward), plan.tiers[0]
        keys, values = plan.read_of(new_keys), plan.read_of(new_values)
        if plan.trimmed and tiles and (span := plan.page_spans[0]) is not None and self._meets_first_slots(query):
            found = WindowKeys.of(self.state, self.forward, plan, 0)
            slots = slice(0, tiles[-1].stop)
            if found.ahead:
                span, slots = self._with_keys_ahead(span, slots)
            yield (part := self._in_one(scorer, span, slots, found.ahead))
            assert isinstance(part.mix, Attended)
            yield ExactSpan(self._exact_groups(plan, found, part.mix.ahead, keys, values))
            return
        if plan.asked.fused or self._meets_any_rows(query, plan):
            new = (ExactGroup(values, keys), *self._fetched_group())
            if self._meets_all_exact(query, new):
                yield from self._by_kernels(scorer, plan, new)
                return
            if (span := plan.page_spans[0]) is not None:
                slots = slice(tiles[0].start, tiles[-1].stop)
                if self.fetched is not None:
                    span = replace(span, hidden=self.fetched.hides(slots)[:, :, 0])
                yield self._in_one(scorer, span, slots)
                tiles = []
        for tile in tiles[:-1]:
            yield self._tile(scorer, tile)
        last = self._last_of_equal if plan.trimmed else self._last
        yield last(scorer, plan, tiles[-1:], keys, values)

    def _by_kernels(
        self, scorer: "_Scorer", plan: ReadPlan, new: tuple[ExactGroup, ...]
    ) -> Iterator[ScoredSpan | ExactSpan]:
        """Packed tokens by one kernel, all others by another: the window, the `new` tokens and the fetched ones."""
        tiles, span, slots, count, ahead = plan.tiers[0], plan.page_spans[0], slice(0, 0), 0, None
        if span is not None:
            slots, count = slice(tiles[0].start, tiles[-1].stop), self._slots_ahead(plan)
            if count:
                span, slots = self._with_keys_ahead(span, slots)
        replaced, hidden = self._fetched_masks(plan, slots)
        if span is not None:
            span = span if replaced is None else replace(span, hidden=replaced)
            yield (part := self._in_one(scorer, span, slots, count, runs=True))
            assert isinstance(part.mix, Attended)
            ahead = part.mix.ahead
        groups = (self._slots(scorer, plan, ahead), *new) if plan.window else new
        yield ExactSpan(ExactTokens(groups, hidden), positions=self._positions_of_exact(plan) if self.asks else ())

    def _meets_all_exact(self, query: GroupedQuery, new: tuple[ExactGroup, ...]) -> bool:
        """Whether a kernel can attend all exact tokens together: the window, `new` ones, and fetched ones that need no rotation
        of the query."""
        tokens = ExactTokens((ExactGroup(self.values.window.tokens, self.keys.window.tokens), *new))
        return (self.fetched is None or self.fetched.cos_sin is None) and exact_supported(query.for_kernels[0], tokens)

    def _fetched_group(self) -> tuple[ExactGroup, ...]:
        """The fetched tokens as a group of exact ones, if there are any."""
        fetched = self.fetched
        return () if fetched is None or fetched.is_empty else (ExactGroup(fetched.values, fetched.keys),)

    def _fetched_masks(self, plan: ReadPlan, slots: slice) -> tuple[Tensor | None, Tensor | None]:
        """Masks of packed tokens, and of exact tokens followed by the fetched ones, such that fetched tokens are attended once."""
        fetched = self.fetched
        if fetched is None or fetched.is_empty:
            return None, plan.hidden
        exact = exact_positions(self.state, self.forward, plan.asked, plan.window)
        return fetched_masks(fetched.positions, range(slots.start, slots.stop), exact, plan.hidden, plan.back)

    def _positions_of_exact(self, plan: ReadPlan) -> tuple[Tensor, ...]:
        """The positions of the window's tokens and the new ones, and of the fetched tokens."""
        assert self.fetched is not None
        exact = exact_positions(self.state, self.forward, plan.asked, plan.window)
        return (exact,) if self.fetched.is_empty else (exact, self.fetched.positions)

    def _meets_first_slots(self, query: GroupedQuery) -> bool:
        """Whether CPU kernels can attend the packed tokens, and the exact ones together with them."""
        exact = ExactTokens((ExactGroup(self.values.window.tokens, self.keys.window.tokens),))
        return (
            self.keys.bias is None
            and exact_supported(query.for_kernels[0], exact)
            and supported(query.given.shape[2], *self._streams, first_slots=True)
        )

    def _meets_any_rows(self, query: GroupedQuery, plan: ReadPlan) -> bool:
        """Whether the same kernels can attend rows of different lengths, described by an index and masks: for one query per
        row, which sees all of the row's first slots."""
        sees_all = plan.back is None and self.fetched is None and not plan.trimmed
        return sees_all and len(plan.asked.queries) == 1 and self._meets_first_slots(query)

    def _exact_groups(
        self, plan: ReadPlan, found: WindowKeys, ahead: Tensor | None, new_keys: Tensor, new_values: Tensor
    ) -> ExactTokens:
        """The window, the tokens of which only keys are packed (with their scores, `ahead`), and the new tokens."""
        own = slice(self.rows.start, self.rows.stop)
        held, values = self.keys.window.tokens[own, :, : found.exact], self.values.window.tokens[own, :, : plan.window]
        groups = [ExactGroup(values[:, :, : found.exact], held)] if found.exact else []
        if ahead is not None:
            groups.append(ExactGroup(values[:, :, found.exact :], scores=ahead))
        return ExactTokens((*groups, ExactGroup(new_values, new_keys)))

    def _slots_ahead(self, plan: ReadPlan) -> int:
        """For how many packed keys after the attended tokens the kernel also returns scores: a whole window, if any key is
        packed while its value is exact. The same in all steps of a block, so that their shapes are equal."""
        if not plan.window:
            return 0
        found = WindowKeys.of(self.state, self.forward, plan, self.keys.window.tokens.shape[2])
        keys, _ = self._streams
        served = keys is not None and keys.ranked is None and self._same_rings()
        return plan.window if found.recent_pages is not None and served else 0

    def _same_rings(self) -> bool:
        """Whether a window slot holds key and value of the same token, because both rings have the same size."""
        return self.state.keys.window() == self.state.values.window()

    def _slots(self, scorer: "_Scorer", plan: ReadPlan, ahead: Tensor | None) -> ExactGroup:
        """All window slots as a group; `ahead` are the scores of packed keys after the attended tokens."""
        held, values = (stream.window.leading(self.rows, plan.window) for stream in (self.keys, self.values))
        found = WindowKeys.of(self.state, self.forward, plan, self.keys.window.tokens.shape[2])
        if ahead is not None:
            return ExactGroup(values, held, ahead, found.ahead_index)
        if found.recent_pages is None and self._same_rings() and held.shape[2] == plan.window:
            return ExactGroup(values, held)
        return ExactGroup(values, scores=self._window_scores(scorer, found))

    def _window_scores(self, scorer: "_Scorer", found: WindowKeys) -> Tensor:
        """Scores of the keys for the window's slots, each of which is exact or packed."""
        sources = scorer.exact(self.keys.window.tokens[self.rows.start : self.rows.stop])
        if found.pages is not None:
            sources = torch.cat([sources, scorer.packed(found.pages, found.positions)], -1)
        assert found.index is not None
        return sources.gather(-1, found.index.expand(*sources.shape[:3], -1))

    def _with_keys_ahead(self, span: PageSpan, slots: slice) -> tuple[PageSpan, slice]:
        """The span extended by the pages of keys that are packed ahead of their values, which may be later pages."""
        key = ("keys ahead", id(span))  # `span` is kept alive by the plan of all layers
        if key not in self.forward.readings:
            table, page = self.state.table, self.keys.pool.page_tokens
            held = table.longest if self.forward.of_block else max(len(table.rows[row]) for row in self.rows)
            pages = range(slots.start // page, self.state.room(0, held) if self.forward.of_block else held)
            numbers = page_numbers(table, self.forward, self.rows, pages, span.table.device)
            self.forward.readings[key] = replace(span, table=numbers), slice(slots.start, pages.stop * page)
        found: tuple[PageSpan, slice] = self.forward.readings[key]
        return found

    def _in_one(
        self, scorer: "_Scorer", span: PageSpan, slots: slice, ahead: int = 0, runs: bool = False
    ) -> ScoredSpan:
        """Attends all packed tokens in `slots` with one kernel, which also returns scores of `ahead` further keys. With `runs`
        the result may be in parts that are still to be merged."""
        keys, values = self._streams
        assert keys is not None and values is not None
        (query, scale), constant = scorer.query.for_kernels, None
        if keys.map is None:
            (query, constant), scale = scorer.folded, 1.0
        found = attend_pages(
            query, keys, values, span, constant, self.logits.softcap, scored=self.asks,
            precise=self.values.window.tokens.dtype == torch.float32, ahead=ahead, scale=scale,
            runs=runs and values.map is not None,
        )  # fmt: skip
        if values.map is None:
            found = replace(found, mixed=self.values.plan.transform.fold_output(found.mixed, found.mass))
        scores = found.mass if found.scores is None else found.scores
        return ScoredSpan(scores, found, positions=slots if self.asks else None)

    def _tile(self, scorer: "_Scorer", tile: Tile) -> ScoredSpan:
        """Scores one tile of packed tokens."""
        hidden, positions = tile.hidden, slice(tile.start, tile.stop)
        if self.fetched is not None:
            hidden = either(hidden, self.fetched.hides(positions))
        scores = masked(self.logits.capped(scorer.packed(tile.pages, positions)), hidden)
        return ScoredSpan(scores, partial(self._mix, tile), positions=positions if self.asks else None)

    def _last_of_equal(
        self, scorer: "_Scorer", plan: ReadPlan, tiles: list[Tile], new_keys: Tensor, new_values: Tensor
    ) -> ScoredSpan:
        """The last span for rows of equal length: slices replace index and masks."""
        found, own = WindowKeys.of(self.state, self.forward, plan, 0), slice(self.rows.start, self.rows.stop)
        exact = scorer.exact(torch.cat([self.keys.window.tokens[own, :, : found.exact], new_keys], 2))
        scores, read = [exact], tiles[0].stop - tiles[0].start if tiles else 0
        if found.pages is not None:
            packed = scorer.packed(found.pages, found.positions)
            scores = [packed[..., :read], exact[..., : found.exact], packed[..., found.recent], exact[..., -1:]]

        def mix(weights: Tensor) -> list[Tensor]:
            exact = torch.cat([self.values.window.tokens[own, :, : plan.window], new_values], 2)
            mixed = [weights[..., read:] @ exact.float()]
            return mixed + self._mix(tiles[0], weights[..., :read]) if tiles else mixed

        return ScoredSpan(self.logits.capped(torch.cat(scores, -1) if len(scores) > 1 else exact), mix, is_last=True)

    def _last(
        self, scorer: "_Scorer", plan: ReadPlan, tiles: list[Tile], new_keys: Tensor, new_values: Tensor
    ) -> ScoredSpan:
        """The last span in general: rows of different lengths, several queries, sliding windows."""
        spans = [self._exact(scorer, plan, new_keys, new_values), *(self._tile(scorer, tile) for tile in tiles)]
        if self.fetched is not None:
            spans.append(self.fetched.span(scorer.query.scaled, self.logits, plan.back))
        order = [1, 0, 2] if tiles else [0, 1]
        return joined(spans, order[: len(spans)])

    def _exact(self, scorer: "_Scorer", plan: ReadPlan, new_keys: Tensor, new_values: Tensor) -> ScoredSpan:
        """The window and the new tokens as a span."""
        scores, hidden, positions = [scorer.exact(new_keys)], plan.hidden, None
        own = slice(self.rows.start, self.rows.stop)
        if plan.window:
            found = WindowKeys.of(self.state, self.forward, plan, self.keys.window.tokens.shape[2])
            scores.insert(0, self._window_scores(scorer, found))
        if self.fetched is not None:  # a packed key may be replaced by a fetched one while its value is in the window
            positions = exact_positions(self.state, self.forward, plan.asked, plan.window)
            hidden = either(hidden, self.fetched.hides(positions))

        def mix(weights: Tensor) -> list[Tensor]:
            mixed = [weights[..., plan.window :] @ new_values.float()]
            if plan.window:
                mixed.append(weights[..., : plan.window] @ self.values.window.tokens[own].float())
            return mixed

        exact = masked(self.logits.capped(torch.cat(scores, -1) if plan.window else scores[0]), hidden)
        return ScoredSpan(exact, mix, positions=positions if self.asks else None)

    @cached_property
    def _streams(self) -> tuple[PackedStream | None, PackedStream | None]:
        """Keys and values in the form that a kernel reads; None where no kernel does."""
        return self.keys.in_pages, self.values.in_pages

    def _mix(self, tile: Tile, weights: Tensor) -> list[Tensor]:
        """Weighted sum of a tile's values; the tile may end inside its last page."""
        stages, values = self.values.plan, self.values.pool.read(tile.pages)
        if tile.stop % self.values.pool.page_tokens:
            weights = F.pad(weights, (0, -tile.stop % self.values.pool.page_tokens))
        mixed = stages.codec.mix(weights, values, self.values.head_dim)
        return [stages.transform.fold_output(mixed, weights.sum(-1, keepdim=True))]


class _Scorer:
    """Scores one tile of query rows against a layer's keys."""

    def __init__(self, keys: Stream, query: GroupedQuery, forward: Forward) -> None:
        self.keys, self.query, self.forward = keys, query, forward

    @cached_property
    def folded(self) -> tuple[Tensor, Tensor | None]:
        """The query with the key transform folded in, and the constant to add to its scores, if any."""
        return self.keys.plan.transform.fold_query(self.query.scaled)

    def packed(self, pages: Pages, positions: slice | Tensor | None) -> Tensor:
        """Scores of the keys in `pages`, whose slots have these `positions`: `[rows, kv_heads, query rows, tokens]`."""
        folded, constant = self.folded
        scores = self.keys.plan.codec.scores(folded, self.keys.pool.read(pages))
        scores = scores if constant is None else scores + constant
        if self.keys.bias is None:
            return scores
        assert positions is not None
        return scores + self.keys.bias.scores(self.forward, self.query.scaled, positions)

    def exact(self, keys: Tensor) -> Tensor:
        """Scores of exact `keys [rows, kv_heads, tokens, D]`."""
        return self.query.scaled @ keys.float().mT
