"""Oracle eviction (MiKV, arXiv:2402.18096, section 2.3): each query keeps the tokens it attends to most. For evaluation only."""

from dataclasses import dataclass
from typing import ClassVar

from calib.runtime.artifact.artifact import Artifact
from calib.runtime.methods.contract import Geometry, Method, check_share
from calib.runtime.methods.paper_counting import CountedCache, kept_bits
from calib.runtime.stages.codec import Exact
from calib.runtime.stages.tiering import RatioTiers
from calib.runtime.stages.transform import Identity
from calib.runtime.tiered.plan import TieredPlan
from calib.runtime.tiered.tier_plan import TierPlan, TierStages


@dataclass(frozen=True)
class Oracle(Method):
    """The full cache, of which each query attends only to the tokens with the most attention: it saves no memory.

    1. Attention over a prompt is exact.
    2. In every later forward each query head keeps the `ratio` of the tokens it sees that get the most attention, and the
       probabilities of those are normalised again.

    Args:
        ratio: share of the tokens that a query keeps, at least one, in (0, 1].
    """

    name: ClassVar[str] = "oracle"

    ratio: float = 0.2

    def __post_init__(self) -> None:
        check_share("ratio", self.ratio)

    def plan(self, layer: int, geometry: Geometry, artifact: Artifact | None) -> TieredPlan:
        """One exact tier that holds everything."""
        stages = TierStages(Identity(), Exact())
        return TieredPlan((TierPlan(stages, stages),), RatioTiers((1.0,), 1), oracle_share=self.ratio)

    def paper_bits(self, cache: CountedCache) -> float:
        """Bits per value: the share of tokens that a query attends to, at 16 bits."""
        return kept_bits(self.ratio)
