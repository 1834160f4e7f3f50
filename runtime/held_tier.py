"""Which tokens of a row a layer holds, and in how many bits: what `CompressedCache.tiers` returns."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class HeldTier:
    """The tokens of one row that one layer stores in the same way.

    Attributes:
        count: number of tokens, equal for all KV heads.
        keys_bits: bits per key element, including scales and other parameters in their pages.
        values_bits: bits per value element, likewise.
        positions: int64 `[kv_heads, count]`, ascending: the positions of these tokens in their row, from 0. None where the
            method keeps no record of them.
        host: whether they are in host memory.
    """

    count: int
    keys_bits: float
    values_bits: float
    positions: Tensor | None
    host: bool = False


def in_order(
    spans: list[tuple[int, int, float, float]], heads: int, device: torch.device, host: bool = False
) -> list[HeldTier]:
    """The tiers of `spans` (start, stop, bits of keys, bits of values) of tokens stored in order; empty spans are left out."""
    return [
        HeldTier(stop - start, keys, values, torch.arange(start, stop, device=device).expand(heads, -1), host)
        for start, stop, keys, values in spans
        if start < stop
    ]
