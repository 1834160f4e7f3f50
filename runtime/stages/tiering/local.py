"""The first tokens and a local window, both exact; what lies between leaves in whole blocks (InfLLM, arXiv:2402.04617)."""

from dataclasses import dataclass

from calib.runtime.messages.whole_numbers import check_whole
from calib.runtime.stages.selection import NextTokens, Tiering


@dataclass(frozen=True)
class InitialAndWindow(Tiering):
    """The first `initial` tokens in one tier. Of the others the newest `window`, and as many more as make no block yet."""

    initial: int
    window: int
    block: int

    slots_from = 0

    def __post_init__(self) -> None:
        for name, least in (("initial", 0), ("window", 1), ("block", 1)):
            value = getattr(self, name)
            check_whole(name, value, least, f"a whole number of tokens, at least {least}")

    def blocks(self, length: int) -> int:
        """Blocks that have left once a row holds `length` tokens."""
        return max(0, length - self.initial - self.window) // self.block

    def first(self, length: int) -> int:
        """The position of the first local token then."""
        return min(length, self.initial) + self.blocks(length) * self.block

    def held(self, length: int, prompt: int) -> list[int]:
        """Initial tokens then."""
        return [min(length, self.initial)]

    def next_tokens(self, length: int, prompt: int) -> NextTokens:
        """Initial ones first, then local ones until a block leaves."""
        if length < self.initial:
            return NextTokens(0, self.initial - length)
        behind = length - self.initial - self.window
        return NextTokens(None, self.block - 1 - (behind % self.block if behind > 0 else behind))

    def longest(self) -> int:
        """The most local tokens there ever are, and one more."""
        return self.window + self.block

    def evicts(self, stored: int) -> bool:
        """Always: what leaves the window is on the device no more."""
        return True

    def rewritten(self, tier: int) -> bool:
        """Never."""
        return False

    def exact(self, length: int, prompt: int) -> int:
        """Local tokens then."""
        return length - self.first(length)
