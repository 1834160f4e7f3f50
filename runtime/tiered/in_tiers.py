"""Tokens that are ranked, divided among tiers."""

from itertools import accumulate

import torch
from torch import Tensor


def in_tiers(ranked: Tensor, counts: list[int], total: int) -> list[Tensor]:
    """The first `counts[0]` of `ranked` int64 `[..., n]`, the next `counts[1]` and so on, each part rising as a sort would make it.
    They are numbers below `total`.

    One sort by a token's tier, a number of 8 bits, which leaves positions as they were; sorting positions would be a sort of 64
    bits for every tier.
    """
    ends, rank = list(accumulate(counts)), torch.arange(ranked.shape[-1], device=ranked.device)
    tier = torch.zeros_like(rank, dtype=torch.uint8)
    for end in ends:
        tier += rank >= end
    unranked = len(counts)  # also those that no tier takes
    tiers = torch.full((*ranked.shape[:-1], total), unranked, dtype=torch.uint8, device=ranked.device)
    tiers.scatter_(-1, ranked, tier.expand_as(ranked))
    found = tiers.argsort(dim=-1, stable=True)
    return [
        found[..., end - count : end].contiguous()
        for end, count in zip((min(end, ranked.shape[-1]) for end in ends), counts, strict=True)
    ]
