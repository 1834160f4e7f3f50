"""MiKV (Yang et al., 2024, arXiv:2402.18096): tokens that eviction would lose are retained at few bits."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import ClassVar, Literal

from calib.runtime.artifact.artifact import Artifact
from calib.runtime.messages.printable import printable
from calib.runtime.messages.whole_numbers import check_whole
from calib.runtime.methods.calibration import Statistics, channel_range, check_statistics
from calib.runtime.methods.contract import Geometry, Method, check_bits, check_choice, check_clip, check_share
from calib.runtime.methods.grid import Grid
from calib.runtime.methods.importance import importance
from calib.runtime.methods.paper_counting import CountedCache, mikv_size, share
from calib.runtime.methods.per_stream import Streams, of_streams
from calib.runtime.stages.codec import Codec, Exact, UniformQuant
from calib.runtime.stages.contract import Transform
from calib.runtime.stages.saliency import Probes
from calib.runtime.stages.selection import Saliency
from calib.runtime.stages.tiering import HeavyHitterBudget
from calib.runtime.stages.transform import Balancer, Identity, Measured, MeasuredBalancer
from calib.runtime.tiered.plan import TieredPlan
from calib.runtime.tiered.tier_plan import TierPlan, TierStages


@dataclass(frozen=True)
class MiKV(Method):
    """H2O's important tokens at `important` bits, all others at `retained` bits.

    1. Attention over a prompt is exact, and every query row adds to the accumulated attention of the tokens. Which tokens are
       important is a policy that the paper leaves open (section 2.1, figure 4): `policy`, H2O's by default.
    2. The budget is ceil(ratio x prompt), half of it the heaviest tokens, half the newest; it does not grow with later tokens.
    3. A new token is important; the token that leaves the budget for it is demoted: decoded, and encoded at `retained` bits.
    4. Both streams are quantised for each token in groups of half a head. Keys are multiplied by the balancer
       b = sqrt(max |q| / max |k|) of their channel, and the query is divided by it (eq. 2-4). It is measured on the prompt and then
       kept, or the artifact's with `statistics="calibrated"`. Exact important keys are attended with the unbalanced query.
    5. With `keys="channel"` (appendix C) keys are quantised by channel in the artifact's ranges, which are the same for all tokens:
       a single token can be demoted. They need no balancer: it would scale a channel and its range alike.

    Args:
        ratio: important share of the prompt, in (0, 1].
        important: bits of the important tier: 16 (exact), 8, 4, 2; for both streams, or {keys: ..., values: ...}.
        retained: bits of the others: 4, 3, 2 (1 ... 8 work); for both streams, or each.
        balancer: whether keys are balanced; keys by channel never are.
        group: channels that share a scale and a zero point; None is half a head.
        budget: number of important tokens, used instead of `ratio`.
        recent: how many of the budget are the newest ones; None is half, rounded up. With 0 a new token may be demoted in the
            step that adds it.
        statistics: "prompt", or "calibrated" (needs `keys.balancer`, or `keys.low/high`).
        clip: factor on ranges, in (0, 1].
        policy: "accumulated" (H2O), "normalised" (ZipCache, eq. 8: the mean over the rows that see a token), "local" (the newest
            tokens fill the budget, nothing is scored), or "fastgen" (each KV head has the cheapest policy that meets `recovery`).
        probes: rows of the prompt that are scored: "all", "random+recent", "random", "recent", "special"; None is all for
            "accumulated" and "random+recent" for the others. Every later query is scored.
        probe_share: share of rows that are probes.
        special_ids: token ids, for `probes="special"`, or for "fastgen" to keep.
        recovery: for "fastgen", share of the prompt's attention that the tokens kept by a head's policy must have got, in (0, 1].
        keys: groups of keys: "token", or "channel" (needs `statistics="calibrated"`).
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
    policy: str = "accumulated"
    probes: str | None = None
    probe_share: float = 0.1
    special_ids: Sequence[int] = ()
    recovery: float = 0.95
    keys: Literal["token", "channel"] = "token"

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
        for name, least in (("group", 1), ("budget", 1), ("recent", 0)):
            size = getattr(self, name)
            if size is not None:
                check_whole(name, size, least, f"a whole number, at least {least}, or None")
        if self.budget is not None and self.recent is not None and self.recent > self.budget:
            raise ValueError(
                f"a budget of {self.budget} tokens is below its window of {self.recent} recent ones; raise budget or lower recent"
            )
        self._importance()
        if self.policy == "local" and self.recent is not None:
            raise ValueError(
                f"recent={self.recent} with policy='local', where all of the budget is recent; leave it out"
            )
        check_choice("keys", self.keys, ("token", "channel"))
        if self.keys == "channel" and self.statistics != "calibrated":
            raise ValueError(
                f"keys='channel' needs the ranges of an artifact, got statistics={printable(self.statistics)}; use "
                "statistics='calibrated': ranges of the prompt would have to be measured anew for demoted tokens"
            )

    def plan(self, layer: int, geometry: Geometry, artifact: Artifact | None) -> TieredPlan:
        """The important and the retained tier of one layer."""
        check_statistics(self.statistics, artifact, "mikv")
        group = self.group or max(1, geometry.head_dim // 2)
        transform: Transform | Measured = Identity()
        if self.keys == "channel" and artifact is not None:
            transform = channel_range(artifact, "keys", layer, "mikv")
        elif self.balancer and self.statistics == "calibrated" and artifact is not None:
            transform = Balancer(artifact.tensor("keys.balancer", wanted_by="mikv")[layer][:, None])
        elif self.balancer:
            transform = MeasuredBalancer()

        def stages(bits: int, made: Transform | Measured, parts: tuple[int | None, int | None] | None) -> TierStages:
            return (
                TierStages(Identity(), Exact())
                if bits == 16
                else TierStages(made, UniformQuant(bits, parts, self.clip))
            )

        of_keys, of_values = None if self.keys == "channel" else (1, group), (1, group)
        widths = (of_streams("important", self.important), of_streams("retained", self.retained))
        tiers = [
            TierPlan(stages(bits.keys, transform, of_keys), stages(bits.values, Identity(), of_values))
            for bits in widths
        ]
        return TieredPlan(tuple(tiers), self._tiering(), *self._importance())

    def _tiering(self) -> HeavyHitterBudget:
        local = self.policy == "local"
        if self.budget is None:
            return HeavyHitterBudget(ratio=self.ratio, recent=self.recent, local=local)
        recent = self.budget - self.budget // 2 if self.recent is None else self.recent
        return HeavyHitterBudget(heavy=self.budget - recent, recent=recent, local=local)

    def _importance(self) -> tuple[Saliency | None, Probes | None]:
        return importance(self.policy, self.probes, self.probe_share, self.special_ids, self.recovery)

    def paper_bits(self, cache: CountedCache) -> float | None:
        """Bits per value by the paper's count, mean of keys and values.

        The importance ratio is `ratio` of the prompt's tokens, or `budget`, over all tokens. None for keys by channel: the paper
        counts groups of 64 tokens for them, and calibrated ranges have none.
        """
        if self.keys == "channel":
            return None
        kept = share(self.budget, cache.length) if self.budget else self.ratio * cache.prompt / cache.length
        group = self.group or cache.head_dim // 2
        widths = zip(of_streams("important", self.important), of_streams("retained", self.retained), strict=True)
        return 16 * fmean(mikv_size(min(1.0, kept), *both, group) for both in widths)
