"""The newest R tokens exact, every older one encoded as it falls out: KIVI's values; R = 0 keeps nothing exact."""

from dataclasses import dataclass

from calib.runtime.messages.whole_numbers import check_whole

LEAST, MOST = 32, 128  # tokens encoded at once


@dataclass(frozen=True)
class SlidingResidual:
    """Exactly the last `tokens` tokens stay exact."""

    tokens: int

    def __post_init__(self) -> None:
        check_whole("the residual", self.tokens, 0, "a whole number of tokens, at least 0")

    def packed(self, length: int) -> int:
        """All but the last `tokens`."""
        return max(0, length - self.tokens)

    def encoded(self, length: int) -> int:
        """Whole blocks, of as many tokens as the residual has room for: a token's codes are written while it is still read exactly.

        They take no room of their own (pages hold as many tokens), and a decode step rarely has to encode at all: with blocks of as
        many keys both are encoded in one step.
        """
        block = min(MOST, 1 << self.tokens.bit_length() >> 1)
        return self.packed(length) if block < LEAST else length - length % block

    def window(self) -> int:
        """`tokens`."""
        return self.tokens

    def slots(self, length: int) -> int:
        """All, once the row is that long."""
        return min(length, self.tokens)
