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
from calib.kernels.pack.reference import Widths, first_bits, unpack_columns
from calib.kernels.upload import upload

SUBSETS = 4
STATES = 8
# Steps outside all levels beyond which a component is taken to lie there: what it loses by another level than the nearest is more
# than others can gain, and sums keep the digits of the others.
OUTSIDE = 256.0
FAR = 1e30  # the cost of a state that no path has come to
STRETCH = 2**15  # components of all rows that are searched together: what they need fits a processor's cache


def trellis_words(y: Tensor, widths: Widths, counts: tuple[int, ...], weights: Tensor) -> Tensor:
    """As `operation.trellis_words` says."""
    half = _halves(widths, y.device)  # a component has four times as many levels, its range 2 [-1, 1] as many steps
    at = _along_path(y, len(widths)).unflatten(0, (-1, len(widths)))
    at = (at * (2 * half)).add_(2 * half - 0.5).flatten(0, 1)
    top = (half - 1).repeat(max(counts), 1, 1, 1)
    at = inside(at, top)
    weight = _along_path(weights.unsqueeze(1), len(widths)).unsqueeze(1).expand_as(at)
    path = best_path(at.flatten(1), top.flatten(1), weight.flatten(1)).view(at.shape)
    free = nearest_free(at.sub_(subsets_of(path)).mul_(1 / SUBSETS), top)
    fields = free.to(torch.int16).mul_(2).add_(path).unflatten(0, (-1, len(widths))).unbind(1)
    words = fields[0]
    for field, first in zip(fields[1:], first_bits(widths)[1:], strict=True):
        words.bitwise_or_(field << first)
    return join_heads(words.movedim(0, -1).contiguous(), counts)


def trellis_levels(words: Tensor, widths: Widths, counts: tuple[int, ...]) -> Tensor:
    """As `operation.trellis_levels` says."""
    stored = unpack_columns(spread_heads(words, counts), widths, len(widths) * max(counts))
    along = _along_path(stored.mT, len(widths))
    found = (along >> 1).mul_(4).add_(subsets_of(along & 1))
    return _in_planes(found, len(widths)).movedim(0, -2)


def inside(at: Tensor, top: Tensor) -> Tensor:
    """`at`, in steps from level 0, where it lies no farther than `OUTSIDE` from all levels; what is no number, before them."""
    return torch.minimum(at.nan_to_num(nan=-OUTSIDE).clamp_(min=-OUTSIDE), SUBSETS * top + OUTSIDE)


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
    together = min(count, max(1, STRETCH // max(1, rows)))
    errors = at.new_empty(together, 2, 2, 2, rows)
    # A path comes to state 2 m + u from m + 4 h, h = 0, 1, by z0, m's bit 1, and z1, the sum of u, h and m's bit 0 modulo 2: with
    # errors by z1 laid out as 0, 1, 0, 1 that is a stride.
    of_component, _, of_z1, of_z0, _ = errors.stride()
    steps = errors.as_strided((len(errors), 2, 2, 2, 2, rows), (of_component, of_z1, of_z0, of_z1, of_z1, 1)).unbind()
    cost = at.new_full((STATES, rows), FAR)
    cost[0] = 0
    before, after = cost.view(2, 2, 2, 1, rows), cost.view(2, 2, 2, rows)  # h and both bits of m; both bits of m and u
    ways = at.new_empty(2, 2, 2, 2, rows)
    low, high = ways
    later = torch.empty_like(errors)  # 1 where a state is come to by h = 1: what is compared into floats is vectorised
    taken = later.unbind()
    came = torch.empty(count, rows, dtype=torch.int32, device=at.device)
    for start in range(0, count, together):
        stretch = slice(start, min(start + together, count))
        own = slice(stretch.stop - start)
        squared_errors(at[stretch], top[stretch], weight[stretch], out=errors[own])
        for step, by in zip(steps[own], taken[own], strict=True):
            torch.add(step, before, out=ways)
            torch.lt(high, low, out=by)
            torch.minimum(low, high, out=after)
        came[stretch] = _in_bits(later[own].flatten(1, 3))
    return _followed_back(cost, came.mul_(STATES))


def squared_errors(at: Tensor, top: Tensor, weight: Tensor, out: Tensor) -> None:
    """Of the nearest level of each subset, less the least of them, which every path has. Written twice, one behind the other:
    `out [components, 2, z1, z0, rows]`."""
    offset = torch.arange(SUBSETS, dtype=at.dtype, device=at.device).div_(SUBSETS).unsqueeze(1)
    found = (at * (1 / SUBSETS)).unsqueeze(1) - offset
    found.sub_(nearest_free(found, top.unsqueeze(1))).square_()
    found.sub_(found.amin(1, keepdim=True))
    twice = out.flatten(2, 3)
    torch.mul(found.unsqueeze(1).expand_as(twice), (SUBSETS**2 * weight)[:, None, None], out=twice)


def _followed_back(cost: Tensor, came: Tensor) -> Tensor:
    """u of the path that ends in the state of least cost, the lowest of several, as int16 `[components, rows]`.

    `came`, int32 of that shape, is eight times a number whose bit s says that the best path into state s comes by h = 1.
    """
    before, lowest = _tables(cost.device)
    states = torch.empty_like(came)
    least = torch.eq(cost, cost.amin(0), out=torch.empty_like(cost))
    states[-1] = lowest.index_select(0, _in_bits(least))
    own, bits, at = states.unbind(), came.unbind(), torch.empty_like(came[0])
    for number in range(len(own) - 1, 0, -1):
        torch.add(bits[number], own[number], out=at)
        torch.index_select(before, 0, at, out=own[number - 1])
    return states.bitwise_and_(1).to(torch.int16)


def _in_bits(flags: Tensor) -> Tensor:
    """`flags [..., STATES, rows]`, 0 or 1, as the bits of a number: int32 `[..., rows]`."""
    return torch.matmul(_powers(flags.device), flags).to(torch.int32)


@cache
def _powers(device: torch.device) -> Tensor:
    return 2.0 ** torch.arange(STATES, device=device)


@cache
def _tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """The state before, by eight times the bits of `came` and the state; and the lowest bit of a number that has one. int32."""
    numbers, states = range(1 << STATES), range(STATES)
    before = [state // 2 + STATES // 2 * (number >> state & 1) for number in numbers for state in states]
    lowest = [max(0, (number & -number).bit_length() - 1) for number in numbers]
    return upload(before, torch.int32, device), upload(lowest, torch.int32, device)


def nearest_free(at: Tensor, top: Tensor) -> Tensor:
    """f, from 0 to `top`, of the nearest level of a subset: `at` in four steps from its first level."""
    found = at.round().clamp_(min=0)
    return torch.minimum(found, top, out=found)
