"""Which tokens of a row a layer holds, and in how many bits: what `CompressedCache.tiers` returns."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class HeldTier:
    """Tokens of one row that one layer holds alike.

    Attributes:
        count: tokens of each KV head.
        keys_bits: bits of a value of their keys, scales and other parameters in their pages included.
        values_bits: the same of their values.
        positions: int64 `[kv_heads, count]`, rising: the numbers of these tokens in their row, from 0. None where the method
            keeps no record of them.
        host: whether they lie in host memory.
    """

    count: int
    keys_bits: float
    values_bits: float
    positions: Tensor | None
    host: bool = False


def in_order(
    spans: list[tuple[int, int, float, float]], heads: int, device: torch.device, host: bool = False
) -> list[HeldTier]:
    """Tiers of `spans` (start, stop, bits of keys, bits of values) of tokens that lie in their order; empty ones are left out."""
    return [
        HeldTier(stop - start, keys, values, torch.arange(start, stop, device=device).expand(heads, -1), host)
        for start, stop, keys, values in spans
        if start < stop
    ]
