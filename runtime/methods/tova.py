"""TOVA (Oren et al., 2024, arXiv:2401.06104): a fixed number of tokens, chosen by what the last query attends to."""

from dataclasses import dataclass
from typing import ClassVar

from calib.runtime.artifact.artifact import Artifact
from calib.runtime.methods.contract import Geometry, Method, check_amount
from calib.runtime.methods.grid import Grid
from calib.runtime.stages.codec import Exact
from calib.runtime.stages.saliency import LastQuery
from calib.runtime.stages.tiering import HeavyHitterBudget
from calib.runtime.stages.transform import Identity
from calib.runtime.tiered.plan import TieredPlan
from calib.runtime.tiered.tier_plan import TierPlan, TierStages


@dataclass(frozen=True)
class Tova(Method):
    """Token omission via attention: after each forward the tokens that the last query attends to least are evicted.

    1. Attention over a prompt is exact.
    2. A token's score is its attention weight in the last query of the forward, averaged over all heads of the layer
       (section 3.2); weights in earlier queries do not count.
    3. The `budget` tokens with the highest scores are kept, the same ones for all heads, exact; the others are evicted. In a decode
       step that is one token.

    The newest token always stays: by the paper's rule it could be evicted in the step that adds it.

    Args:
        budget: tokens (a whole number, at least 1), or a share of the prompt (a number in (0, 1]).
    """

    name: ClassVar[str] = "tova"
    grid: ClassVar[Grid] = Grid(shared={"budget": (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7)})

    budget: float | int = 0.2

    def __post_init__(self) -> None:
        check_amount("budget", self.budget, 1, "; 0.2 of the prompt is usual")

    def plan(self, layer: int, geometry: Geometry, artifact: Artifact | None) -> TieredPlan:
        """One exact tier, with one set of tokens for all heads; all other tokens are evicted."""
        stages = TierStages(Identity(), Exact())
        if type(self.budget) is int:
            tiering = HeavyHitterBudget(heavy=self.budget - 1, recent=1)
        else:
            tiering = HeavyHitterBudget(ratio=self.budget, recent=1)
        return TieredPlan((TierPlan(stages, stages),), tiering, LastQuery(), shared_across_heads=True)
