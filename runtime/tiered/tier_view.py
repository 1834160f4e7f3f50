"""A tier as the queries of one forward read it: packed, with its transform folded into query and output where possible."""

from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from calib.kernels.attend.operation import (
    Attended,
    ChannelMap,
    CodeFold,
    PackedStream,
    PageSpan,
    attend_pages,
)
from calib.kernels.desparsify_attend.operation import desparsify_attend
from calib.kernels.desparsify_attend.reference import SparsePages
from calib.kernels.dispatch import prefers_triton
from calib.kernels.outliers.operation import PageTerms, scores_of
from calib.kernels.outliers.operation import supported as terms_supported
from calib.runtime.attend.grouped_query import GroupedQuery
from calib.runtime.attend.read_plan import Tile
from calib.runtime.paging.field import Block
from calib.runtime.paging.page_numbers import Pages
from calib.runtime.stages.codec.corrected import lists, segment_mix, segment_scores
from calib.runtime.stages.codec.in_pages import page_terms, sparse_pages
from calib.runtime.stages.codec.sized import Sized
from calib.runtime.stages.codec.sparse import tokens_first
from calib.runtime.tiered.rope_on_read import RopeOnRead
from calib.runtime.tiered.tier import POSITIONS, Tier
from calib.runtime.tiered.tier_reading import TierReading


class TierView:
    """A tier for the rows and queries of one forward; computes once what all its tiles share.

    Scores and weights are `[rows, kv_heads, query rows, tokens]`, mixtures `[rows, kv_heads, query rows, D]`.
    """

    def __init__(
        self,
        tier: Tier,
        rows: range,
        asked: GroupedQuery,
        row_params: Pages | None,
        tokens: int,
        rotated: RopeOnRead | None = None,
    ) -> None:
        """`row_params` are the pages of the rows' shared parameters, `tokens` the slots of all tiles; `rotated` rotates decoded
        keys to their positions, where they are stored before RoPE."""
        self.tier, self.asked, self.rotated = tier, asked, rotated
        self.reading = TierReading.of(tier, rows)
        self.transforms, self.codecs = self.reading.transforms, self.reading.codecs
        # The corrections that `fused` does not compute in its kernel.
        self.left, self.corrected = self.reading.left, self.reading.corrected
        self.row_params, self.tokens = None if tier.row_params is None else row_params, tokens
        self.shared: dict[str, Block] = {"keys": {}, "values": {}}
        if tier.row_params is not None and row_params is not None:
            read = tier.row_params.first_rows if prefers_triton(tier.pool.device) else tier.row_params.read
            self.shared = {role: read(row_params, f"{role}.") for role in self.shared}

    @cached_property
    def bias(self) -> Tensor | None:
        """What the outlier lists in the rows' parameters add to the scores of all tiles; None without such parameters."""
        if self.row_params is None:
            return None
        return segment_scores(self.codecs["keys"], self.query, self.shared["keys"], self.tokens)

    @cached_property
    def _folded(self) -> tuple[Tensor, Tensor | None]:
        # Keys to be rotated are decoded first, so no transform is folded into the query.
        return (self.asked.scaled, None) if self.rotated else self.transforms["keys"].fold_query(self.asked.scaled)

    @property
    def query(self) -> Tensor:
        """The query for keys as they are encoded, with the key transform folded in: float32 `[rows, kv_heads, query rows, D]`."""
        return self._folded[0]

    @property
    def constant(self) -> Tensor | None:
        """The constant that the folded transform adds to scores, `[rows, kv_heads, query rows, 1]`, or None."""
        return self._folded[1]

    @cached_property
    def streams(self) -> tuple[PackedStream | None, PackedStream | None]:
        """Keys and values in the form that a kernel reads, without corrections; None for both where no kernel can rotate the
        keys."""
        if self.rotated is not None and not self._rotates_codes:
            return None, None
        maps_values = not self._is_ranked("values") or self.value_terms is not None
        return self.reading.streams(self.rotated is not None, maps_values, self.shared)

    def _is_ranked(self, role: str) -> bool:
        """Whether the attention kernel computes the low-rank part of this role."""
        return self.left[role] is not self.codecs[role]

    def _terms(self, role: str) -> PageTerms | None:
        """The other corrections of this role (outliers, residual) in the form that kernels take; None where they cannot."""
        codec, tier = self.left[role].corrections, self.tier
        if codec is None:
            return None
        return page_terms(codec, tier.pool, tier.coded[role], f"{role}.", tier.row_params, self.row_params)

    @property
    def value_terms(self) -> PageTerms | None:
        """The corrections of values that attention's kernels mix besides the codes; None if there are none, or `corrections`
        adds them."""
        return self._value_terms if self.corrected or self.reading.ranked else None

    @cached_property
    def _value_terms(self) -> PageTerms | None:
        if self.tier.plan.prediction is not None or self.codecs["values"].component_codes is not None:
            return None
        if self.left["values"].corrections is None:
            terms, width, device = PageTerms(), self.tier.coded["values"], self.tier.pool.device
            return terms if self._is_ranked("values") and terms_supported(terms, width, device) else None
        return self._terms("values")

    @property
    def _rotates_codes(self) -> bool:
        """Whether keys are component codes in a basis and nothing else, which a kernel can rotate."""
        return self.codecs["keys"].component_codes is not None and self.transforms["keys"].components is not None

    @cached_property
    def _of_codes(self) -> Tensor | None:
        """The map from component codes to keys; None where keys are not such codes."""
        return None if self.codecs["keys"].component_codes is None else self.transforms["keys"].of_codes()

    def fused(
        self,
        tiles: list[Tile],
        span: PageSpan,
        softcap: float | None,
        scored: bool,
        cos_sin: tuple[Tensor, Tensor] | None = None,
        runs: bool = False,
    ) -> Attended:
        """Attends all tokens of the tier with one kernel, which rotates keys by the tables `cos_sin`. Corrections of the values
        that are not in `value_terms` are left to `corrections`. With `runs` the result may consist of parts that are still to
        be merged."""
        keys, values = self.streams
        assert keys is not None and values is not None
        if span.back is not None:
            span = replace(span, back=self._back(span.back))
        if span.back is not None or cos_sin is not None:
            positions = self.tier.pool.tensors.get(POSITIONS)
            span = span if positions is None else replace(span, positions=positions)
        rope_tables = None if cos_sin is None else self.transforms["keys"].rope_tables(*cos_sin)
        precise = self.tier.dtype == torch.float32
        fold = self._value_fold()
        (query, scale), constant = self.asked.for_kernels, None
        if keys.map is None and self.rotated is None:
            (query, constant), scale = self._folded, 1.0
        if self.left["keys"].corrections is not None:
            span = replace(span, bias=self._added_to_all(tiles, span, query, scale, keys.map))
        folds = fold is None and values.map is None
        found = attend_pages(
            query, keys, values, span, constant, softcap, scored, precise, rope_tables, fold, scale=scale,
            runs=runs and not folds, terms=_from(tiles[0].start, self.value_terms),
        )  # fmt: skip
        if not folds:
            return found
        return replace(found, mixed=self.transforms["values"].fold_output(found.mixed, found.mass))

    def _value_fold(self) -> CodeFold | None:
        """The map from a mixture of codes to values; None where values are not component codes, or are corrected but not
        predicted."""
        codec, predicted = self.codecs["values"], self.tier.plan.prediction
        if (codec if predicted is None else codec.uncorrected).component_codes is None:
            return None
        fold = self.transforms["values"].code_fold()
        if predicted is None:
            return fold
        assert fold is not None, "values are predicted beside codes of components"
        return replace(fold, predicted=predicted.of_codes(self._key_codes))

    def pairs(self) -> list[SparsePages | None]:
        """Keys and values as sparse pairs (CSR), or None for a role that is not; pairs have no transform."""
        return [sparse_pages(self.codecs[role], self.tier.pool, f"{role}.") for role in ("keys", "values")]

    def pairs_fused(
        self, span: PageSpan, cos_sin: tuple[Tensor, Tensor] | None, softcap: float | None, runs: bool
    ) -> Attended:
        """Attends all sparse pairs of the tier with one kernel, which rotates keys by `cos_sin`. With `runs` the result may
        consist of parts that are still to be merged."""
        keys, values = self.pairs()
        assert keys is not None and values is not None
        positions = self.tier.pool.tensors.get(POSITIONS)
        back = None if span.back is None else self._back(span.back)
        return desparsify_attend(
            self.query, keys, values, span.table, span.used, cos_sin, positions, softcap, back, runs
        )

    def _back(self, back: Tensor) -> Tensor:
        """The newest hidden position of the sliding window as a kernel compares it: with positions, or with slots of tokens in
        order."""
        return back - self.tier.first if self.tier.first else back

    @property
    def leaves_values(self) -> bool:
        """Whether `fused` leaves corrections of the values to `corrections`."""
        return self.corrected and self.left["values"].corrections is not None and self.value_terms is None

    def corrections(self, tiles: list[Tile], weights: Tensor) -> Tensor:
        """What the remaining corrections add to the output of `fused`, from the final `weights [..., slots]`."""
        codec, mixed = self.left["values"], self.listed_mix(weights) if self.lists_values else None
        for tile in tiles:
            own, block = weights[..., tile.start : tile.stop], self._block("values", tile)
            added = own.new_zeros(*own.shape[:-1], self.tier.coded["values"])
            if codec.corrections is not None:
                added = codec.corrections.added_mix(own, block, added)
            if self.tier.plan.segments == "page":
                listed = segment_mix(codec, own, block, self.tier.coded["values"])
                added = added if listed is None else added + listed
            added = self.transforms["values"].fold_output(added, torch.zeros_like(own[..., :1]))
            mixed = added if mixed is None else mixed + added
        assert mixed is not None
        return mixed

    def _added_to_all(
        self, tiles: list[Tile], span: PageSpan, query: Tensor, scale: float, channel_map: ChannelMap | None
    ) -> Tensor:
        """What corrections add to the scores of all tiles, for `query` and `scale` as the attention kernel takes them."""
        terms = _from(tiles[0].start, self._terms("keys"))
        if terms is None:
            return torch.cat([self._added_scores(tile) for tile in tiles], -1)
        page, of_channels = self.tier.pool.page_tokens, None if channel_map is None else channel_map.scale
        return scores_of(query, terms, span.table, span.used, page, scale, of_channels)

    def _added_scores(self, tile: Tile) -> Tensor:
        """What corrections add to the scores of a tile."""
        codec, block = self.left["keys"], self._block("keys", tile)
        found = self.query.new_zeros(*self.query.shape[:-1], tile.stop - tile.start)
        if codec.corrections is not None:
            found = codec.corrections.added_scores(self.query, block, found)
        return self._listed_scores(tile, block, found)

    def _listed_scores(self, tile: Tile, block: Block, found: Tensor) -> Tensor:
        """`found` plus the scores of listed outliers: those of the rows' parameters, or those in the tile's pages."""
        if self.bias is not None:
            return found + self.bias[..., tile.start : tile.stop]
        if self.tier.plan.segments == "page":
            listed = segment_scores(self.codecs["keys"], self.query, block, found.shape[-1])
            return found if listed is None else found + listed
        return found

    def scores(self, tile: Tile) -> Tensor:
        """Scores of the query against the keys of a tile: `[rows, kv_heads, query rows, tokens]`."""
        codec, block = self.codecs["keys"], self._block("keys", tile)
        if self.rotated is not None:
            if codec.component_codes is not None and self._of_codes is not None:
                cos_sin = self.rotated.across(self.tier, tile, self.query)
                return codec.component_codes.rotated_scores(self.query, block, self._of_codes, *cos_sin)
            keys = self.transforms["keys"].inverse(codec.decode(tokens_first(block), self.tier.coded["keys"]))
            return self.query @ self.rotated.rotated(keys, self.tier, tile).mT
        found = self._listed_scores(tile, block, codec.scores(self.query, block))
        return found if self.constant is None else found + self.constant

    def mix(self, weights: Tensor, tile: Tile) -> Tensor:
        """Weighted sum of the values of a tile, without the outliers that the rows' parameters list (`listed_mix`)."""
        mixed = self._mixed(weights, tile)
        if self.tier.plan.prediction is None:
            return mixed
        return mixed + self.tier.plan.prediction.mix(self._key_codes, weights, self._block("keys", tile))

    @property
    def _key_codes(self) -> Sized:
        """The codec of the keys' codes, from which values are predicted."""
        codec = self.codecs["keys"].uncorrected
        assert isinstance(codec, Sized)
        return codec

    def _mixed(self, weights: Tensor, tile: Tile) -> Tensor:
        codec, block, width = self.codecs["values"], self._block("values", tile), self.tier.coded["values"]
        transform, mass = self.transforms["values"], weights.sum(-1, keepdim=True)
        if codec.component_codes is not None:
            folded = transform.fold_codes(codec.component_codes.mixed_codes(weights, block), mass)
            if folded is not None:
                return folded
        mixed = codec.mix(weights, block, width)
        if self.tier.plan.segments == "page":
            listed = segment_mix(codec, weights, block, width)
            mixed = mixed if listed is None else mixed + listed
        return transform.fold_output(mixed, mass)

    @property
    def lists_values(self) -> bool:
        """Whether `listed_mix` has anything to add."""
        return self.tier.row_params is not None and lists(self.codecs["values"])

    def listed_mix(self, weights: Tensor) -> Tensor:
        """What the outlier values in the rows' parameters add, from the final `weights [..., slots]` of all tiles in order."""
        mixed = segment_mix(self.codecs["values"], weights, self.shared["values"], self.tier.coded["values"])
        assert mixed is not None
        return self.transforms["values"].fold_output(mixed, torch.zeros_like(weights[..., :1]))

    def _block(self, role: str, tile: Tile) -> Block:
        return {**self.tier.pool.read(tile.pages, f"{role}."), **self.shared[role]}


def _from(first: int, terms: PageTerms | None) -> PageTerms | None:
    """`terms` for pages whose slot 0 holds the segment's token `first`."""
    if terms is None or terms.lists is None or not first:
        return terms
    return replace(terms, lists=replace(terms.lists, first=first))
