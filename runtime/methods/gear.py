"""GEAR (Kang et al., 2024, arXiv:2403.05527): a quantised backbone, its residual as a low-rank matrix, its outliers exact."""

from dataclasses import dataclass
from statistics import fmean
from typing import Any, ClassVar, Literal

from calib.runtime.artifact.artifact import Artifact
from calib.runtime.messages.printable import printable
from calib.runtime.messages.whole_numbers import check_whole
from calib.runtime.methods.calibration import Statistics
from calib.runtime.methods.contract import Geometry, Method, check_bits, check_choice
from calib.runtime.methods.corrections import Corrections, Form, check_rank_or_none
from calib.runtime.methods.grid import Grid
from calib.runtime.methods.paper_counting import CountedCache, gear_ratio
from calib.runtime.methods.per_stream import STREAMS, PerStream, Streams, of_streams
from calib.runtime.stages.codec import Codec, UniformQuant
from calib.runtime.stages.tiering import RatioTiers
from calib.runtime.stages.tiering.shares import MOST_BLOCK
from calib.runtime.stages.transform import Identity
from calib.runtime.store import Plan
from calib.runtime.tiered.plan import TieredPlan
from calib.runtime.tiered.tier_plan import TierPlan, TierStages

Backbone = Literal["kcvt", "kivi", "channel", "uniform"]
BACKBONES = ("kcvt", "kivi", "channel", "uniform")
WIDTHS: dict[str, tuple[float, ...]] = {"bits": (1, 2, 3, 4, 5, 6, 8)}
RANKS: dict[str, tuple[float, ...]] = {"rank": (0, 2, 4, 8)}


@dataclass(frozen=True)
class Gear(Method):
    """x^ = D + L + S: quantised codes D, a low-rank part L of their residual, outliers S (eq. 3).

    1. Attention over a prompt is exact. Then the prompt is encoded as one segment, and every `block` tokens after it as
       another; earlier segments stay as they are. Tokens of an incomplete block are exact.
    2. Outliers (eq. 4): the s/2 largest and s/2 smallest entries of each row, stored in 16 bits and replaced by the mean before D
       is computed. "released": a row is a key channel over the segment's tokens, and a value token over all heads' channels (of
       one head with `per_head`). "paper": the segment's whole matrix is one row, and outliers are replaced by zeros.
    3. D (eq. 5): `backbone` at `bits`, with scales and zero points of each segment's own. Groups of "kcvt": a channel of keys, a
       token of values; of "kivi": `group` tokens of a key channel, `group` channels of a value token; of "channel": a channel;
       of "uniform": the segment.
    4. L (eq. 6): power iteration on x - D, set to 0 at the outliers; three rounds, twelve where a round is cheap. "released":
       on each head's matrix, tokens x channels; "paper": on the matrix of tokens x all heads' channels.
    5. S is x - D - L at the outliers. Attention adds (q B) A^T and the outliers to q D, and (p A) B^T to p D: neither keys
       nor values are formed.

    `bits`, `outliers`, `rank`, `decode_rank` and `group` are one setting for both streams, or {keys: ..., values: ...}: errors of
    keys matter more (appendix D.1).

    Args:
        variant: "released" (the authors' code) or "paper".
        backbone: None is "kcvt", with variant "paper" "uniform".
        bits: width of the backbone's codes; None is 4, with backbone "kivi" 2.
        outliers: s, 0 ... 1.
        rank: rank of a prompt's low-rank part; a float is a share of min(tokens, channels). None is 4, with variant "paper" and
            statistics "prompt" 0.02; 0 is none.
        decode_rank: rank of every later segment's low-rank part. None is min(`rank`, 2), or the same share if `rank` is a share.
        block: tokens of a later segment. None is 20, with backbone "kivi" 64.
        group: group size of backbone "kivi": tokens of a key channel, channels of a value token (a head's at most); that of keys
            divides `block` and 64.
        per_head: value tokens are quantised and their outliers found for each head alone.
        statistics: "prompt": outliers and L are found in the tokens that are encoded; "calibrated": outlier thresholds and bases of
            L are the artifact's.
    """

    name: ClassVar[str] = "gear"
    packs: ClassVar[tuple[type[Codec], ...]] = (UniformQuant,)
    own_corrections: ClassVar[bool] = True
    grid: ClassVar[Grid] = Grid(WIDTHS | RANKS | {"outliers": (0.0, 0.01, 0.02, 0.05)})

    variant: Literal["released", "paper"] = "released"
    backbone: Backbone | None = None
    bits: int | Streams[int | None] | None = None
    outliers: float | Streams[float] = 0.02
    rank: float | int | Streams[float | int | None] | None = None
    decode_rank: float | int | Streams[float | int | None] | None = None
    block: int | None = None
    group: int | Streams[int] = 64
    per_head: bool = False
    statistics: Statistics = "prompt"

    def __post_init__(self) -> None:
        check_choice("variant", self.variant, ("released", "paper"))
        check_choice("backbone", self._backbone, BACKBONES)
        self._bits()
        if type(self.per_head) is not bool:
            raise ValueError(f"per_head must be True or False, got {printable(self.per_head)}")
        self._group()
        self._corrections()
        self._tiering()

    def plan(self, layer: int, geometry: Geometry, artifact: Artifact | None) -> Plan:
        """A tier for the prompt and one for blocks."""
        keys, values = (TierStages(Identity(), self._codec(role, geometry)) for role in ("keys", "values"))
        plan = TieredPlan((TierPlan(keys, values),), self._tiering())
        form = Form(self.variant == "paper", not self.per_head)
        return self._corrections().over(plan, layer, artifact, form, self.name)

    def _codec(self, role: str, geometry: Geometry) -> UniformQuant:
        bits, group = self._bits().of(role), self._group().of(role)
        if self._backbone == "uniform":
            return UniformQuant(bits, (None, None), across_heads=True)
        if self._backbone == "channel" or (self._backbone == "kcvt" and role == "keys"):
            return UniformQuant(bits, (None, 1))
        if self._backbone == "kcvt":
            return UniformQuant(bits, (1, None), across_heads=not self.per_head)
        return UniformQuant(bits, (group, 1) if role == "keys" else (1, min(group, geometry.head_dim)))

    def _corrections(self) -> Corrections:
        usual = 0.02 if self.variant == "paper" and self.statistics == "prompt" else 4
        asked, asked_later = (
            of_streams(name, getattr(self, name), check_rank_or_none) for name in ("rank", "decode_rank")
        )
        rank = asked.map(lambda rank: usual if rank is None else rank)
        later = PerStream(*map(_later_rank, rank, asked_later))
        return Corrections(self.outliers, rank, later, statistics=self.statistics)

    def _tiering(self) -> RatioTiers:
        kivi = self._backbone == "kivi"
        block = self.block if self.block is not None else 64 if kivi else 20
        check_whole(
            "block", block, 1, "a whole number of tokens, at least 1", f"; {64 if kivi else 20} is usual", MOST_BLOCK
        )
        group = self._group().keys
        if kivi and block % group:
            raise ValueError(
                f"group={group} must divide block={block}: keys share parameters within a block; use 64 for it"
            )
        return RatioTiers((1.0,), block, multiple_of=group if kivi else 1)

    @property
    def _backbone(self) -> str:
        if self.backbone is not None:
            return self.backbone
        return "uniform" if self.variant == "paper" else "kcvt"

    def _bits(self) -> PerStream[int]:
        usual = 2 if self._backbone == "kivi" else 4

        def check(name: str, bits: Any) -> None:
            if bits is not None:
                check_bits(name, bits)

        return of_streams("bits", self.bits, check).map(lambda bits: usual if bits is None else bits)

    def _group(self) -> PerStream[int]:
        def check(name: str, size: Any) -> None:
            check_whole(name, size, 1, "a whole number of tokens or channels, at least 1")

        return of_streams("group", self.group, check)

    def paper_bits(self, cache: CountedCache) -> float | None:
        """Bits per value by the paper's formula, mean of keys and values, for variant "paper" and for the backbones "uniform" and
        "channel" without corrections; None otherwise, and where later segments have another rank than the prompt."""
        bits, kept = self._bits(), PerStream(*map(self._corrections().of, STREAMS))
        if self.statistics == "calibrated" and any(own.rank for own in kept):
            return None  # the artifact's bases are not stored with the cache, and coefficients are of each head
        if any(own.decode_rank != own.rank for own in kept):
            return None  # the paper compresses prompt and later tokens together: its formula has one rank
        if self.variant == "paper" and self.backbone in (None, "uniform"):
            ratios = (
                gear_ratio(width, own.outliers, own.rank, cache.width, cache.length)
                for width, own in zip(bits, kept, strict=True)
            )
            return fmean(16 / ratio for ratio in ratios)
        codes_alone = not any(own.outliers or own.rank for own in kept)
        return fmean(bits) if codes_alone and self.backbone in ("uniform", "channel") else None


def _later_rank(rank: float | int, asked: float | int | None) -> float | int:
    """The rank of later segments where the prompt's is `rank` and the option `decode_rank` is `asked`."""
    if asked is not None:
        return asked
    return min(rank, 2) if type(rank) is int else rank


@dataclass(frozen=True)
class GearL(Gear):
    """GEAR without outliers: codes and the low-rank part alone.

    Options as of `gear`.
    """

    name: ClassVar[str] = "gear_l"
    grid: ClassVar[Grid] = Grid(WIDTHS | RANKS)

    outliers: float | Streams[float] = 0.0


@dataclass(frozen=True)
class Uniform(Gear):
    """Uniform quantisation, the plainest baseline of GEAR's tables: one range for a segment's tokens and heads.

    Options as of `gear`.
    """

    name: ClassVar[str] = "uniform"
    grid: ClassVar[Grid] = Grid(WIDTHS)

    backbone: Backbone | None = "uniform"
    outliers: float | Streams[float] = 0.0
    rank: float | int | Streams[float | int | None] | None = 0


@dataclass(frozen=True)
class GroupWise(Gear):
    """Group-wise quantisation, a baseline of GEAR's tables: one range for each channel of a segment.

    Options as of `gear`.
    """

    name: ClassVar[str] = "group_wise"
    grid: ClassVar[Grid] = Grid(WIDTHS)

    backbone: Backbone | None = "channel"
    outliers: float | Streams[float] = 0.0
    rank: float | int | Streams[float | int | None] | None = 0


@dataclass(frozen=True)
class OutlierReduced(Gear):
    """Outlier-reduced quantisation, a baseline of GEAR's tables: uniform quantisation of all entries but the outliers.

    Options as of `gear`.
    """

    name: ClassVar[str] = "outlier_reduced"
    grid: ClassVar[Grid] = Grid(WIDTHS | {"outliers": (0.01, 0.02, 0.05, 0.1)})

    variant: Literal["released", "paper"] = "paper"
    outliers: float | Streams[float] = 0.05
    rank: float | int | Streams[float | int | None] | None = 0
