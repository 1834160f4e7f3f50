"""A budget of important tokens, the most attended and the newest: H2O (arXiv:2306.14048), MiKV (arXiv:2402.18096)."""

import math
from dataclasses import dataclass
from functools import lru_cache

from calib.runtime.stages.saliency.probes import share_of
from calib.runtime.stages.selection import NO_END, NextTokens, Tiering


@dataclass(frozen=True)
class HeavyHitterBudget(Tiering):
    """The newest tokens and the heaviest of the others are important; a token that leaves the budget moves to the next tier.

    Args:
        heavy, recent: tokens, or a share (float) of the prompt's length; the budget is their sum.
        ratio: instead of both, a budget of ceil(ratio x prompt), half of it heavy.
        local: the newest tokens fill the whole budget, also the part for heavy ones.

    The budget is fixed by the prompt: `sizes(prompt)`.
    """

    heavy: float | int | None = None
    recent: float | int | None = None
    ratio: float | None = None
    local: bool = False

    fixed_by_prompt = True
    by_forwards = True

    @property
    def has_ring(self) -> bool:
        """Whether some tokens are kept because they are the newest."""
        return self.local or self.recent is None or self.recent > 0

    def sizes(self, prompt: int) -> tuple[int, int]:
        """(heavy, recent) tokens of a row with that prompt; together at least one."""
        return _sizes(self.heavy, self.recent, self.ratio, self.local, prompt)

    def held(self, length: int, prompt: int) -> list[int]:
        """Numbers of tokens in the important tier and in the next one, once a row holds `length`."""
        important = min(length, sum(self.sizes(prompt)))
        return [important, length - important]

    def next_tokens(self, length: int, prompt: int) -> NextTokens:
        """Tokens add to the important tier until the budget is full; then each new one moves another one to the next tier."""
        left = sum(self.sizes(prompt)) - length
        return NextTokens(0, left) if left > 0 else NextTokens(1, NO_END)

    def evicts(self, stored: int) -> bool:
        """Whether only the important tier is stored."""
        return stored < 2

    def rewritten(self, tier: int) -> bool:
        """True for the important tier."""
        return tier == 0

    def exact(self, length: int, prompt: int) -> int:
        """0: every token is in a tier."""
        return 0


@lru_cache(4096, typed=True)  # 1 is one token, 1.0 all tokens
def _sizes(
    heavy: float | int | None, recent: float | int | None, ratio: float | None, local: bool, prompt: int
) -> tuple[int, int]:
    """`HeavyHitterBudget.sizes`, cached because a step needs it for every row."""
    if ratio is not None:
        budget = max(1, math.ceil(ratio * prompt - 1e-9))
        newest = budget - budget // 2 if recent is None else _tokens(recent, prompt)
        sizes = max(0, budget - newest), min(budget, newest)
    else:
        assert heavy is not None and recent is not None
        sizes = _tokens(heavy, prompt), _tokens(recent, prompt)
    return (0, sum(sizes)) if local else sizes


def _tokens(amount: float | int, prompt: int) -> int:
    return amount if type(amount) is int else share_of(amount, prompt)
