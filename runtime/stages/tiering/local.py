"""The first tokens and a local window, both exact; tokens between them leave in whole blocks (InfLLM, arXiv:2402.04617)."""

from dataclasses import dataclass

from calib.runtime.messages.whole_numbers import check_whole
from calib.runtime.stages.selection import NextTokens, Tiering


@dataclass(frozen=True)
class InitialAndWindow(Tiering):
    """One tier of the first `initial` tokens. Of the others the newest `window` are in the exact window, and up to `block` - 1
    more, until these are a block, which leaves."""

    initial: int
    window: int
    block: int

    slots_from = 0

    def __post_init__(self) -> None:
        for name, least in (("initial", 0), ("window", 1), ("block", 1)):
            value = getattr(self, name)
            check_whole(name, value, least, f"a whole number of tokens, at least {least}")

    def blocks(self, length: int) -> int:
        """Number of blocks that have left once a row holds `length` tokens."""
        return max(0, length - self.initial - self.window) // self.block

    def first(self, length: int) -> int:
        """The position of the first local token once a row holds `length` tokens."""
        return min(length, self.initial) + self.blocks(length) * self.block

    def held(self, length: int, prompt: int) -> list[int]:
        """The number of initial tokens, in the only tier."""
        return [min(length, self.initial)]

    def next_tokens(self, length: int, prompt: int) -> NextTokens:
        """First initial tokens, then local ones until a block leaves."""
        if length < self.initial:
            return NextTokens(0, self.initial - length)
        behind = length - self.initial - self.window
        return NextTokens(None, self.block - 1 - (behind % self.block if behind > 0 else behind))

    def longest(self) -> int:
        """The largest number of local tokens, plus one."""
        return self.window + self.block

    def evicts(self, stored: int) -> bool:
        """True: tokens that leave the window are no longer on the device."""
        return True

    def rewritten(self, tier: int) -> bool:
        """False."""
        return False

    def exact(self, length: int, prompt: int) -> int:
        """Number of local tokens."""
        return length - self.first(length)
