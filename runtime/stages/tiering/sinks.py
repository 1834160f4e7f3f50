"""The first tokens and a window of the newest: StreamingLLM (arXiv:2309.17453)."""

from dataclasses import dataclass

from calib.runtime.messages.whole_numbers import check_whole
from calib.runtime.stages.selection import NO_END, NextTokens, Tiering


@dataclass(frozen=True)
class Sinks(Tiering):
    """The first `sinks` tokens in one tier, the last `window` in another; all other tokens are dropped."""

    sinks: int
    window: int

    def __post_init__(self) -> None:
        check_whole("sinks", self.sinks, 0, "a whole number of tokens, at least 0", "; 4 is usual")
        check_whole("window", self.window, 1, "a whole number of tokens, at least 1")

    def held(self, length: int, prompt: int) -> list[int]:
        """Numbers of sinks and of window tokens once a row holds `length`."""
        sinks = min(length, self.sinks)
        return [sinks, min(length - sinks, self.window)]

    def next_tokens(self, length: int, prompt: int) -> NextTokens:
        """First sinks, then the window until it is full; then each new token replaces the oldest of the window."""
        ends = self.sinks, self.sinks + self.window
        tier = sum(length >= end for end in ends)
        return NextTokens(tier, ends[tier] - length if tier < len(ends) else NO_END)

    def evicts(self, stored: int) -> bool:
        """True."""
        return True

    def rewritten(self, tier: int) -> bool:
        """True for the window, which is a ring."""
        return tier == 1

    def exact(self, length: int, prompt: int) -> int:
        """0: every token is in a tier."""
        return 0
