"""How a tier is read for some rows: its stages, and its pages as a kernel takes them. The same in every step until pages or stages
are others."""

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
    """What is said by role is of "keys" and of "values".

    Attributes:
        tier: that is read.
        transforms: of the rows.
        codecs: of the rows.
        left: the codecs without their low rank, where a kernel takes that beside codes.
        corrected: whether one of these still has corrections.
        ranked: whether one of them has left out low rank.
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
        """Kept with the pages, but where the rows have atoms of their own."""
        if tier.dictionaries:
            return _reading(tier, rows)
        # Numbers that are measured anew are written where the old ones lie.
        stages = [transform.stage for transform in tier.transforms.values()]
        return tier.pool.derived.once(
            (TierReading, rows), lambda: _reading(tier, rows), (prefers_triton(tier.pool.device), *stages)
        )

    def streams(self, turned: bool, maps_values: bool, shared: dict[str, Block]) -> Streams:
        """Keys and values as a kernel reads them, but for corrections; keys that are `turned` by it have no map. Values
        may have no map where others bring their low rank to them. `shared` is what the rows' tokens have in common, which differs
        from forward to forward."""
        # Vectors of low rank are made for each forward: kept, memory would hold them twice.
        if self.ranked or shared["keys"] or shared["values"]:
            return self._streams(turned, maps_values, shared)
        if turned not in self._kept:
            self._kept[turned] = self._streams(turned, maps_values, shared)
        return self._kept[turned]

    def _streams(self, turned: bool, maps_values: bool, shared: dict[str, Block]) -> Streams:
        keys, values = self._stream("keys", shared["keys"]), self._stream("values", shared["values"])
        values = mapped(values, self.transforms["values"]) if maps_values else values
        return keys if turned else mapped(keys, self.transforms["keys"]), values

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
    """The codec without its low rank, where a kernel takes that: few vectors, and for all of a row's tokens the same; not of values
    that are predicted, whose mixture is of channels."""
    corrected = codec.corrections
    if corrected is None or corrected.low_rank is None or (role == "values" and tier.plan.prediction is not None):
        return codec
    few = tier.pool.fields[f"{role}.{COEFFICIENTS}"].width <= MOST_RANK
    return corrected.without_low_rank if few and (corrected.low_rank.basis is not None or tier.row_params) else codec
