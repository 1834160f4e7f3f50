"""The first tokens and a local window, both exact; what lies between leaves in whole blocks (InfLLM, arXiv:2402.04617)."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Local:
    """The first `initial` tokens in one tier. Of the others the newest `window`, and as many more as make no block yet."""

    initial: int
    window: int
    block: int

    def __post_init__(self) -> None:
        for name, least in (("initial", 0), ("window", 1), ("block", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"{name} must be a whole number of tokens, at least {least}, got {value!r}")

    def blocks(self, length: int) -> int:
        """Blocks that have left once a row holds `length` tokens."""
        return max(0, length - self.initial - self.window) // self.block

    def first(self, length: int) -> int:
        """The place of the first local token then."""
        return min(length, self.initial) + self.blocks(length) * self.block

    def held(self, length: int, prompt: int) -> list[int]:
        """Initial tokens then."""
        return [min(length, self.initial)]

    def longest(self) -> int:
        """The most local tokens there ever are, and one more."""
        return self.window + self.block

    def rewritten(self, tier: int) -> bool:
        """Never."""
        return False

    def exact(self, length: int, prompt: int) -> int:
        """Local tokens then."""
        return length - self.first(length)
