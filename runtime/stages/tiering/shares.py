"""Shares of a chunk by saliency: ZipCache's tiers (arXiv:2405.14256, Algorithms 2 and 3)."""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from calib.runtime.messages.whole_numbers import check_whole
from calib.runtime.stages.saliency.probes import share_of
from calib.runtime.stages.selection import NextTokens, Tiering

MOST_BLOCK = 2**16  # tokens encoded at once: which of them are probes is drawn for each, by the host


@dataclass(frozen=True)
class RatioTiers(Tiering):
    """A chunk's most salient tokens go to the first tier, and so on; the last tier takes the rest.

    The first chunk is the prompt; every later one is a block of `block` tokens, exact until it is complete. A prompt
    shorter than a block waits for the first block: the ranges measured on a chunk hold for all that follow. The first chunk's
    sinks stay in the exact window, before everything else.

    Args:
        shares: of each tier, best first; they sum to 1.
        block: tokens of a later chunk.
        separate_prompt_tiers: stored tiers of the first chunk where later chunks have as many of their own; 0: all share them.
        multiple_of: the first chunk is a multiple of so many tokens.
        window: newest tokens that are in no chunk yet, and exact; the first chunk is the prompt without them.
        sinks: a row's first tokens, which are in no tier and exact for ever; the first chunk has a block besides.
    """

    shares: tuple[float, ...]
    block: int
    separate_prompt_tiers: int = 0
    multiple_of: int = 1
    window: int = 0
    sinks: int = 0

    def __post_init__(self) -> None:
        if any(type(share) not in (float, int) or not 0 <= share <= 1 for share in self.shares):
            raise ValueError(f"shares of tiers must be numbers from 0 to 1, got {list(self.shares)}")
        if abs(math.fsum(self.shares) - 1) > 1e-6:
            raise ValueError(
                f"shares of tiers must add up to 1, got {list(self.shares)} = {math.fsum(self.shares):.6g}; "
                "give the last tier what the others leave"
            )
        check_whole("recompress", self.block, 1, "a whole number of tokens, at least 1", most=MOST_BLOCK)
        check_whole("sinks", self.sinks, 0, "a whole number of tokens, at least 0", "; 4 is usual")
        if self.sinks and self.separate_prompt_tiers:
            raise ValueError(f"sinks={self.sinks} where all tokens of a chunk are one segment; use sinks=0")

    def counts(self, tokens: int) -> list[int]:
        """How many of so many `tokens` of a chunk go to each tier."""
        return list(_counts(self.shares, tokens))

    def first(self, prompt: int) -> int:
        """Tokens of the first chunk, sinks among them."""
        left = max(0, prompt - self.window - self.sinks)
        return self.sinks + max(left - left % self.multiple_of, self.block)

    def complete(self, length: int, prompt: int) -> int:
        """Tokens of the complete chunks once a row holds `length`."""
        first, left = self.first(prompt), length - self.window
        return 0 if left < first else left - (left - first) % self.block

    def encoded(self, length: int, prompt: int) -> int:
        """Those of them that are in a tier: all but the sinks."""
        return max(0, self.complete(length, prompt) - self.sinks)

    def chunk_of(self, position: int, prompt: int) -> range:
        """The positions of the chunk that a position belongs to."""
        first = self.first(prompt)
        if position < first:
            return range(first)
        start = position - (position - first) % self.block
        return range(start, start + self.block)

    def held(self, length: int, prompt: int) -> list[int]:
        """Tokens in each tier once a row holds `length`."""
        encoded, first = self.encoded(length, prompt), self.first(prompt) - self.sinks
        if not encoded:
            return [0] * (2 * self.separate_prompt_tiers or len(self.shares))
        blocks = (encoded - first) // self.block
        of_first, of_block = self.counts(first), [blocks * count for count in _counts(self.shares, self.block)]
        if self.separate_prompt_tiers:
            return of_first[: self.separate_prompt_tiers] + of_block[: self.separate_prompt_tiers]
        return [one + more for one, more in zip(of_first, of_block, strict=True)]

    def next_tokens(self, length: int, prompt: int) -> NextTokens:
        """Exact until a chunk is complete."""
        behind = length - self.window - self.first(prompt)
        return NextTokens(None, (-behind if behind < 0 else self.block - behind % self.block) - 1)

    def longest(self) -> int:
        """The most tokens that ever stay exact, and one more."""
        return self.sinks + self.window + self.block

    def evicts(self, stored: int) -> bool:
        """Where there are more shares than tiers."""
        return len(self.shares) > stored

    def in_segments(self, stored: int) -> tuple["RatioTiers", list[int]]:
        """Blocks apart from the first chunk."""
        return replace(self, separate_prompt_tiers=stored), self.counts(self.block)

    @property
    def exact_sinks(self) -> int:
        """All of them."""
        return self.sinks

    @property
    def slots_from(self) -> int | None:
        """Behind the sinks. With `separate_prompt_tiers` blocks begin elsewhere in each row."""
        return self.sinks if len(self.shares) == 1 and not self.separate_prompt_tiers else None

    @property
    def multiple(self) -> int:
        """What the first chunk and blocks are multiples of, where one tier takes all."""
        return 1 if self.slots_from is None else math.gcd(self.block, self.multiple_of)

    @property
    def shortest_chunk(self) -> int:
        """Sinks and a block."""
        return self.first(0)

    @property
    def by_forwards(self) -> bool:
        """The prompt is one chunk, and what follows comes in blocks."""
        return self.block > 1

    def rewritten(self, tier: int) -> bool:
        """Never: tiers grow at their end."""
        return False

    def exact(self, length: int, prompt: int) -> int:
        """Tokens in the exact window: sinks and the newest."""
        return length - self.encoded(length, prompt)


@lru_cache(4096)
def _counts(shares: tuple[float, ...], tokens: int) -> tuple[int, ...]:
    counts, left = list[int](), tokens
    for share in shares[:-1]:
        counts.append(min(left, share_of(share, tokens)))
        left -= counts[-1]
    return *counts, left
