"""H2O (Zhang et al., 2023, arXiv:2306.14048): keep heavy hitters and recent tokens, evict the rest."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from calib.runtime.artifact.artifact import Artifact
from calib.runtime.messages.printable import printable
from calib.runtime.methods.contract import Geometry, Method, check_amount
from calib.runtime.methods.grid import Grid
from calib.runtime.methods.importance import importance
from calib.runtime.methods.paper_counting import CountedCache, kept_bits, share
from calib.runtime.stages.codec import Exact
from calib.runtime.stages.saliency import Probes
from calib.runtime.stages.selection import Saliency
from calib.runtime.stages.tiering import HeavyHitterBudget
from calib.runtime.stages.transform import Identity
from calib.runtime.tiered.plan import TieredPlan
from calib.runtime.tiered.tier_plan import TierPlan, TierStages


@dataclass(frozen=True)
class H2O(Method):
    """Eviction by accumulated attention, after every forward, for each KV head.

    1. Attention over a prompt is exact; every query row adds to the accumulated attention of the tokens.
    2. Kept: the `recent` newest tokens and, of the others, the `heavy` ones with the most attention, both exact.
    3. The budget is fixed by the prompt's length; tokens beyond it are evicted for good.

    Args:
        heavy: tokens (a whole number), or a share of the prompt (a number in [0, 1]).
        recent: the same. One of the two may be 0: `heavy=0` is locality alone, `recent=0` frequency alone, where a new token may
            be evicted in the step that adds it.
        policy: "accumulated" (H2O), "normalised" (ZipCache, eq. 8: the mean over the rows that see a token), "local" (the newest
            tokens fill the budget, nothing is scored), or "fastgen" (each KV head has the cheapest policy that meets `recovery`).
        probes: rows of the prompt that are scored: "all", "random+recent", "random", "recent", "special"; None is all for
            "accumulated" and "random+recent" for the others. Every later query is scored.
        probe_share: share of rows that are probes.
        special_ids: token ids, for `probes="special"`, or for "fastgen" to keep.
        recovery: for "fastgen", share of the prompt's attention that the tokens kept by a head's policy must have got, in (0, 1].
    """

    name: ClassVar[str] = "h2o"

    grid: ClassVar[Grid] = Grid(
        shared={"heavy": (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5), "recent": (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5)}
    )

    heavy: float | int = 0.2
    recent: float | int = 0.2
    policy: str = "accumulated"
    probes: str | None = None
    probe_share: float = 0.1
    special_ids: Sequence[int] = ()
    recovery: float = 0.95

    def __post_init__(self) -> None:
        check_amount("heavy", self.heavy)
        check_amount("recent", self.recent)
        if not (self.heavy or self.recent):
            raise ValueError(
                f"heavy and recent must keep at least one token, got {printable(self.heavy)} and {printable(self.recent)}; "
                "0.2 of each is usual"
            )
        if type(self.heavy) is type(self.recent) is float and self.heavy + self.recent > 1:
            raise ValueError(
                f"heavy and recent must not exceed the prompt together, got {self.heavy} + {self.recent}; use at most 1 in all"
            )
        self._importance()

    def plan(self, layer: int, geometry: Geometry, artifact: Artifact | None) -> TieredPlan:
        """One exact tier; all other tokens are evicted."""
        stages = TierStages(Identity(), Exact())
        tiering = HeavyHitterBudget(self.heavy, self.recent, local=self.policy == "local")
        return TieredPlan((TierPlan(stages, stages),), tiering, *self._importance())

    def _importance(self) -> tuple[Saliency | None, Probes | None]:
        return importance(self.policy, self.probes, self.probe_share, self.special_ids, self.recovery)

    def paper_bits(self, cache: CountedCache) -> float:
        """Bits per value: the share of tokens that is kept, at 16 bits."""
        return kept_bits(sum(share(part, cache.length, cache.prompt) for part in (self.heavy, self.recent)))
