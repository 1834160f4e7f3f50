"""Trellis-coded levels in plain torch (Marcellin and Fischer, Trellis coded quantization, 1990; of 8 states, Ungerboeck, 1982, in
feed-forward form: QTIP, arXiv:2406.11235).

A component of b bits has 2^(b+1) levels, of which the path so far leaves half: with u[n] one stored bit of component n and f its
b - 1 others,

    i = 4 f + 2 z1 + z0        z0[n] = u[n-2]        z1[n] = u[n] ^ u[n-1] ^ u[n-3]        u[n < 0] = 0

So a reader that has the u of a token's components needs no search and no sequence. The state before component n is u[n-1], u[n-2],
u[n-3] in its bits 0, 1, 2; Viterbi's search keeps the best path into each of the 8.

Only elementwise operations touch a token's numbers: its path is the same alone, in any batch, and in any order.
"""

from functools import cache

import torch
from torch import Tensor

from calib.kernels.pack.heads import join_heads, spread_heads
from calib.kernels.pack.reference import Widths, pack_away, unpack_columns

SUBSETS = 4
STATES = 8
# Steps outside all levels beyond which a component is taken to lie there: what it loses by another level than the nearest is more
# than others can gain, and sums keep the digits of the others.
OUTSIDE = 256.0
FAR = 1e30  # the cost of a state that no path has come to


def trellis_words(y: Tensor, widths: Widths, counts: tuple[int, ...], weights: Tensor) -> Tensor:
    """As `operation.trellis_words` says."""
    half = _halves(widths, y.device)  # a component has four times as many levels, its range 2 [-1, 1] as many steps
    at = _along_path(y, len(widths)).unflatten(0, (-1, len(widths)))
    at = (at * (2 * half) + (2 * half - 0.5)).flatten(0, 1)
    top = (half - 1).repeat(max(counts), 1, 1, 1)
    at = inside(at, top)
    weight = _along_path(weights.unsqueeze(1), len(widths)).unsqueeze(1).expand_as(at)
    path = best_path(at.flatten(1), top.flatten(1), weight.flatten(1)).view(at.shape)
    free = nearest_free((at - subsets_of(path)).mul_(1 / SUBSETS), top)
    codes = _in_planes(free.to(torch.int16).mul_(2).add_(path), len(widths)).movedim(0, -1)
    return join_heads(pack_away(codes.contiguous(), widths), counts)


def trellis_levels(words: Tensor, widths: Widths, counts: tuple[int, ...]) -> Tensor:
    """As `operation.trellis_levels` says."""
    stored = unpack_columns(spread_heads(words, counts), widths, len(widths) * max(counts))
    along = _along_path(stored.mT, len(widths))
    found = (along >> 1).mul_(4).add_(subsets_of(along & 1))
    return _in_planes(found, len(widths)).movedim(0, -2)


def inside(at: Tensor, top: Tensor) -> Tensor:
    """`at`, in steps from level 0, where it lies no farther than `OUTSIDE` from all levels; what is no number, before them."""
    return torch.minimum(torch.fmax(at, at.new_full((), -OUTSIDE)), SUBSETS * top + OUTSIDE)


def _along_path(x: Tensor, fields: int) -> Tensor:
    """`x [..., components]` in plane form -> contiguous `[components, ...]` in the order of the path: word by word."""
    return x.movedim(-1, 0).unflatten(0, (fields, -1)).transpose(0, 1).flatten(0, 1).contiguous()


def _in_planes(x: Tensor, fields: int) -> Tensor:
    """`x [components, ...]` in the order of the path -> the same in plane form."""
    return x.unflatten(0, (-1, fields)).transpose(0, 1).flatten(0, 1)


@cache
def _halves(widths: Widths, device: torch.device) -> Tensor:
    """2^(b-1) of each field, how many f there are: float32 `[fields, 1, 1, 1]`; kept: making it costs as much as using it."""
    return torch.stack([torch.full((1, 1, 1), 2.0 ** (width - 1), device=device) for width in widths])


def subsets_of(u: Tensor) -> Tensor:
    """2 z1 + z0 of each component of paths `u [components, ...]`, whole numbers 0 or 1."""
    found = u.clone()
    found[1:].bitwise_xor_(u[:-1])
    found[3:].bitwise_xor_(u[:-3])
    found.mul_(2)[2:].add_(u[:-2])
    return found


def best_path(at: Tensor, top: Tensor, weight: Tensor) -> Tensor:
    """u of the path with the least sum of squared errors times weights.

    Args:
        at: float32 `[components, rows]`: where a component lies, in steps from its level 0, not far outside its levels.
        top: float32 `[components, 1]`: the largest f, 2^(b-1) - 1.
        weight: float32 `[components, rows]`: of a squared step.

    Returns:
        int16 `[components, rows]`.
    """
    count, rows = at.shape
    # A path comes to state 2 m + u from m + 4 h, h = 0, 1, by z0, m's bit 1, and z1, the sum of u, h and m's bit 0 modulo 2: with
    # errors by z1 laid out as 0, 1, 0, 1 that is a stride.
    errors = squared_errors(at, top, weight).view(count, 2, 2, rows).repeat(1, 2, 1, 1)
    of_component, of_z1, of_z0, _ = errors.stride()
    steps = errors.as_strided((count, 2, 2, 2, 2, rows), (of_component, of_z1, of_z0, of_z1, of_z1, 1))
    cost = at.new_full((STATES, rows), FAR)
    cost[0] = 0
    before, after = cost.view(2, 2, 2, 1, rows), cost.view(2, 2, 2, rows)  # h and both bits of m; both bits of m and u
    ways = at.new_empty(2, 2, 2, 2, rows)
    low, high = ways
    later = torch.empty(count, 2, 2, 2, rows, dtype=torch.bool, device=at.device)
    for step, taken in zip(steps.unbind(), later.unbind(), strict=True):
        torch.add(step, before, out=ways)
        torch.lt(high, low, out=taken)
        torch.minimum(low, high, out=after)
    came = later.view(count, STATES, rows).to(torch.uint8).mul_(STATES // 2)
    came += torch.arange(STATES, dtype=torch.uint8, device=at.device).div(2, rounding_mode="floor").unsqueeze(1)
    states = torch.empty(count, 1, rows, dtype=torch.int64, device=at.device)
    states[-1] = _first_least(cost)
    own = states.unbind()
    for number in range(count - 1, 0, -1):
        own[number - 1].copy_(came[number].gather(0, own[number]))
    return states.squeeze(1).bitwise_and_(1).to(torch.int16)


def squared_errors(at: Tensor, top: Tensor, weight: Tensor) -> Tensor:
    """Of the nearest level of each subset, `[components, 4, rows]`, less the least of them, which every path has."""
    offset = torch.arange(SUBSETS, dtype=at.dtype, device=at.device).div_(SUBSETS).unsqueeze(1)
    found = (at * (1 / SUBSETS)).unsqueeze(1) - offset
    found.sub_(nearest_free(found.clone(), top.unsqueeze(1))).square_()
    return found.sub_(found.amin(1, keepdim=True)).mul_(SUBSETS**2 * weight.unsqueeze(1))


def nearest_free(at: Tensor, top: Tensor) -> Tensor:
    """f, from 0 to `top`, of the nearest level of a subset: `at` in four steps from its first level, which is overwritten."""
    found = at.round_().clamp_(min=0)
    return torch.minimum(found, top, out=found)


def _first_least(cost: Tensor) -> Tensor:
    """The lowest state of least cost, int64 `[rows]`, on every device."""
    numbers = torch.arange(STATES, device=cost.device).unsqueeze(1)
    return numbers.where(cost == cost.amin(0), STATES).amin(0)
