"""Random numbers that depend on seed, layer, head and position alone: not on the batch, nor on what was drawn before."""

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from calib.kernels.upload import upload

WORD = 2**32 - 1
WHOLE = 2**32

Number = TypeVar("Number", int, Tensor)


@dataclass(frozen=True)
class SeededRng:
    """A counter-based hash of (seed, layer, KV head, position): 32-bit words mixed one after the other as murmur3 does.

    Probe rows are queries and belong to no KV head: they are drawn with head 0.
    """

    seed: int
    layer: int
    head: int = 0

    def at(self, position: Number) -> Number:
        """A number in [0, 2^32) for a position, or for each of a tensor of int64 positions."""
        return _mixed((position & WORD) ^ self._of_head(self.head))

    def of_heads(self, heads: int, positions: Tensor) -> Tensor:
        """The numbers of the first `heads` heads at `positions [n]`: `[heads, n]`."""
        own = upload([self._of_head(head) for head in range(heads)], torch.int64, positions.device)
        return _mixed((positions & WORD) ^ own[:, None])

    def _of_head(self, head: int) -> int:
        mixed = 0
        for word in (self.seed & WORD, (self.seed >> 32) & WORD, self.layer, head):
            mixed = (_mixed(mixed ^ word) * 5 + 0xE6546B64) & WORD
        return mixed


def _mixed(x: Number) -> Number:
    # A tensor's int64 products may overflow; their low 32 bits are right all the same.
    x = x ^ (x >> 16)
    x = x * 0x85EBCA6B & WORD
    x = x ^ (x >> 13)
    x = x * 0xC2B2AE35 & WORD
    return x ^ (x >> 16)
