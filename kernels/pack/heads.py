"""Heads with different numbers of words: their words are joined in one row for storage, and spread to equal sizes for attention.

`counts` has the number of words of each head. In a row, the words of head h begin at counts[0] + ... + counts[h - 1]. Spread, every
head has Wm = max(counts) words, so that heads form one batch of a product. The codes of a head are then in **plane form**: P * Wm
codes for P fields of a word, plane p at [p*Wm, (p+1)*Wm). Words beyond a head's own are another head's: the query must be 0 in
their channels, and mixtures there must be ignored.
"""

from functools import cache
from itertools import accumulate

import torch
from torch import Tensor

from calib.kernels.upload import upload


def join_heads(words: Tensor, counts: tuple[int, ...]) -> Tensor:
    """Joins words `[..., H, T, Wm]` to rows `[..., 1, T, sum(counts)]`: the first `counts[h]` words of head h are kept."""
    row = words.transpose(-3, -2).flatten(-2)
    if sum(counts) < row.shape[-1]:
        row = row.index_select(-1, _own(counts, words.shape[-1], words.device))
    return row.unsqueeze(-3)


def spread_heads(tile: Tensor, counts: tuple[int, ...]) -> Tensor:
    """Spreads words with tokens last, `[..., 1, sum(counts), T]` -> `[..., H, Wm, T]`, Wm = max(counts). Equal counts: a view."""
    heads, most = len(counts), max(counts)
    row = tile.squeeze(-3)
    if sum(counts) < heads * most:
        row = row.index_select(-2, _positions(counts, tile.device))
    return row.unflatten(-2, (heads, most))


@cache
def first_words(counts: tuple[int, ...], device: torch.device) -> Tensor:
    """Offset of each head's first word, and the end of the last head: int32 `[H + 1]`. Cached without a limit, because a captured
    CUDA graph reads the tensor at its address."""
    return upload([0, *accumulate(counts)], torch.int32, device)


@cache
def _own(counts: tuple[int, ...], most: int, device: torch.device) -> Tensor:
    """Indices of the heads' own words among `[H * Wm]`; cached, because making the tensor costs as much as using it."""
    own = [head * most + word for head, count in enumerate(counts) for word in range(count)]
    return upload(own, torch.int64, device)


@cache
def _positions(counts: tuple[int, ...], device: torch.device) -> Tensor:
    """Indices in a row of the spread words `[H * Wm]`; for words beyond a head's own any valid index."""
    begins, last = [0, *accumulate(counts)], sum(counts) - 1
    positions = [min(begins[head] + word, last) for head in range(len(counts)) for word in range(max(counts))]
    return upload(positions, torch.int64, device)
