"""The tokens with the most attention, found on a low-bit copy (SpeCache, arXiv:2503.16163)."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TopTokens:
    """The `k` most attended tokens of each KV head among those that are quantised.

    `speculative`: they are those of a guessed token, fetched one step ahead; else those of the step's own query, for which
    the step attends twice.
    """

    k: int = 64
    speculative: bool = True

    def __post_init__(self) -> None:
        if type(self.k) is not int or self.k < 0:
            raise ValueError(
                f"k must be a whole number of tokens, at least 0, got {self.k!r}; the paper has 64, 0 fetches nothing"
            )
        if type(self.speculative) is not bool:
            raise ValueError(f"speculative must be True or False, got {self.speculative!r}")
