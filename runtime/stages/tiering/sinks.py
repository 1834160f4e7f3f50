"""The first tokens and a window of the newest: StreamingLLM (arXiv:2309.17453)."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Sinks:
    """The first `sinks` tokens in one tier, the last `window` in another; what is in neither is dropped."""

    sinks: int
    window: int

    def __post_init__(self) -> None:
        if type(self.sinks) is not int or self.sinks < 0:
            raise ValueError(f"sinks must be a whole number of tokens, at least 0, got {self.sinks!r}; 4 is usual")
        if type(self.window) is not int or self.window < 1:
            raise ValueError(f"window must be a whole number of tokens, at least 1, got {self.window!r}")

    def held(self, length: int, prompt: int) -> list[int]:
        """Sinks and window tokens once a row holds `length`."""
        sinks = min(length, self.sinks)
        return [sinks, min(length - sinks, self.window)]

    def rewritten(self, tier: int) -> bool:
        """The window is a ring."""
        return tier == 1

    def exact(self, length: int, prompt: int) -> int:
        """None: both tiers are pages."""
        return 0
