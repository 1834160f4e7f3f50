"""SnapKV (Li et al., 2024, arXiv:2404.14469): the prompt's last queries choose, once, which of its tokens stay."""

from dataclasses import dataclass
from typing import ClassVar

from calib.runtime.artifact.artifact import Artifact
from calib.runtime.messages.whole_numbers import check_whole
from calib.runtime.methods.contract import Geometry, Method, check_amount
from calib.runtime.stages.codec import Exact
from calib.runtime.stages.saliency import ObservationWindow
from calib.runtime.stages.tiering import PromptBudget
from calib.runtime.stages.transform import Identity
from calib.runtime.tiered.plan import TieredPlan
from calib.runtime.tiered.tier_plan import TierPlan, TierStages


@dataclass(frozen=True)
class SnapKV(Method):
    """The prompt is compressed once, by what its last queries attend to; tokens that are decoded afterwards all stay.

    1. Attention over a prompt is exact.
    2. The last `window` tokens of the prompt are the observation window, the tokens before them the prefix. A prefix token's votes
       are its attention probabilities in the window's queries, summed over them and over the query heads of a KV head
       (section 4.1). The softmax is over all tokens that a query sees.
    3. The votes are max pooled along the prefix: kernel `pool`, stride 1 (section 4.2).
    4. For each KV head the `budget` - `window` prefix tokens with the highest pooled votes stay, of equal ones the earlier, and the
       whole window, all exact. The other tokens of the prompt are evicted.
    5. Tokens that follow the prompt stay, exact. Nothing is evicted later.

    The prompt is a row's first forward. If a prompt is given in chunks, the first chunk is compressed as if it were the prompt, and
    all later chunks are kept whole, as is every later turn of a conversation: so give a prompt in one forward. A prompt no longer
    than the budget is kept whole.

    Args:
        budget: tokens kept of a prompt, the window among them: a whole number, at least `window`; or a share of the prompt (a
            number in (0, 1]); the window is kept even if the share is fewer tokens.
        window: tokens of the observation window, at least 1; the paper uses 16 to 64. More queries vote, fewer prefix tokens fit.
        pool: positions under the pooling's kernel, an odd number; the paper uses 5 to 13. A larger one keeps more of what
            surrounds an attended token; 1 pools nothing.
    """

    name: ClassVar[str] = "snapkv"

    budget: float | int = 0.2
    window: int = 32
    pool: int = 7

    def __post_init__(self) -> None:
        check_whole("window", self.window, 1, "a whole number of tokens, at least 1", "; 32 is usual")
        check_whole("pool", self.pool, 1, "an odd number of positions, at least 1", "; 7 is usual, 1 pools nothing")
        if self.pool % 2 == 0:
            raise ValueError(
                f"pool must be an odd number of positions, at least 1, got {self.pool}; use {self.pool + 1} or {self.pool - 1}"
            )
        check_amount("budget", self.budget, 1, "; 0.2 of the prompt is usual")
        if type(self.budget) is int and self.budget < self.window:
            raise ValueError(
                f"budget must be at least the window of {self.window} tokens, got {self.budget}; use more, or a smaller window"
            )

    def plan(self, layer: int, geometry: Geometry, artifact: Artifact | None) -> TieredPlan:
        """One exact tier; the prompt's other tokens are evicted."""
        stages = TierStages(Identity(), Exact())
        tiering = PromptBudget(self.budget, recent=self.window)
        return TieredPlan((TierPlan(stages, stages),), tiering, ObservationWindow(self.window, self.pool))
