"""How a tier is read for some rows: its stages, and its pages in the form that a kernel takes. Reused in every step until pages
or stages are replaced."""

from dataclasses import dataclass, field, replace
from typing import TypeAlias

from calib.kernels.attend.operation import MOST_RANK, LowRankTerm, PackedStream
from calib.kernels.dispatch import prefers_triton
from calib.runtime.paging.field import Block
from calib.runtime.stages.codec.corrected import COEFFICIENTS
from calib.runtime.stages.codec.in_pages import mapped, packed_stream
from calib.runtime.stages.contract import Codec, Transform
from calib.runtime.tiered.tier import Tier

Streams: TypeAlias = tuple[PackedStream | None, PackedStream | None]


@dataclass(frozen=True)
class TierReading:
    """The stages by which some rows read a tier. The dictionaries are by role, "keys" or "values".

    Attributes:
        tier: the tier that is read.
        transforms: the transforms of these rows.
        codecs: the codecs of these rows.
        left: the codecs without their low-rank part, where a kernel computes that part together with the codes.
        corrected: whether any codec in `left` still has corrections.
        ranked: whether any codec in `left` lacks its low-rank part.
    """

    tier: Tier
    transforms: dict[str, Transform]
    codecs: dict[str, Codec]
    left: dict[str, Codec]
    corrected: bool
    ranked: bool
    _kept: dict[bool, Streams] = field(default_factory=dict)

    @staticmethod
    def of(tier: Tier, rows: range) -> "TierReading":
        """The reading of `rows`; cached with the pages, unless the rows have dictionary atoms of their own (CSR)."""
        if tier.dictionaries:
            return _reading(tier, rows)
        # Parameters measured anew are written into the same tensors, so the cached reading stays valid.
        stages = [transform.stage for transform in tier.transforms.values()]
        return tier.pool.derived.once(
            (TierReading, rows), lambda: _reading(tier, rows), (prefers_triton(tier.pool.device), *stages)
        )

    def streams(self, rotated: bool, maps_values: bool, shared: dict[str, Block]) -> Streams:
        """Keys and values in the form that a kernel reads, without corrections. With `rotated` the kernel rotates keys, which
        then have no channel map. Values get a channel map with `maps_values`. `shared` has the parameters that a row's tokens
        share, which differ from forward to forward."""
        # Low-rank vectors are decoded for each forward: cached, they would be in memory twice.
        if self.ranked or shared["keys"] or shared["values"]:
            return self._streams(rotated, maps_values, shared)
        if rotated not in self._kept:
            self._kept[rotated] = self._streams(rotated, maps_values, shared)
        return self._kept[rotated]

    def _streams(self, rotated: bool, maps_values: bool, shared: dict[str, Block]) -> Streams:
        keys, values = self._stream("keys", shared["keys"]), self._stream("values", shared["values"])
        values = mapped(values, self.transforms["values"]) if maps_values else values
        return keys if rotated else mapped(keys, self.transforms["keys"]), values

    def _stream(self, role: str, shared: Block) -> PackedStream | None:
        codec, pool, width, part = self.codecs[role], self.tier.pool, self.tier.coded[role], f"{role}."
        stream = packed_stream(codec.uncorrected, pool, width, part, shared)
        if stream is None or codec.corrections is None or self.left[role] is codec:
            return stream
        basis = codec.corrections.vectors(shared, width)
        assert basis is not None
        return replace(stream, ranked=LowRankTerm(pool.tensors[part + COEFFICIENTS], basis))


def _reading(tier: Tier, rows: range) -> TierReading:
    transforms = {role: transform.of(rows) for role, transform in tier.transforms.items()}
    codecs = {role: tier.codec(role, rows) for role in transforms}
    left = {role: _without_ranked(tier, codec, role) for role, codec in codecs.items()}
    corrected = any(codec.corrections is not None for codec in left.values())
    ranked = any(left[role] is not codec for role, codec in codecs.items())
    return TierReading(tier, transforms, codecs, left, corrected, ranked)


def _without_ranked(tier: Tier, codec: Codec, role: str) -> Codec:
    """The codec without its low-rank part, where a kernel computes it: few vectors, the same for all of a row's tokens. Not for
    predicted values, whose mixture is over channels."""
    corrected = codec.corrections
    if corrected is None or corrected.low_rank is None or (role == "values" and tier.plan.prediction is not None):
        return codec
    few = tier.pool.fields[f"{role}.{COEFFICIENTS}"].width <= MOST_RANK
    return corrected.without_low_rank if few and (corrected.low_rank.basis is not None or tier.row_params) else codec
