"""Corrections over the plan of any method: outliers and low rank (GEAR), and a second quantiser, around its codecs."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import Tensor

from calib.runtime.artifact.artifact import Artifact
from calib.runtime.messages.printable import printable
from calib.runtime.messages.whole_numbers import check_whole
from calib.runtime.methods.calibration import Statistics, check_statistics
from calib.runtime.methods.contract import Geometry, Method
from calib.runtime.methods.per_stream import STREAMS, Streams, is_per_stream, of_streams
from calib.runtime.stages.codec import Codec, Corrected, UniformQuant
from calib.runtime.stages.contract import Transform
from calib.runtime.stages.correction import LowRank, Outliers
from calib.runtime.stages.correction.outliers import LowRankTerm
from calib.runtime.store import Plan
from calib.runtime.tiered.tier_plan import Segments


@dataclass(frozen=True)
class Corrections:
    """Corrections that are stored besides the codes (GEAR, arXiv:2403.05527): any method's option `corrections: {...}`.

    Methods that encode chunks (gear, zipcache, kvarn) correct each chunk as a segment: outliers of keys for each channel over
    its tokens, of values for each token, factors of the chunk's own residual. Methods that encode one token at a time
    (mikv, kivi, rtn, csr, oscar, ...) have outliers for each token and, with `statistics="calibrated"`, low rank. 16-bit tiers are
    left alone.

    Each option but `statistics` is one setting for both streams, or {keys: ..., values: ...}: errors of keys matter more (GEAR,
    appendix D.1).

    Args:
        outliers: share s of entries that are exact, half of them at each end; 0 is none.
        rank: rank of the residual's factors; a float is a share of min(tokens, channels); 0 is none.
        decode_rank: rank of every chunk after the first; None is `rank`.
        residual_bits: the residual of codec and low rank is quantised once more with this many bits, 1 ... 8, with a scale and a
            zero point for each token and head; 0 stores none. At 1 bit the two levels are the middles of the range's halves
            (clip 0.5), because its ends would enlarge the residual.
        residual_group: channels that share this scale and zero point; None is all of a head.
        statistics: "prompt": outliers and factors are found in the tokens that are encoded; "calibrated": outlier thresholds and
            bases of the low-rank part are the artifact's.
    """

    outliers: float | Streams[float] = 0.0
    rank: float | int | Streams[float | int] = 0
    decode_rank: float | int | Streams[float | int | None] | None = None
    residual_bits: int | Streams[int] = 0
    residual_group: int | Streams[int | None] | None = None
    statistics: Statistics = "prompt"

    def __post_init__(self) -> None:
        of_streams("outliers", self.outliers, _check_outliers)
        of_streams("rank", self.rank, _check_rank)
        of_streams("decode_rank", self.decode_rank, check_rank_or_none)
        bits = of_streams("residual_bits", self.residual_bits, _check_residual_bits)
        groups = of_streams("residual_group", self.residual_group, _check_residual_group)
        # One group for both is used if either has bits; one of a stream wants that stream's.
        used = bits if is_per_stream(self.residual_group) else bits.map(lambda _: bits.keys or bits.values)
        if any(group is not None and not own for group, own in zip(groups, used, strict=True)):
            raise ValueError(
                f"residual_group={printable(self.residual_group)} without residual_bits; give the bits, or leave it out"
            )

    def of(self, role: str) -> "StreamCorrections":
        """Returns the corrections of `role`, "keys" or "values"."""
        rank = of_streams("rank", self.rank).of(role)
        later = of_streams("decode_rank", self.decode_rank).of(role)
        return StreamCorrections(
            of_streams("outliers", self.outliers).of(role),
            rank,
            rank if later is None else later,
            of_streams("residual_bits", self.residual_bits).of(role),
            of_streams("residual_group", self.residual_group).of(role),
        )

    @property
    def asked(self) -> bool:
        """Whether anything is corrected."""
        return any(own.outliers or own.rank or own.residual_bits for own in map(self.of, STREAMS))

    def over(
        self, plan: Plan, layer: int, artifact: Artifact | None, form: "Form | None" = None, asker: str = "corrections"
    ) -> Plan:
        """Returns the `plan` of layer number `layer` with corrections around every codec that is not exact.

        `form` is GEAR's own choice of matrix, None for other methods; messages about missing tensors name `asker`. Raises
        ValueError for calibrated statistics without an artifact, or where they do not fit the method's keys.
        """
        check_statistics(self.statistics, artifact, asker)
        # Where tokens are encoded one by one there are no segments: each would be a single token. (GEAR, with a form, has blocks.)
        one_by_one = form is None and not (plan.by_forwards or plan.differs_in_prompt)
        form = form or Form(across_heads=not plan.observes)
        bound = _Bound(self, form, layer, artifact if self.statistics == "calibrated" else None, asker)
        if plan.before_rope and self.statistics == "calibrated":
            raise ValueError(
                "corrections with statistics='calibrated' were measured on keys after RoPE, and this method encodes them "
                "before it; use statistics='prompt' without rank"
            )

        def alone(role: str, transform: Any, codec: Codec) -> Codec:
            return bound.codec(role, codec, transform, self.of(role).rank, "none")

        def first(role: str, transform: Any, codec: Codec) -> Codec:
            return bound.codec(role, codec, transform, self.of(role).rank, "row")

        def later(role: str, transform: Any, codec: Codec) -> Codec:
            return bound.codec(role, codec, transform, self.of(role).decode_rank, "page")

        segmented = None if plan.before_rope or one_by_one else plan.in_segments(first, later)
        return plan.recoded(alone) if segmented is None else segmented


class StreamCorrections(NamedTuple):
    """The options of `Corrections` for one stream; `decode_rank` is never None."""

    outliers: float
    rank: float | int
    decode_rank: float | int
    residual_bits: int
    residual_group: int | None


def _check_outliers(name: str, share: Any) -> None:
    if type(share) not in (float, int) or not 0 <= share <= 1:
        raise ValueError(f"{name} must be a share from 0 to 1, got {printable(share)}; 0.02 is usual")


def _check_rank(name: str, rank: Any) -> None:
    if type(rank) is not float or not 0 <= rank <= 1:
        check_whole(name, rank, 0, "a whole number from 0, or a share (0.0 ... 1.0) of min(tokens, channels)")


def check_rank_or_none(name: str, rank: Any) -> None:
    """Raises ValueError unless `rank` is None, a whole number from 0 or a share (float in [0, 1])."""
    if rank is not None:
        _check_rank(name, rank)


def _check_residual_bits(name: str, bits: Any) -> None:
    if type(bits) is not int or not 0 <= bits <= 8:
        raise ValueError(f"{name} must be a whole number 0 ... 8, got {printable(bits)}")


def _check_residual_group(name: str, channels: Any) -> None:
    if channels is not None:
        check_whole(name, channels, 1, "a whole number of channels, at least 1, or nothing")


@dataclass(frozen=True)
class Form:
    """Which matrix is corrected. `whole`: a segment's tokens x (heads channels), outliers replaced by zeros (GEAR's paper); else
    keys by channel and values by token, over the channels of all heads (`across_heads`) or of one head."""

    whole: bool = False
    across_heads: bool = True


@dataclass(frozen=True)
class _Bound:
    """The corrections of one layer: options, form and, with calibrated statistics, the artifact."""

    options: Corrections
    form: Form
    layer: int
    artifact: Artifact | None
    asker: str

    def codec(self, role: str, codec: Codec, transform: Any, rank: float | int, segments: Segments) -> Codec:
        """Returns the codec of a stream with its corrections; `codec` itself if it is exact or nothing is corrected."""
        own = self.options.of(role)
        if self.artifact is not None and transform.measured is None and transform.key_bias is not None:
            raise ValueError(
                "corrections with statistics='calibrated' were measured on keys with their bias, and key_bias='folded' takes it "
                "off; use statistics='prompt' without rank"
            )
        if self.artifact is not None and transform.measured is None and transform.prologue() is None:
            raise ValueError(
                "corrections with statistics='calibrated' were measured on channels, and this method encodes components of a "
                "basis; use statistics='prompt', and no rank where tokens are encoded one by one"
            )
        if codec.exact or not (rank or own.outliers or own.residual_bits):
            return codec
        if rank and segments == "none" and transform.measured is None and transform.prologue() is None:
            raise ValueError(
                f"rank of {role} must be 0, got {printable(rank)}: this method encodes tokens one by one and in another basis; "
                "use rank=0, or a method that encodes segments (gear, zipcache)"
            )
        outliers = self._outliers(role, own.outliers, transform, segments) if own.outliers else None
        residual = None
        if own.residual_bits:
            clip = 0.5 if own.residual_bits == 1 else 1.0
            residual = UniformQuant(own.residual_bits, (1, own.residual_group), clip)
        return Corrected(codec, outliers, self._low_rank(role, codec, rank) if rank else None, residual)

    def _outliers(self, role: str, share: float, transform: Any, segments: Segments) -> Outliers:
        in_segments = segments != "none"
        ranked: LowRankTerm = "tokens" if in_segments and role == "keys" else "channels"
        across = in_segments and self.form.across_heads and ranked == "channels"
        if self.form.whole:
            ranked, across = "matrix", True
        low, high = self._thresholds(role, share, ranked, across, transform)
        fill: Literal["mean", "zero"] = "zero" if self.form.whole else "mean"
        return Outliers(share, ranked, across, fill, low, high, of_row=segments == "row")

    def _thresholds(
        self, role: str, share: float, ranked: LowRankTerm, across: bool, transform: Any
    ) -> tuple[Tensor | None, Tensor | None]:
        """Lower and upper threshold of outliers, `[kv_heads or 1, 1, D or 1]`, after the transform (the artifact has them before
        it); None for both without calibrated statistics."""
        if self.artifact is None:
            return None, None
        kind = "layer" if across else "channel" if ranked == "tokens" else "head"
        names = [f"{role}.outliers.{kind}.{end}" for end in ("low", "high")]
        ends = [self.artifact.tensor(name, wanted_by=self.asker)[self.layer] for name in names]
        shares = self.artifact.tensor("outliers.shares", wanted_by=self.asker).tolist()
        chosen = [number for number, fitted in enumerate(shares) if abs(fitted - share) < 1e-6]
        if not chosen:
            known = ", ".join(f"{fitted:g}" for fitted in shares)
            raise ValueError(
                f"outliers={share:g} with statistics='calibrated': the artifact has thresholds for {known}; "
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
        form = codec.residual_form(self.artifact.fingerprint["head_dim"])
        if form is None:
            raise ValueError(
                f"corrections with statistics='calibrated' have no bases for the errors of {type(codec).__name__}; use "
                "rank=0 or statistics='prompt'"
            )
        name = f"{role}.residual.{form}"
        basis = self.artifact.tensor(name, wanted_by=self.asker)[self.layer]
        # As many vectors as are used, in the 16 bits that are computed with; all of them, for the message, if too few.
        return LowRank(rank, basis=basis[:, : max(1, rank)].half() if type(rank) is int else basis)


@dataclass(frozen=True)
class CorrectedMethod(Method):
    """A method with corrections around its codecs."""

    method: Any
    corrections: Corrections

    @property
    def name(self) -> str:
        """The name of the method that is corrected."""
        return str(self.method.name)

    def plan(self, layer: int, geometry: Geometry, artifact: Artifact | None) -> Plan:
        """Returns the method's plan with corrections; raises ValueError if all its tokens are exact or evicted."""
        plan = self.corrections.over(self.method.plan(layer, geometry, artifact), layer, artifact)
        if self.corrections.asked and all(codec.corrections is None for codec in plan.codecs()):
            raise ValueError(
                "corrections: this method quantises nothing that could be corrected; leave them out, or quantise a tier"
            )
        return plan
