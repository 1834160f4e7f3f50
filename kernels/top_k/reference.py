"""Positions of the k largest scores, and partitions by score, in plain torch: of equal scores the first, in ascending order."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

EMPTY = -1


def top_k(scores: Tensor, k: int, ends: Tensor | None = None) -> Tensor:
    """Positions of the k largest scores.

    Args:
        scores: float32 `[rows, heads, T]`, without NaN; -inf is never chosen.
        k: at most T.
        ends: int32 `[rows, 2]`: only the scores of a row from the first position on and before the second are considered; the
            others may be anything. None: all.

    Returns:
        int64 `[rows, heads, k]`, ascending, padded with -1 at the end if fewer than k scores are above -inf. Of equal scores those
        with lower positions are chosen.
    """
    if ends is not None:
        at, (first, stop) = torch.arange(scores.shape[-1], device=scores.device), ends[:, None, :, None].unbind(2)
        scores = scores.masked_fill((at < first) | (at >= stop), -torch.inf)
    best, positions = scores.topk(k, -1)
    if k:
        # Of the scores equal to the k-th largest, `topk` returns any: replace them by the first ones.
        last = best[..., -1:]
        everywhere = torch.arange(scores.shape[-1], dtype=torch.int32, device=scores.device)
        first = torch.where(scores == last, everywhere, scores.shape[-1]).topk(k, -1, largest=False).values
        equal = best == last
        rank = (equal.cumsum(-1) - 1).clamp(min=0)
        positions = torch.where(equal, first.gather(-1, rank).long(), positions)
    found = positions.masked_fill(best == -torch.inf, scores.shape[-1]).sort(-1).values
    return found.masked_fill(found == scores.shape[-1], EMPTY)


def divided(scores: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """As `operation.divided`.

    After ranking, one stable sort by the 8-bit number of each position's part gives ascending positions; sorting the positions of
    every part would take a 64-bit sort each.
    """
    ranked = scores.argsort(dim=-1, descending=True, stable=True)
    ends, rank = list(accumulate(counts)), torch.arange(ranked.shape[-1], device=ranked.device)
    part = torch.zeros_like(rank, dtype=torch.uint8)
    for end in ends:
        part += rank >= end
    parts = torch.empty(ranked.shape, dtype=torch.uint8, device=ranked.device)
    parts.scatter_(-1, ranked, part.expand_as(ranked))
    found = parts.argsort(dim=-1, stable=True)
    return [found[..., end - count : end].contiguous() for end, count in zip(ends, counts, strict=True)]
