"""The few entries of a matrix that stick out (GEAR, arXiv:2403.05527, eq. 4): finding them, and products with them alone.

A row of N numbers has `count` outliers at each end: what is stored is rectangular whatever the data are. `extremes` ranks a
row; `first_beyond` compares with thresholds that are known beforehand, which needs no order at all; `farthest_beyond` ranks what
lies beyond such thresholds (KVQuant, arXiv:2401.18079, section 3.4).

Attention meets outliers as a sparse matrix of E entries (source, target, delta): y[target] += x[source] * delta. For keys x
is the query and y a bias of the logits; for values x is the attention weights and y the output.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

# Products in memory at once.
TILE_ELEMENTS = 2**22

# Entries that are counted together: as many bytes as there are in a word.
RUN = 8


def extremes(x: Tensor, count: int) -> Tensor:
    """int64 `[..., 2 count]`: the positions of the `count` largest and then the `count` smallest entries of `x [..., N]`.

    No entry is named twice (2 count <= N); of equal ones any.
    """
    top = x.topk(count, sorted=False).indices
    # An entry of a constant row is among the largest and the smallest: the second search must not meet it again.
    bottom = x.scatter(-1, top, torch.inf).topk(count, largest=False, sorted=False).indices
    return torch.cat([top, bottom], -1)


def first_beyond(x: Tensor, low: Tensor, high: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The first `count` entries of `x [..., N]` above `high` and the first `count` below `low`, by position.

    `low`, `high` broadcast against `x`. Returns positions int64 `[..., 2 count]` (0 in a slot that found none), which slots are
    in use, and how many further entries there are, int64 in all.
    """
    sides, overflowed_outliers = [], torch.zeros((), dtype=torch.int64, device=x.device)
    wanted = torch.arange(1, count + 1, dtype=torch.int32, device=x.device).expand(*x.shape[:-1], count).contiguous()
    missing = -x.shape[-1] % RUN
    for beyond in (x > high, x < low):
        # The j-th of them lies in the run of entries in which the count so far reaches j: a search in short rows, then a
        # look at one run; no order, no scatter, no wait.
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
    """The `count` entries of `x [..., N]` that lie farthest above `high` or below `low`; of equally far ones any.

    `low`, `high` broadcast against `x`. Returns positions int64 `[..., count]` (0 in a slot that found none), which slots are in
    use, and how many further entries there are, int64 in all.
    """
    beyond = torch.maximum(x - high, low - x)
    distance, positions = beyond.topk(count, sorted=False)
    used = distance > 0
    return positions * used, used, ((beyond > 0).sum(-1) - count).clamp_min(0).sum()


def in_order(tokens: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """Lists `[..., n]` of tokens, whole numbers that no entry but an unused one (token 0, distance 0) shares, and of their
    distances: by token, unused entries last."""
    unused = (tokens == 0) & (delta == 0)
    order = tokens.long().masked_fill(unused, torch.iinfo(torch.int64).max).argsort(-1)
    return tokens.gather(-1, order), delta.gather(-1, order)


def run_counts(marked: Tensor) -> Tensor:
    """How many of each `RUN` neighbours are marked: bool `[..., N]` -> `[..., N / RUN]`; eight bytes are added as one word."""
    if marked.is_contiguous():  # a word's highest byte gathers the sum of all
        words = marked.flatten().view(torch.int64).view(*marked.shape[:-1], -1)
        return (words * 0x0101010101010101) >> 56
    across = marked.mT
    if across.is_contiguous() and across.shape[-1] % RUN == 0:
        words = across.flatten().view(torch.int64).view(*across.shape[:-1], -1)
        return words.unflatten(-2, (-1, RUN)).sum(-2).view(torch.uint8).mT
    return marked.unflatten(-1, (-1, RUN)).sum(-1)


def sparse_product(x: Tensor, source: Tensor, target: Tensor, delta: Tensor, size: int) -> Tensor:
    """y[..., target_e] += x[..., source_e] * delta_e: `x [rows, n, A]`, entries `[rows, E]` -> float32 `[rows, n, size]`."""
    found = x.new_zeros(*x.shape[:2], size)
    step = max(1, TILE_ELEMENTS // max(1, delta.numel()))
    for at in range(0, x.shape[1], step):
        part = x[:, at : at + step]
        positions = (index[:, None].expand(-1, part.shape[1], -1) for index in (source, target))
        products = part.gather(-1, next(positions)).mul_(delta[:, None])
        found[:, at : at + step].scatter_add_(-1, next(positions), products)
    return found
