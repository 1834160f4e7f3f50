"""Corrections over the plan of any method: outliers and low rank (GEAR), and a second quantiser, around its codecs."""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from calib.runtime.artifact import Artifact
from calib.runtime.methods.calibration import Statistics, check_statistics
from calib.runtime.methods.contract import Geometry
from calib.runtime.ordered.store import LayerPlan
from calib.runtime.placed.plan import PlacedPlan
from calib.runtime.stages.codec import Codec, Corrected, Exact, UniformQuant
from calib.runtime.stages.contract import Transform
from calib.runtime.stages.correction import LowRank, Outliers
from calib.runtime.stages.correction.outliers import Ranked
from calib.runtime.stages.tiering import Shares
from calib.runtime.stages.transform import Basis
from calib.runtime.store import Plan
from calib.runtime.tiered.plan import TieredPlan
from calib.runtime.tiered.tier_plan import TierPlan, TierStages


@dataclass(frozen=True)
class Corrections:
    """What is kept besides the codes (GEAR, arXiv:2403.05527): a part of any method's options, `corrections: {...}`.

    Methods that encode chunks (gear, zipcache) correct each chunk as a segment: outliers of keys for each channel over
    its tokens, of values for each token, factors of the chunk's own residual. Methods that encode one token at a time
    (mikv, kivi, rtn, csr, ...) have outliers for each token and, with `statistics="calibrated"`, low rank. 16-bit tiers are
    left alone.

    Args:
        outliers: share s of entries that are exact, half of them at each end; 0 is none.
        rank: of the residual's factors; a float is a share of min(tokens, channels); 0 is none.
        decode_rank: rank of every chunk after the first; None is `rank`.
        residual_bits: what is left after the codec and low rank is quantised once more at so many bits, 1 ... 8; 0: it is
            not. A scale and a zero point a token and head; at 1 bit the levels lie in the middles of the halves of the range
            (clip 0.5: at its ends they would add to what is left).
        residual_group: channels that share these two; None is a head's.
        statistics: "prompt" ranks entries and iterates; "calibrated" takes thresholds and bases from the artifact.
    """

    outliers: float = 0.0
    rank: float | int = 0
    decode_rank: float | int | None = None
    residual_bits: int = 0
    residual_group: int | None = None
    statistics: Statistics = "prompt"

    def __post_init__(self) -> None:
        if type(self.outliers) not in (float, int) or not 0 <= self.outliers <= 1:
            raise ValueError(f"outliers must be a share from 0 to 1, got {self.outliers!r}; 0.02 is usual")
        for name, rank in (("rank", self.rank), ("decode_rank", self._decode_rank)):
            if not (type(rank) is int and rank >= 0) and not (type(rank) is float and 0 <= rank <= 1):
                raise ValueError(
                    f"{name} must be a whole number from 0, or a share (0.0 ... 1.0) of min(tokens, channels), got {rank!r}"
                )
        if type(self.residual_bits) is not int or not 0 <= self.residual_bits <= 8:
            raise ValueError(f"residual_bits must be a whole number 0 ... 8, got {self.residual_bits!r}")
        if self.residual_group is not None and (type(self.residual_group) is not int or self.residual_group < 1):
            raise ValueError(
                f"residual_group must be a whole number of channels, at least 1, or nothing, got {self.residual_group!r}"
            )

        if self.residual_group is not None and not self.residual_bits:
            raise ValueError(
                f"residual_group={self.residual_group} without residual_bits; give the bits, or leave it out"
            )

    @property
    def asked(self) -> bool:
        """Whether anything is corrected."""
        return bool(self.outliers or self.rank or self.residual_bits)

    def over(
        self, plan: Plan, layer: int, artifact: Artifact | None, form: "Form | None" = None, asker: str = "corrections"
    ) -> Plan:
        """`plan` of layer number `layer` with every codec corrected; `asker` needs what is missing in an artifact."""
        if isinstance(plan, PlacedPlan):  # what the host holds is exact
            return replace(plan, low=self.over(plan.low, layer, artifact, form, asker))
        check_statistics(self.statistics, artifact, asker)
        form = form or Form(across_heads=isinstance(plan, TieredPlan) and plan.saliency is None and _chunks(plan))
        bound = _Bound(self, form, layer, artifact if self.statistics == "calibrated" else None, asker)
        if isinstance(plan, LayerPlan):
            keys, values = (
                replace(stream, codec=bound.codec(role, stream.codec, stream.transform, self.rank, segments=False))
                for role, stream in (("keys", plan.keys), ("values", plan.values))
            )
            return replace(plan, keys=keys, values=values)
        assert isinstance(plan, TieredPlan)
        if plan.before_rope and self.statistics == "calibrated":
            raise ValueError(
                "corrections with statistics='calibrated' were measured on keys after RoPE, and this method encodes them "
                "before it; use statistics='prompt'"
            )
        if self.statistics == "calibrated" and any(isinstance(t.keys.transform, Basis) for t in plan.tiers):
            raise ValueError(
                "corrections with statistics='calibrated' were measured on channels, and this method encodes components of a "
                "basis; use statistics='prompt'"
            )
        if isinstance(plan.tiering, Shares) and not plan.before_rope:
            return _apart(plan, plan.tiering, bound, (self.rank, self._decode_rank))
        return replace(plan, tiers=tuple(bound.tier(tier, self.rank, segments=False) for tier in plan.tiers))

    @property
    def _decode_rank(self) -> float | int:
        return self.rank if self.decode_rank is None else self.decode_rank


@dataclass(frozen=True)
class Form:
    """Which matrix is corrected. `whole`: a segment's tokens x (heads channels), zeros in place of outliers (the paper's);
    else keys by channel and values by token, over all heads' channels or a head's."""

    whole: bool = False
    across_heads: bool = True


@dataclass(frozen=True)
class _Bound:
    """Corrections for one layer."""

    options: Corrections
    form: Form
    layer: int
    artifact: Artifact | None
    asker: str

    def tier(self, tier: TierPlan, rank: float | int, segments: bool) -> TierPlan:
        """Both streams of a tier."""

        def corrected(role: str, stages: TierStages) -> TierStages:
            return replace(stages, codec=self.codec(role, stages.codec, stages.transform, rank, segments))

        return replace(tier, keys=corrected("keys", tier.keys), values=corrected("values", tier.values))

    def codec(self, role: str, codec: Codec, transform: Any, rank: float | int, segments: bool) -> Codec:
        """A stream's codec with what corrects it."""
        bits = self.options.residual_bits
        if isinstance(codec, Exact) or not (rank or self.options.outliers or bits):
            return codec
        outliers = self._outliers(role, transform, segments) if self.options.outliers else None
        residual = UniformQuant(bits, (1, self.options.residual_group), 0.5 if bits == 1 else 1.0) if bits else None
        return Corrected(codec, outliers, self._low_rank(role, codec, rank) if rank else None, residual)

    def _outliers(self, role: str, transform: Any, segments: bool) -> Outliers:
        ranked: Ranked = "tokens" if segments and role == "keys" else "channels"
        across = segments and self.form.across_heads and ranked == "channels"
        if self.form.whole:
            ranked, across = "matrix", True
        low, high = self._thresholds(role, ranked, across, transform)
        return Outliers(self.options.outliers, ranked, across, "zero" if self.form.whole else "mean", low, high)

    def _thresholds(
        self, role: str, ranked: Ranked, across: bool, transform: Any
    ) -> tuple[Tensor | None, Tensor | None]:
        """`[kv_heads or 1, 1, D or 1]` of what is encoded: thresholds are measured before the transform."""
        if self.artifact is None:
            return None, None
        kind = "layer" if across else "channel" if ranked == "tokens" else "head"
        names = [f"{role}.outliers.{kind}.{end}" for end in ("low", "high")]
        ends = [self.artifact.tensor(name, wanted_by=self.asker)[self.layer] for name in names]
        shares = self.artifact.tensor("outliers.shares", wanted_by=self.asker).tolist()
        chosen = [number for number, share in enumerate(shares) if abs(share - self.options.outliers) < 1e-6]
        if not chosen:
            known = ", ".join(f"{share:g}" for share in shares)
            raise ValueError(
                f"outliers={self.options.outliers:g} with statistics='calibrated': the artifact has thresholds for {known}; "
                "use one of these, or fit again"
            )
        shape = {"layer": (1, 1, 1), "head": (-1, 1, 1), "channel": (ends[0].shape[0], 1, -1)}[kind]
        low, high = (end[..., chosen[0]].reshape(shape) for end in ends)
        return self._transformed(low, transform), self._transformed(high, transform)

    @staticmethod
    def _transformed(threshold: Tensor, transform: Any) -> Tensor:
        if not hasattr(transform, "forward"):
            raise ValueError(
                "corrections with statistics='calibrated' have thresholds for tokens as the model makes them, and this method "
                "rescales channels by the prompt: give the method statistics='calibrated' as well"
            )
        applied: Transform = transform
        return applied.forward(threshold) if applied.tensors() else threshold

    def _low_rank(self, role: str, codec: Codec, rank: float | int) -> LowRank:
        if self.artifact is None:
            return LowRank(rank, self.form.whole)
        assert isinstance(codec, UniformQuant)
        name = f"{role}.residual.{group_name(codec, self.artifact.fingerprint['head_dim'])}.{codec.bits}"
        basis = self.artifact.tensor(name, wanted_by=self.asker)[self.layer]
        # As many vectors as are used, in the 16 bits that are computed with; all of them, for the message, if too few.
        return LowRank(rank, basis=basis[:, : max(1, rank)].half() if type(rank) is int else basis)


def group_name(codec: UniformQuant, head_dim: int) -> str:
    """A quantiser's group as the artifact writes it: "64x1", "1x*" (a whole head), "*x1"; "fixed" where nothing is measured."""
    if codec.group is None:
        return "fixed"
    tokens, channels = codec.group
    return f"{tokens or '*'}x{'*' if channels in (None, head_dim) else channels}"


def _chunks(plan: TieredPlan) -> bool:
    return isinstance(plan.tiering, Shares)


def _apart(plan: TieredPlan, tiering: Shares, bound: _Bound, ranks: tuple[float | int, float | int]) -> TieredPlan:
    """Tiers for the first chunk, a segment for each row, and others for the blocks, a page each."""
    first, rest = ([bound.tier(tier, rank, segments=True) for tier in plan.tiers] for rank in ranks)
    first = [replace(tier, segments="row") for tier in first]
    counts = tiering.counts(tiering.block)
    rest = [
        # A tier that gets no tokens of a block still needs a page size.
        replace(tier, segments="page", page_tokens=max(1, count))
        for tier, count in zip(rest, counts, strict=False)
    ]
    return replace(plan, tiers=(*first, *rest), tiering=replace(tiering, apart=len(plan.tiers)))


@dataclass(frozen=True)
class CorrectedMethod:
    """A method whose codecs are corrected."""

    method: Any
    corrections: Corrections

    def plan(self, layer: int, geometry: Geometry, artifact: Artifact | None) -> Plan:
        """The method's plan, corrected; ValueError where all it holds is exact or evicted."""
        plan = self.corrections.over(self.method.plan(layer, geometry, artifact), layer, artifact)
        if self.corrections.asked and not any(isinstance(codec, Corrected) for codec in _codecs(plan)):
            raise ValueError(
                "corrections: this method quantises nothing that could be corrected; leave them out, or quantise a tier"
            )
        return plan


def _codecs(plan: Plan) -> list[Codec]:
    if isinstance(plan, PlacedPlan):
        return _codecs(plan.low)
    if isinstance(plan, LayerPlan):
        return [plan.keys.codec, plan.values.codec]
    assert isinstance(plan, TieredPlan)
    return [stages.codec for tier in plan.tiers for _, stages in tier.streams()]
