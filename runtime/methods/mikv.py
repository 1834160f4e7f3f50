"""MiKV (Yang et al., 2024, arXiv:2402.18096): tokens that eviction would lose are retained at few bits."""

from dataclasses import dataclass
from statistics import fmean
from typing import ClassVar

from calib.runtime.artifact.artifact import Artifact
from calib.runtime.messages.printable import printable
from calib.runtime.messages.whole_numbers import check_whole
from calib.runtime.methods.calibration import Statistics, check_statistics
from calib.runtime.methods.contract import Geometry, Method, check_bits, check_clip, check_share
from calib.runtime.methods.grid import Grid
from calib.runtime.methods.paper_counting import CountedCache, mikv_size, share
from calib.runtime.methods.per_stream import Streams, of_streams
from calib.runtime.stages.codec import Codec, Exact, UniformQuant
from calib.runtime.stages.contract import Transform
from calib.runtime.stages.saliency import Accumulated
from calib.runtime.stages.tiering import HeavyHitterBudget
from calib.runtime.stages.transform import Balancer, Identity, Measured, MeasuredBalancer
from calib.runtime.tiered.plan import TieredPlan
from calib.runtime.tiered.tier_plan import TierPlan, TierStages


@dataclass(frozen=True)
class MiKV(Method):
    """H2O's important tokens at `important` bits, all others at `retained` bits.

    1. Attention over a prompt is exact, and every query row adds to the accumulated attention of the tokens.
    2. The budget is ceil(ratio x prompt), half of it the heaviest tokens, half the newest, fixed from then on.
    3. A new token is important; the one that falls out of the budget is demoted: decoded, encoded at `retained` bits.
    4. Both streams are quantised for each token in groups of half a head; keys times the balancer
       b = sqrt(max |q| / max |k|) of their channel, the query divided by it (eq. 2-4). It is measured on the prompt and
       frozen, or the artifact's with `statistics="calibrated"`. Exact important keys are attended with the unbalanced query.

    Args:
        ratio: important share of the prompt, in (0, 1].
        important: bits of the important tier: 16 (exact), 8, 4, 2; for both streams, or {keys: ..., values: ...}.
        retained: bits of the others: 4, 3, 2 (1 ... 8 work); for both streams, or each.
        balancer: whether keys are balanced.
        group: channels that share a scale and a zero point; None is half a head.
        budget: important tokens, in place of `ratio`.
        recent: how many of the budget are the newest ones; None is half, rounded up.
        statistics: "prompt", or "calibrated" (needs `keys.balancer`).
        clip: factor on measured ranges, in (0, 1].
    """

    name: ClassVar[str] = "mikv"
    packs: ClassVar[tuple[type[Codec], ...]] = (UniformQuant,)

    grid: ClassVar[Grid] = Grid(
        {"important": (16, 8, 6, 4, 3, 2), "retained": (1, 2, 3, 4, 5)},
        {"ratio": (0.05, 0.1, 0.2, 0.3, 0.5)},
    )

    ratio: float = 0.2
    important: int | Streams[int] = 16
    retained: int | Streams[int] = 2
    balancer: bool = True
    group: int | None = None
    budget: int | None = None
    recent: int | None = None
    statistics: Statistics = "prompt"
    clip: float = 1.0

    def __post_init__(self) -> None:
        check_share("ratio", self.ratio)
        important = of_streams("important", self.important, lambda name, bits: check_bits(name, bits, exact=True))
        retained = of_streams("retained", self.retained, check_bits)
        check_clip(self.clip)
        if type(self.balancer) is not bool:
            raise ValueError(f"balancer must be True or False, got {printable(self.balancer)}")
        if any(few > many for few, many in zip(retained, important, strict=True)):
            raise ValueError(
                f"retained={self.retained} bits must not be more than important={self.important}; demotion loses precision"
            )
        for name in ("group", "budget", "recent"):
            size = getattr(self, name)
            if size is not None:
                check_whole(name, size, 1, "a whole number, at least 1, or None")
        if self.budget is not None and self.recent is not None and self.recent > self.budget:
            raise ValueError(
                f"a budget of {self.budget} tokens is below its window of {self.recent} recent ones; raise budget or lower recent"
            )

    def plan(self, layer: int, geometry: Geometry, artifact: Artifact | None) -> TieredPlan:
        """Both tiers of one layer."""
        check_statistics(self.statistics, artifact, "mikv")
        group = self.group or max(1, geometry.head_dim // 2)
        transform: Transform | Measured = Identity()
        if self.balancer and self.statistics == "calibrated" and artifact is not None:
            transform = Balancer(artifact.tensor("keys.balancer", wanted_by="mikv")[layer][:, None])
        elif self.balancer:
            transform = MeasuredBalancer()

        def stages(bits: int, balanced: Transform | Measured) -> TierStages:
            if bits == 16:
                return TierStages(Identity(), Exact())
            return TierStages(balanced, UniformQuant(bits, (1, group), self.clip))

        widths = (of_streams("important", self.important), of_streams("retained", self.retained))
        tiers = tuple(TierPlan(stages(bits.keys, transform), stages(bits.values, Identity())) for bits in widths)
        return TieredPlan(tiers, self._tiering(), Accumulated())

    def _tiering(self) -> HeavyHitterBudget:
        if self.budget is None:
            return HeavyHitterBudget(ratio=self.ratio, recent=self.recent)
        recent = self.recent or self.budget - self.budget // 2
        return HeavyHitterBudget(heavy=self.budget - recent, recent=recent)

    def paper_bits(self, cache: CountedCache) -> float:
        """The importance ratio is that of the prompt, or the budget's of all tokens; the mean of both streams."""
        kept = share(self.budget, cache.length) if self.budget else self.ratio * cache.prompt / cache.length
        group = self.group or cache.head_dim // 2
        widths = zip(of_streams("important", self.important), of_streams("retained", self.retained), strict=True)
        return 16 * fmean(mikv_size(min(1.0, kept), *both, group) for both in widths)
