"""The newest R tokens exact, every older one encoded as it falls out: KIVI's values; R = 0 keeps nothing exact."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Residual:
    """Exactly the last `tokens` tokens stay exact."""

    tokens: int

    def __post_init__(self) -> None:
        if type(self.tokens) is not int or self.tokens < 0:
            raise ValueError(f"the residual must be a whole number of tokens, at least 0, got {self.tokens!r}")

    def packed(self, length: int) -> int:
        """All but the last `tokens`."""
        return max(0, length - self.tokens)

    def window(self) -> int:
        """`tokens`."""
        return self.tokens

    def slots(self, length: int) -> int:
        """All, once the row is that long."""
        return min(length, self.tokens)
