"""Finds the outliers of a matrix (GEAR, arXiv:2403.05527, eq. 4), and multiply with them as a sparse matrix.

A row of N numbers has `count` outliers at each end, a fixed number, so that they are stored in rectangular tensors. `extremes`
takes the largest and smallest entries of a row; `first_beyond` takes the first entries beyond known thresholds, without sorting;
`farthest_beyond` takes the entries farthest beyond such thresholds (KVQuant, arXiv:2401.18079, section 3.4).

In attention, outliers are a sparse matrix of E entries (source, target, delta): y[target] += x[source] * delta. For keys x is the
query and y a bias of the logits; for values x is the attention weights and y the output.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

# Most products in memory at once.
TILE_ELEMENTS = 2**22

# Entries that are counted together: the bytes of a 64-bit word.
RUN = 8


def extremes(x: Tensor, count: int) -> Tensor:
    """Positions of the `count` largest and then the `count` smallest entries of `x [..., N]`: int64 `[..., 2 count]`.

    No position occurs twice (2 count <= N). Ties are broken arbitrarily.
    """
    top = x.topk(count, sorted=False).indices
    # In a constant row an entry could be among the largest and the smallest: exclude the largest from the second search.
    bottom = x.scatter(-1, top, torch.inf).topk(count, largest=False, sorted=False).indices
    return torch.cat([top, bottom], -1)


def first_beyond(x: Tensor, low: Tensor, high: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The first `count` entries of `x [..., N]` above `high` and the first `count` below `low`, by position.

    `low`, `high` broadcast against `x`. Returns positions int64 `[..., 2 count]` (0 if unused), which of them are used, bool, and
    the total number of further entries beyond the thresholds, int64 `[]`.
    """
    sides, overflowed_outliers = [], torch.zeros((), dtype=torch.int64, device=x.device)
    wanted = torch.arange(1, count + 1, dtype=torch.int32, device=x.device).expand(*x.shape[:-1], count).contiguous()
    missing = -x.shape[-1] % RUN
    for beyond in (x > high, x < low):
        # The j-th such entry lies in the run of entries in which the cumulative count reaches j. So a search among the runs and
        # then within one run finds it, without a sort, a scatter or a synchronisation.
        beyond = F.pad(beyond, (0, missing)) if missing else beyond
        reached = run_counts(beyond).cumsum(-1, dtype=torch.int32).contiguous()
        run = torch.searchsorted(reached, wanted)
        found = run < reached.shape[-1]
        run = run * found
        before = F.pad(reached, (1, 0)).gather(-1, run)
        inside = beyond.unflatten(-1, (-1, RUN)).gather(-2, run[..., None].expand(*run.shape, RUN))
        ahead = inside.cumsum(-1, dtype=torch.int32) < (wanted - before)[..., None]
        sides.append(((run * RUN + ahead.sum(-1)) * found, found))
        overflowed_outliers += (reached[..., -1].long() - count).clamp_min(0).sum()
    positions, used = (torch.cat(part, -1) for part in zip(*sides, strict=True))
    return positions, used, overflowed_outliers


def farthest_beyond(x: Tensor, low: Tensor, high: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The `count` entries of `x [..., N]` that lie farthest above `high` or below `low`; ties are broken arbitrarily.

    `low`, `high` broadcast against `x`. Returns positions int64 `[..., count]` (0 if unused), which of them are used, bool, and the
    total number of further entries beyond the thresholds, int64 `[]`.
    """
    beyond = torch.maximum(x - high, low - x)
    distance, positions = beyond.topk(count, sorted=False)
    used = distance > 0
    return positions * used, used, ((beyond > 0).sum(-1) - count).clamp_min(0).sum()


def in_order(tokens: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """Sorts lists `[..., n]` of tokens and their `delta` by token, unused entries (token 0, delta 0) last. No token may occur
    twice, except in unused entries."""
    unused = (tokens == 0) & (delta == 0)
    order = tokens.long().masked_fill(unused, torch.iinfo(torch.int64).max).argsort(-1)
    return tokens.gather(-1, order), delta.gather(-1, order)


def run_counts(marked: Tensor) -> Tensor:
    """Counts the marked entries of each run of `RUN` neighbours: bool `[..., N]` -> `[..., N / RUN]`. Eight bytes are added as one
    64-bit word."""
    if marked.is_contiguous():  # the multiplication adds up all bytes in the highest one
        words = marked.flatten().view(torch.int64).view(*marked.shape[:-1], -1)
        return (words * 0x0101010101010101) >> 56
    across = marked.mT
    if across.is_contiguous() and across.shape[-1] % RUN == 0:
        words = across.flatten().view(torch.int64).view(*across.shape[:-1], -1)
        return words.unflatten(-2, (-1, RUN)).sum(-2).view(torch.uint8).mT
    return marked.unflatten(-1, (-1, RUN)).sum(-1)


def sparse_product(x: Tensor, source: Tensor, target: Tensor, delta: Tensor, size: int) -> Tensor:
    """Sparse product y[..., target_e] += x[..., source_e] * delta_e over entries e: `x [rows, n, A]`, entries `[rows, E]` ->
    `[rows, n, size]` in the dtype of x."""
    found = x.new_zeros(*x.shape[:2], size)
    step = max(1, TILE_ELEMENTS // max(1, delta.numel()))
    for at in range(0, x.shape[1], step):
        part = x[:, at : at + step]
        positions = (index[:, None].expand(-1, part.shape[1], -1) for index in (source, target))
        products = part.gather(-1, next(positions)).mul_(delta[:, None])
        found[:, at : at + step].scatter_add_(-1, next(positions), products)
    return found
