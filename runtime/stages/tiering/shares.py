"""Shares of a chunk by saliency: ZipCache's tiers (arXiv:2405.14256, Algorithms 2 and 3)."""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from calib.runtime.messages.whole_numbers import check_whole
from calib.runtime.stages.saliency.probes import share_of
from calib.runtime.stages.selection import NextTokens, Tiering

MOST_BLOCK = 2**16  # the largest block; the host draws for each of its tokens whether it is a probe


@dataclass(frozen=True)
class RatioTiers(Tiering):
    """A chunk's most salient tokens go to the first tier, and so on; the last tier takes the rest.

    The first chunk is the prompt; every later one is a block of `block` tokens, exact until it is complete. A prompt
    shorter than a block is encoded when the row has a block of tokens, because ranges may be measured on the first chunk for
    all later ones. Sinks stay in the exact window, before all other tokens.

    Args:
        shares: share of each tier, best first; they sum to 1.
        block: tokens of a later chunk.
        separate_prompt_tiers: number of stored tiers of the first chunk if later chunks have as many of their own; 0: all chunks
            share the tiers.
        multiple_of: the first chunk is a multiple of this number of tokens.
        window: newest tokens that are in no chunk yet, and exact; the first chunk is the prompt without them.
        sinks: a row's first tokens, which always stay exact and are in no tier; the first chunk has at least a block besides.
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
        """How many of the `tokens` tokens of a chunk go to each tier."""
        return list(_counts(self.shares, tokens))

    def first(self, prompt: int) -> int:
        """Number of tokens of the first chunk, sinks included."""
        left = max(0, prompt - self.window - self.sinks)
        return self.sinks + max(left - left % self.multiple_of, self.block)

    def complete(self, length: int, prompt: int) -> int:
        """Number of tokens in complete chunks once a row holds `length`, sinks included."""
        first, left = self.first(prompt), length - self.window
        return 0 if left < first else left - (left - first) % self.block

    def encoded(self, length: int, prompt: int) -> int:
        """Number of tokens in tiers: those in complete chunks without the sinks."""
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
        """New tokens are exact until a chunk is complete."""
        behind = length - self.window - self.first(prompt)
        return NextTokens(None, (-behind if behind < 0 else self.block - behind % self.block) - 1)

    def longest(self) -> int:
        """The largest number of exact tokens, plus one."""
        return self.sinks + self.window + self.block

    def evicts(self, stored: int) -> bool:
        """Whether there are more shares than stored tiers."""
        return len(self.shares) > stored

    def in_segments(self, stored: int) -> tuple["RatioTiers", list[int]]:
        """The same with tiers of their own for the blocks, and the number of a block's tokens in each."""
        return replace(self, separate_prompt_tiers=stored), self.counts(self.block)

    @property
    def exact_sinks(self) -> int:
        """The number of sinks."""
        return self.sinks

    @property
    def slots_from(self) -> int | None:
        """The position after the sinks, with one tier; None with several, or with `separate_prompt_tiers`, where blocks begin at
        other positions in each row."""
        return self.sinks if len(self.shares) == 1 and not self.separate_prompt_tiers else None

    @property
    def multiple(self) -> int:
        """The number of which the first chunk and all blocks are multiples, with one tier; else 1."""
        return 1 if self.slots_from is None else math.gcd(self.block, self.multiple_of)

    @property
    def shortest_chunk(self) -> int:
        """The number of sinks, and a block."""
        return self.first(0)

    @property
    def by_forwards(self) -> bool:
        """True if blocks have several tokens: the prompt is one chunk, and later tokens are encoded in blocks."""
        return self.block > 1

    def rewritten(self, tier: int) -> bool:
        """False: tiers grow at their end."""
        return False

    def exact(self, length: int, prompt: int) -> int:
        """Number of tokens in the exact window: sinks and the newest ones."""
        return length - self.encoded(length, prompt)


@lru_cache(4096)
def _counts(shares: tuple[float, ...], tokens: int) -> tuple[int, ...]:
    counts, left = list[int](), tokens
    for share in shares[:-1]:
        counts.append(min(left, share_of(share, tokens)))
        left -= counts[-1]
    return *counts, left
