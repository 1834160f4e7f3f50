"""The tokens with the most attention, found on a low-bit copy (SpeCache, arXiv:2503.16163)."""

from dataclasses import dataclass

from calib.runtime.messages.printable import printable
from calib.runtime.messages.whole_numbers import check_whole


@dataclass(frozen=True)
class TopTokens:
    """The `k` most attended tokens of each KV head among those that are quantised.

    With `speculative` they are the tokens most attended by a guessed next token, fetched one step ahead; else by the step's own
    query, and the step attends twice.
    """

    k: int = 64
    speculative: bool = True

    chunk = None

    def __post_init__(self) -> None:
        wanted = "a whole number of tokens, at least 0"
        check_whole("k", self.k, 0, wanted, "; the paper has 64, 0 fetches nothing")
        if type(self.speculative) is not bool:
            raise ValueError(f"speculative must be True or False, got {printable(self.speculative)}")

    @property
    def speculates(self) -> bool:
        """Whether a decode step includes a speculative token."""
        return self.speculative and self.k > 0

    @property
    def entries(self) -> int:
        """The most tokens of a KV head that are fetched at once."""
        return self.k
