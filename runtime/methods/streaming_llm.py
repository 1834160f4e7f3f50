"""StreamingLLM (Xiao et al., 2023, arXiv:2309.17453): the first tokens are attention sinks; keep them and a window."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from calib.runtime.artifact.artifact import Artifact
from calib.runtime.methods.contract import Geometry, Method, check_choice
from calib.runtime.methods.paper_counting import CountedCache, kept_bits, share
from calib.runtime.stages.codec import Exact
from calib.runtime.stages.tiering import Sinks
from calib.runtime.stages.transform import Identity
from calib.runtime.tiered.plan import TieredPlan
from calib.runtime.tiered.tier_plan import TierPlan, TierStages


@dataclass(frozen=True)
class StreamingLLM(Method):
    """The first `sinks` tokens and the last `window`, exact; everything between is evicted after each forward.

    With `positions="cache"` a token's position is its position in the cache, as published: distances inside the window do not
    change, only those to the sinks do. Sinks are attended with a query that is rotated back by the number of evicted tokens.

    Args:
        sinks: tokens kept from the beginning.
        window: newest tokens kept.
        positions: "cache", or "original" for models whose RoPE cannot be rotated.
    """

    name: ClassVar[str] = "streaming_llm"

    sinks: int = 4
    window: int = 1020
    positions: Literal["cache", "original"] = "cache"

    def __post_init__(self) -> None:
        check_choice("positions", self.positions, ("cache", "original"))
        Sinks(self.sinks, self.window)

    def plan(self, layer: int, geometry: Geometry, artifact: Artifact | None) -> TieredPlan:
        """One tier for the sinks and one for the window."""
        stages = TierStages(Identity(), Exact())
        sinks = TierPlan(stages, stages, relocated=self.positions == "cache")
        return TieredPlan((sinks, TierPlan(stages, stages)), Sinks(self.sinks, self.window))

    def paper_bits(self, cache: CountedCache) -> float:
        """Bits per value: the share of tokens that is kept, at 16 bits."""
        return kept_bits(share(self.sinks + self.window, cache.length))
