"""Heads of a token whose numbers of words differ, side by side in one row: joined for storage, spread for attention.

`counts` is the words of each head. In a row, head h has words counts[0] + ... + counts[h - 1] and on. Spread, every head has
as many as the largest, Wm, so that heads are one batch of a product. Its codes are then in **plane form**: P * Wm of them,
plane p at [p*Wm, (p+1)*Wm). Words beyond a head's own are another head's: whoever reads them gives their channels a query
of 0 and ignores what is mixed there.
"""

from functools import cache
from itertools import accumulate

import torch
from torch import Tensor

from calib.kernels.upload import upload


def join_heads(words: Tensor, counts: tuple[int, ...]) -> Tensor:
    """Words `[..., H, T, Wm]` of each head -> `[..., 1, T, sum(counts)]`; of head h the first `counts[h]` are kept."""
    row = words.transpose(-3, -2).flatten(-2)
    if sum(counts) < row.shape[-1]:
        row = row.index_select(-1, _own(counts, words.shape[-1], words.device))
    return row.unsqueeze(-3)


def spread_heads(tile: Tensor, counts: tuple[int, ...]) -> Tensor:
    """Words with tokens last `[..., 1, sum(counts), T]` -> `[..., H, Wm, T]`, Wm = max(counts); equal counts cost nothing."""
    heads, most = len(counts), max(counts)
    row = tile.squeeze(-3)
    if sum(counts) < heads * most:
        row = row.index_select(-2, _positions(counts, tile.device))
    return row.unflatten(-2, (heads, most))


@cache
def first_words(counts: tuple[int, ...], device: torch.device) -> Tensor:
    """Where the words of each head begin, and where the last one's end: int32 `[H + 1]`. Kept for good, however many layers there
    are: a recorded step reads it where it lies."""
    return upload([0, *accumulate(counts)], torch.int32, device)


@cache
def _own(counts: tuple[int, ...], most: int, device: torch.device) -> Tensor:
    """Of `[H * Wm]` words those that are a head's own; kept, because making it costs as much as using it."""
    own = [head * most + word for head, count in enumerate(counts) for word in range(count)]
    return upload(own, torch.int64, device)


@cache
def _positions(counts: tuple[int, ...], device: torch.device) -> Tensor:
    """Where in a row the words `[H * Wm]` lie; beyond a head's own any word that there is."""
    begins, last = [0, *accumulate(counts)], sum(counts) - 1
    positions = [min(begins[head] + word, last) for head in range(len(counts)) for word in range(max(counts))]
    return upload(positions, torch.int64, device)
