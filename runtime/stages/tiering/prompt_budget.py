"""A budget for the prompt alone; every token after it is kept (SnapKV, arXiv:2404.14469, section 4.1)."""

import math
from dataclasses import dataclass

from calib.runtime.stages.selection import NO_END, NextTokens, Tiering


@dataclass(frozen=True)
class PromptBudget(Tiering):
    """One tier: `budget` tokens of the prompt, its `recent` newest ones among them, and all later tokens.

    Args:
        budget: tokens, or a share (float) of the prompt's length, rounded up. At least `recent` tokens are kept, and a prompt
            that is shorter is kept whole.
        recent: newest tokens of the prompt that are kept.
    """

    budget: float | int
    recent: int

    fixed_by_prompt = True
    scores_in_order = True

    def kept(self, prompt: int) -> int:
        """Number of tokens that stay of a prompt of `prompt` tokens."""
        budget = self.budget if type(self.budget) is int else math.ceil(self.budget * prompt - 1e-9)
        return min(prompt, max(budget, self.recent))

    def held(self, length: int, prompt: int) -> list[int]:
        """Tokens in the tier once a row holds `length`."""
        return [min(length, self.kept(prompt)) + max(0, length - prompt)]

    def next_tokens(self, length: int, prompt: int) -> NextTokens:
        """All tokens after the prompt stay."""
        return NextTokens(0, NO_END if length >= prompt else 0)

    def evicts(self, stored: int) -> bool:
        """True: the prompt's other tokens are dropped."""
        return True

    def rewritten(self, tier: int) -> bool:
        """False: no token leaves after the prompt."""
        return False

    def exact(self, length: int, prompt: int) -> int:
        """0: every token is in the tier."""
        return 0
