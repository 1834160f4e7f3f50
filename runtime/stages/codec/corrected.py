"""A codec with corrections, together a codec again: x^ = D + L + Q + S (GEAR, arXiv:2403.05527, Algorithm 1, and Q).

Outliers are replaced before the codec encodes the tokens into D; L = A B^T is a low-rank approximation of the residual x - D, which
is set to 0 at outliers; a second quantiser encodes the residual of both as Q; S is the difference x - D - L - Q at the outliers.
Attention works on each part and never forms their sum: q.x^ = q.D + (q B) A^T + q.Q + q.S, and likewise for values.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from calib.kernels.magnitude import largest_magnitude
from calib.kernels.outliers.page_terms import PageTerms
from calib.kernels.to_half import HALF_MAX
from calib.runtime.paging.field import Block, Field
from calib.runtime.stages.codec.uniform import UniformQuant
from calib.runtime.stages.contract import Codec, SamplesAtoms, Segment
from calib.runtime.stages.correction import LowRank, Outliers
from calib.runtime.stages.correction.outliers import Found

OUTLIERS, LOW_RANK, RESIDUAL = "outliers.", "low_rank.", "residual."
COEFFICIENTS = LOW_RANK + "coefficients"
OVERFLOWED = OUTLIERS + "overflowed"  # not stored: the number of entries beyond a threshold that got no slot, `[batch]`


@dataclass(frozen=True, eq=False)
class Corrected(Codec):
    """`codec` with outliers, a low-rank part, its residual quantised once more, or several of these."""

    codec: Codec
    outliers: Outliers | None = None
    low_rank: LowRank | None = None
    residual: UniformQuant | None = None

    @property
    def corrections(self) -> "Corrected":
        """Itself."""
        return self

    @property
    def uncorrected(self) -> Codec:
        """The codec that is corrected."""
        return self.codec

    @property
    def has_kernel(self) -> bool:
        """The codec's: corrections are added to what its kernel gives."""
        return self.codec.has_kernel

    @property
    def joins_heads(self) -> bool:
        """Whether any part does."""
        across = [part is not None and part.joins_heads for part in (self.codec, self.outliers, self.low_rank)]
        return any(across)

    @property
    def asks_extremes(self) -> bool:
        """The codec's; for outliers, too, the largest magnitude decides."""
        return self.codec.asks_extremes

    @property
    def row_by_row(self) -> bool:
        """As for `codec`."""
        return self.codec.row_by_row

    @property
    def sampling(self) -> SamplesAtoms | None:
        """As for `codec`."""
        return self.codec.sampling

    @property
    def listed(self) -> bool:
        """Whether outliers are listed for a whole segment, not for each token."""
        return self.outliers is not None and self.outliers.listed

    def bound(self, online: Tensor) -> "Corrected":
        """The same with the codec bound to rows' atoms."""
        return replace(self, codec=self.codec.bound(online))

    def token_group(self) -> int:
        """As for `codec`."""
        return self.codec.token_group()

    def fields(
        self, head_dim: int, dtype: torch.dtype, fp32_params: bool = False, segment: Segment | None = None
    ) -> dict[str, Field]:
        """The codec's fields, and `outliers.`, `low_rank.` and `residual.` ones."""
        fields, one = self.codec.fields(head_dim, dtype, fp32_params, segment), segment or Segment(1, 1)
        if self.residual is not None:
            again = self.residual.fields(head_dim, dtype, fp32_params, segment)
            fields |= {RESIDUAL + name: replace(field, kind="residual") for name, field in again.items()}
        for prefix, part in self._parts():
            own = part.fields(head_dim, fp32_params, one)
            placed = part is self.outliers and self.outliers.heads is not None
            if segment is None and not placed and any(f.tokens_per_row is None or f.shared for f in own.values()):
                raise ValueError(
                    f"{'rank' if part is self.low_rank else 'outliers'}: these corrections are computed over a whole segment, and "
                    "this method encodes tokens one by one; use statistics='calibrated', or a method that encodes segments "
                    "(gear, zipcache)"
                )
            fields |= {prefix + name: field for name, field in own.items()}
        return fields

    def fp32_params(self, x: Tensor) -> bool:
        """Whether the codec's parameters need float32, or an outlier's difference could exceed float16."""
        if self.codec.fp32_params(x):
            return True
        if self.outliers is None or not x.numel() or x.is_meta:  # a meta tensor has no values to ask for
            return False
        return bool(largest_magnitude(x).float() > HALF_MAX / 4)

    def encode(self, x: Tensor, fp32_params: bool | None = None) -> Block:
        """Encodes `x [batch, kv_heads, tokens, head_dim]`, one segment for each row; with thresholds also returns `OVERFLOWED`."""
        fp32_params = self.fp32_params(x) if fp32_params is None else fp32_params
        # Row by row and contiguous: the rounding of a row's sums must not depend on other rows, nor on its memory layout.
        rows = [self._encode(row.float().contiguous(), fp32_params) for row in x.split(1)]
        return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}

    def _encode(self, x: Tensor, fp32_params: bool) -> Block:
        found = None if self.outliers is None else self.outliers.find(x)
        filled = x if found is None or self.outliers is None else self.outliers.filled(x, found)
        block = dict(self.codec.encode(filled, fp32_params))
        distance = x - self.codec.decode(block, x.shape[-1])
        if self.low_rank is not None:
            factors = self.low_rank.encode(self._cleared(distance, found), fp32_params)
            block |= _named(LOW_RANK, factors)
            if found is not None or self.residual is not None:
                distance = distance - self.low_rank.decode(factors, x.shape[-1])
        if self.residual is not None:
            again = self.residual.encode(self._cleared(distance, found), fp32_params)
            block |= _named(RESIDUAL, again)
            distance = distance - self.residual.decode(again, x.shape[-1])
        if found is not None and self.outliers is not None:
            block |= _named(OUTLIERS, self.outliers.encode(distance, found, fp32_params))
            if found.overflowed_outliers is not None:
                block[OVERFLOWED] = found.overflowed_outliers[None]
        return block

    def _cleared(self, distance: Tensor, found: Found | None) -> Tensor:
        return distance if found is None or self.outliers is None else self.outliers.cleared(distance, found)

    def decode(self, block: Block, channels: int) -> Tensor:
        """x^, float32 `[..., kv_heads, tokens, channels]`."""
        x = self.codec.decode(block, channels)
        if self.low_rank is not None:
            x = x + self.low_rank.decode(_part(LOW_RANK, block), channels)
        if self.residual is not None:
            x = x + self.residual.decode(_part(RESIDUAL, block), channels)
        if self.outliers is not None:
            x = x + self.outliers.decode(_part(OUTLIERS, block), x)
        return x

    def scores(self, query: Tensor, tile: Block) -> Tensor:
        """Logits from all parts; of outliers only those stored with each token: `segment_scores` adds the others."""
        scores = self.codec.scores(query, tile)
        return self.added_scores(query, tile, scores)

    def added_scores(self, query: Tensor, tile: Block, scores: Tensor) -> Tensor:
        """Adds the logits from the other parts to the codec's `scores`, in place, and returns them."""
        if self.low_rank is not None:
            scores += self.low_rank.scores(query, _part(LOW_RANK, tile))
        if self.residual is not None:
            scores += self.residual.scores(query, _part(RESIDUAL, tile))
        if self.outliers is not None and not self.outliers.listed:
            scores += self.outliers.scores(query, _part(OUTLIERS, tile), scores.shape[-1])
        return scores

    def mix(self, weights: Tensor, tile: Block, channels: int) -> Tensor:
        """Weighted sums from all parts; of outliers only those stored with each token: `segment_mix` adds the others."""
        return self.added_mix(weights, tile, self.codec.mix(weights, tile, channels))

    def added_mix(self, weights: Tensor, tile: Block, mixed: Tensor) -> Tensor:
        """Returns the codec's weighted sums `mixed` plus those from the other parts."""
        channels = mixed.shape[-1]
        if self.low_rank is not None:
            mixed = mixed + self.low_rank.mix(weights, _part(LOW_RANK, tile), channels)
        if self.residual is not None:
            mixed = mixed + self.residual.mix(weights, _part(RESIDUAL, tile), channels)
        if self.outliers is not None and not self.outliers.listed:
            mixed = mixed + self.outliers.mix(weights, _part(OUTLIERS, tile), channels)
        return mixed

    def vectors(self, tile: Block, channels: int) -> Tensor | None:
        """The vectors B of the low-rank part of a tile of one segment, as stored: `[rows or 1, kv_heads, r, D]`, or None."""
        return None if self.low_rank is None else self.low_rank.vectors(_part(LOW_RANK, tile), channels)

    def terms(self, pages: Block, lists: Block, records: Tensor | None) -> PageTerms | None:
        """The corrections as kernels read them: from `pages`, rows' outliers from `lists` (`Outliers.terms`). None if no kernel
        does: with a second quantiser, with outliers of a whole matrix, or with low-rank vectors that are in no page."""
        found: PageTerms | None = PageTerms()
        if self.outliers is not None:
            found = self.outliers.terms(_part(OUTLIERS, pages), _part(OUTLIERS, lists), records)
        if self.low_rank is None or found is None or self.residual is not None:
            return None if self.residual is not None else found
        own = _part(LOW_RANK, pages)
        return replace(found, coefficients=own["coefficients"], basis=own["basis"]) if "basis" in own else None

    @property
    def without_low_rank(self) -> Codec:
        """The codec with its other corrections."""
        rest = replace(self, low_rank=None)
        return rest if rest.outliers or rest.residual else self.codec

    def with_seed(self, seed: int, layer: int) -> "Corrected":
        """The same with the start of the power iteration drawn for `seed` and `layer`."""
        return self if self.low_rank is None else replace(self, low_rank=self.low_rank.with_seed(seed, layer))

    def _parts(self) -> list[tuple[str, Outliers | LowRank]]:
        found = ((OUTLIERS, self.outliers), (LOW_RANK, self.low_rank))
        return [(prefix, part) for prefix, part in found if part is not None]


def counter(codec: Codec, device: torch.device) -> Tensor | None:
    """A counter of outliers that get no slot, int64 0, if the codec has outlier thresholds; else None."""
    corrections = codec.corrections
    if corrections is None or corrections.outliers is None or corrections.outliers.low is None:
        return None
    return torch.zeros((), dtype=torch.int64, device=device)


def counted(block: Block, count: Tensor | None) -> Block:
    """Adds `OVERFLOWED` of `block` to `count`, in place, and returns the block without it."""
    if count is None or OVERFLOWED not in block:
        return block
    count += block[OVERFLOWED].sum()
    return {name: part for name, part in block.items() if name != OVERFLOWED}


def counts_of(counters: Iterable[Tensor | None]) -> int:
    """The sum of the counters (waits for the device); a counter on the meta device counts as 0."""
    return sum(int(count) for count in counters if count is not None and not count.is_meta)


def lists(codec: Codec) -> bool:
    """Whether outliers are listed for a whole segment, not for each token."""
    return codec.corrections is not None and codec.corrections.listed


def unlisted(codec: Codec) -> Codec:
    """The codec with rows' outliers in plain lists, not in the kernels' `RowLists`; for an exported graph."""
    if not isinstance(codec, Corrected) or codec.outliers is None:
        return codec
    return replace(codec, outliers=replace(codec.outliers, of_row=False))


def segment_scores(codec: Codec, query: Tensor, tile: Block, tokens: int) -> Tensor | None:
    """What outliers that are listed for whole segments, `tokens` tokens in all, add to keys' logits; None if there are none."""
    found = codec.corrections
    if found is None or found.outliers is None or not found.listed:
        return None
    return found.outliers.scores(query, _part(OUTLIERS, tile), tokens)


def segment_mix(codec: Codec, weights: Tensor, tile: Block, channels: int) -> Tensor | None:
    """What outliers that are listed for whole segments add to values' weighted sums; None if there are none."""
    found = codec.corrections
    if found is None or found.outliers is None or not found.listed:
        return None
    return found.outliers.mix(weights, _part(OUTLIERS, tile), channels)


def _named(prefix: str, block: Block) -> dict[str, Tensor]:
    return {prefix + name: part for name, part in block.items()}


def _part(prefix: str, block: Block) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): part for name, part in block.items() if name.startswith(prefix)}
