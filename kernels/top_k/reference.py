"""The positions of the k largest scores, and of the others, whichever device asks: among equals the first, in rising order."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

EMPTY = -1


def top_k(scores: Tensor, k: int, ends: Tensor | None = None) -> Tensor:
    """Where the largest scores stand.

    Args:
        scores: float32 `[rows, heads, T]`, without NaN; -inf is never chosen.
        k: at most T.
        ends: int32 `[rows, 2]`: of a row only scores from the first position on and before the second are there, the others may
            be anything. None: all.

    Returns:
        int64 `[rows, heads, k]`: rising, -1 at the end where fewer than k are more than -inf. Of equal scores those with
        lower positions are chosen.
    """
    if ends is not None:
        at, (first, stop) = torch.arange(scores.shape[-1], device=scores.device), ends[:, None, :, None].unbind(2)
        scores = scores.masked_fill((at < first) | (at >= stop), -torch.inf)
    best, positions = scores.topk(k, -1)
    if k:
        # Of those equal to the last, `topk` gives any: the first take their place.
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

    One sort by the number of a score's part, 8 bits, which leaves positions as they were; sorting positions would be a sort of
    64 bits for every part.
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
