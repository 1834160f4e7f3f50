"""The newest R tokens are exact, all older ones encoded: KIVI's values; R = 0 keeps nothing exact."""

from dataclasses import dataclass

from calib.runtime.messages.whole_numbers import check_whole

LEAST, MOST = 32, 128  # sizes of blocks that are encoded in one call


@dataclass(frozen=True)
class SlidingResidual:
    """The last `tokens` tokens are exact, after every forward."""

    tokens: int

    def __post_init__(self) -> None:
        check_whole("the residual", self.tokens, 0, "a whole number of tokens, at least 0")

    def packed(self, length: int) -> int:
        """All but the last `tokens`."""
        return max(0, length - self.tokens)

    def encoded(self, length: int) -> int:
        """Tokens are encoded in whole blocks, as large as the residual allows: codes are written while their tokens are still read
        exactly.

        These codes take no memory of their own (pages hold as many tokens), and most decode steps encode nothing; if blocks of keys
        have the same size, keys and values are encoded in the same step.
        """
        block = min(MOST, 1 << self.tokens.bit_length() >> 1)
        return self.packed(length) if block < LEAST else length - length % block

    def window(self) -> int:
        """`tokens`."""
        return self.tokens

    def slots(self, length: int) -> int:
        """All `tokens` slots, once the row is that long."""
        return min(length, self.tokens)
