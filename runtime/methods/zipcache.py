"""ZipCache (He et al., 2024, arXiv:2405.14256): salient tokens at more bits, saliency from normalised attention of probe rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean
from typing import Any, ClassVar, Literal, get_args

from calib.runtime.artifact.artifact import Artifact
from calib.runtime.messages.printable import printable
from calib.runtime.methods.calibration import Statistics, channel_range, channel_scale, check_statistics
from calib.runtime.methods.contract import Geometry, Method, check_bits, check_choice, check_clip, check_flag
from calib.runtime.methods.grid import Grid
from calib.runtime.methods.paper_counting import CountedCache, zipcache_ratio
from calib.runtime.methods.per_stream import PerStream, Streams, of_streams
from calib.runtime.stages.codec import Codec, Exact, ScaledChannels, UniformQuant
from calib.runtime.stages.contract import Transform
from calib.runtime.stages.saliency import Accumulated, Normalised, Probes
from calib.runtime.stages.selection import Saliency
from calib.runtime.stages.tiering import RatioTiers
from calib.runtime.stages.transform import Identity, Measured, MeasuredRange, MeasuredScale
from calib.runtime.stages.transform.measured import Over
from calib.runtime.tiered.plan import TieredPlan
from calib.runtime.tiered.tier_plan import TierPlan, TierStages

Rope = Literal["after", "before"]
SALIENCY: dict[str, Saliency] = {"normalised": Normalised(), "accumulated": Accumulated()}
# Widths of the salient tokens and of the others; `ratio` says how many are salient.
WIDTHS = ((16, 4), (8, 4), (8, 3), (6, 4), (6, 3), (5, 3), (5, 2), (4, 3), (4, 2), (4, 1), (3, 2), (3, 1), (2, 1))


@dataclass(frozen=True)
class ZipCache(Method):
    """Mixed precision by saliency, chosen once for the prompt and once for every 100 tokens after it.

    1. Attention over a prompt is exact; saliency is computed from probe rows alone (eq. 9): 10 % of them, half the newest,
       half drawn from the rest.
    2. Saliency of a token: its mean probability over the probe rows that see it (eq. 8), for each KV head.
    3. The `ratio` most salient tokens of the prompt are encoded at 4 bits, the rest at 2, keys and values alike.
    4. Keys: one range a channel over a tier's own tokens of the prompt (channelwise). Values: divided by the channel's
       sqrt(max |v|) over all tokens of the prompt (eq. 6), then one scale and zero point a token.
    5. New tokens stay exact; every `recompress` tokens the newest block is scored by its own probe steps (Algorithm 3) and
       encoded likewise, with ranges and channel scales of its own. Encoded tokens are never encoded again. A prompt shorter than a
       block stays exact until the first block is full, and is encoded with it.

    Args:
        tiers: (bits, share) of each tier, best first; bits are one number, or {keys: ..., values: ...}; 16 bits are exact, 0 bits
            (last only) are evicted. Shares sum to 1.
        ratio: share of the first of two tiers, used instead of the shares in `tiers`.
        recompress: tokens of a block.
        probes: "random+recent", "random", "recent", "all" or "special" (special and punctuation tokens).
        probe_share: share of rows that are probes.
        special_ids: token ids, for `probes="special"` alone; () takes those of `compress(..., tokenizer=tokenizer)`.
        saliency: "normalised" (eq. 8), or "accumulated" (eq. 7, what H2O and MiKV use) to compare with.
        salient_set: each KV head has its own ("head"), or all heads of a layer share one ("layer").
        scope: a value's scale and zero point are its head's ("head"), or one for all heads of the token ("layer", Algorithm 1; it
            needs `salient_set="layer"`).
        value_scale: channel scales of values over all tokens ("shared"), or over each tier's own (Algorithm 2, "tier").
        statistics: "prompt": ranges and channel scales are measured on the encoded tokens; or "calibrated": the artifact's, for all
            tokens (needs `keys.low/high` and `values.scale`).
        refresh: with `statistics="prompt"`, every block has ranges and channel scales of its own (Algorithm 3), which costs
            (32/n + 16/n) / 2 bits a value of a tier that gets n tokens of a block; False: those of the first chunk are used for all
            blocks, which costs no bits, and keys outside these ranges are clipped.
        rope: "after": keys are encoded after RoPE, as published; or "before": before it, so that a channel's range does not depend
            on positions. Attention then decodes keys tile by tile and rotates them, for which there is no kernel.
        clip: factor on measured ranges, in (0, 1].
    """

    name: ClassVar[str] = "zipcache"
    packs: ClassVar[tuple[type[Codec], ...]] = (UniformQuant, ScaledChannels)

    grid: ClassVar[Grid] = Grid(
        {"tiers": tuple(((high, 0.5), (low, 0.5)) for high, low in WIDTHS), "clip": (1.0, 0.8)},
        {"ratio": (0.1, 0.2, 0.4, 0.6, 0.8)},
    )

    tiers: Sequence[tuple[int | Streams[int], float]] = ((4, 0.6), (2, 0.4))
    ratio: float | None = None
    recompress: int = 100
    probes: str = "random+recent"
    probe_share: float = 0.1
    special_ids: Sequence[int] = ()
    saliency: str = "normalised"
    salient_set: str = "head"
    scope: str = "head"
    value_scale: str = "shared"
    statistics: Statistics = "prompt"
    refresh: bool = True
    rope: Rope = "after"
    clip: float = 1.0

    def __post_init__(self) -> None:
        check_choice("saliency", self.saliency, SALIENCY)
        check_choice("salient_set", self.salient_set, ("head", "layer"))
        check_choice("scope", self.scope, ("head", "layer"))
        if self.scope == "layer" and self.salient_set != "layer":
            raise ValueError(
                "scope='layer' gives the heads of a token one scale, and with salient_set='head' they keep different tokens; use "
                "salient_set='layer'"
            )
        check_flag("refresh", self.refresh)
        check_choice("rope", self.rope, get_args(Rope))
        if self.rope == "before" and self.statistics == "calibrated":
            raise ValueError(
                "rope='before' with statistics='calibrated': the artifact's ranges are of keys after RoPE; leave one out"
            )
        check_choice("value_scale", self.value_scale, ("shared", "tier"))
        check_clip(self.clip)
        self._bits_and_shares()
        self._tiering()
        self._probes()

    def plan(self, layer: int, geometry: Geometry, artifact: Artifact | None) -> TieredPlan:
        """The tiers of one layer, and how tokens are scored for them."""
        check_statistics(self.statistics, artifact, "zipcache")
        widths, shares = self._bits_and_shares()
        stored = [width for width in widths if any(width)]
        tiers = tuple(self._first(width, layer, artifact) for width in stored)
        plan = TieredPlan(tiers, self._tiering(), before_rope=self.rope == "before")
        if len(shares) > 1:  # else there is nothing to choose
            shared = self.salient_set == "layer"
            plan = replace(plan, saliency=SALIENCY[self.saliency], probes=self._probes(), shared_across_heads=shared)
        measures = self.statistics != "calibrated" and any(bits < 16 for width in stored for bits in width)
        return plan.with_blocks([self._block(width) for width in stored]) if measures and self.refresh else plan

    def _bits_and_shares(self) -> tuple[list[PerStream[int]], list[float]]:
        pairs = list(self.tiers) if isinstance(self.tiers, Sequence) else []
        if not pairs or any(not isinstance(pair, Sequence) or len(pair) != 2 for pair in pairs):
            raise ValueError(f"tiers must be pairs (bits, share), best first, got {printable(self.tiers)}")

        def check(name: str, bits: Any) -> None:
            check_bits(name, bits, exact=True, evicted=len(pairs) > 1)

        widths, shares = [of_streams("tiers", pair[0], check) for pair in pairs], [pair[1] for pair in pairs]
        said = [pair[0] for pair in pairs]
        if any(0 in width for width in widths[:-1]) or (0 in widths[-1] and any(widths[-1])):
            raise ValueError(f"tiers: only the last may be evicted (0 bits, keys and values), got {said}; put it last")
        for one, other in pairwise(widths):
            if one == other or any(before < after for before, after in zip(one, other, strict=True)):
                raise ValueError(
                    f"each of tiers must have fewer bits than the one before, got {said}; put the most precise first"
                )
        if self.ratio is not None:
            if type(self.ratio) not in (float, int) or not 0 <= self.ratio <= 1:
                raise ValueError(f"ratio must be a number from 0 to 1, got {printable(self.ratio)}")
            if len(pairs) != 2:
                raise ValueError(f"ratio={self.ratio} divides two tiers, got {len(pairs)}; write the shares into tiers")
            shares = [self.ratio, 1 - self.ratio]
        return widths, shares

    def _probes(self) -> Probes:
        ids = self.special_ids  # a list becomes a hashable tuple; Probes refuses other types
        return Probes(self.probes, self.probe_share, tuple(ids) if isinstance(ids, list) else ids)  # type: ignore[arg-type]

    def _tiering(self) -> RatioTiers:
        return RatioTiers(tuple(self._bits_and_shares()[1]), self.recompress)

    def _first(self, bits: PerStream[int], layer: int, artifact: Artifact | None) -> TierPlan:
        """A tier whose tokens share ranges and channel scales: measured on a row's first chunk, or the artifact's."""
        ranges: Transform | Measured = MeasuredRange()
        scale: Transform | Measured = MeasuredScale(self._over, frozen=not self.refresh)
        if self.statistics == "calibrated" and artifact is not None:
            ranges, scale = (
                channel_range(artifact, "keys", layer, "zipcache"),
                channel_scale(artifact, layer, "zipcache"),
            )
        keys = stages(bits.keys, ranges, lambda width: UniformQuant(width, None, self.clip))
        return TierPlan(keys, stages(bits.values, scale, self._values))

    def _block(self, bits: PerStream[int]) -> TierPlan:
        """A tier of later blocks, each with ranges and channel scales of its own, stored with its codes."""
        keys = stages(bits.keys, Identity(), lambda width: UniformQuant(width, (None, 1), self.clip))
        values = stages(bits.values, Identity(), lambda width: ScaledChannels(self._values(width), self._over))
        return TierPlan(keys, values)

    def _values(self, bits: int) -> UniformQuant:
        return UniformQuant(bits, (1, None), self.clip, across_heads=self.scope == "layer")

    @property
    def _over(self) -> Over:
        return "chunk" if self.value_scale == "shared" else "tier"

    def paper_bits(self, cache: CountedCache) -> float | None:
        """Bits per value by the paper's formula, mean of keys and values; None unless every tier has 1 to 8 bits."""
        widths, shares = self._bits_and_shares()
        if not all(1 <= bits <= 8 for width in widths for bits in width):
            return None
        tiers = [(fmean(width), share) for width, share in zip(widths, shares, strict=True)]
        return 16 / zipcache_ratio(tiers, cache.width, round(cache.length))


def stages(bits: int, transform: Transform | Measured, codec: Callable[[int], Codec]) -> TierStages:
    """Returns the stages of one stream at `bits`: exact tokens at 16 bits, else `transform` and the codec `codec(bits)`."""
    return TierStages(Identity(), Exact()) if bits == 16 else TierStages(transform, codec(bits))
