"""Randomness that depends on where a token stands and on nothing else: not on the batch, not on what was drawn before."""

from dataclasses import dataclass

import torch
from torch import Tensor

WORD = 2**32 - 1
WHOLE = 2**32


@dataclass(frozen=True)
class Draws:
    """A counter-based hash of (seed, layer, KV head, position), murmur3's mixing of 32-bit words.

    Probe rows are queries and belong to no KV head: they are drawn with head 0.
    """

    seed: int
    layer: int
    head: int = 0

    def at(self, positions: Tensor) -> Tensor:
        """int64 in [0, 2^32) for each of the int64 `positions`."""
        mixed = 0
        for word in (self.seed & WORD, (self.seed >> 32) & WORD, self.layer, self.head):
            mixed = (_mixed(mixed ^ word) * 5 + 0xE6546B64) & WORD
        return _mixed_all((positions & WORD) ^ mixed)


def _mixed(x: int) -> int:
    return int(_mixed_all(torch.tensor(x)))


def _mixed_all(x: Tensor) -> Tensor:
    # int64 products wrap round, and their low 32 bits are right all the same.
    x = x ^ (x >> 16)
    x = x * 0x85EBCA6B & WORD
    x = x ^ (x >> 13)
    x = x * 0xC2B2AE35 & WORD
    return x ^ (x >> 16)
