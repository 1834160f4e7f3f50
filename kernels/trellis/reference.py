"""Trellis-coded levels in plain torch (Marcellin and Fischer, Trellis coded quantization, 1990; of 8 states, Ungerboeck, 1982, in
feed-forward form: QTIP, arXiv:2406.11235).

A component of b bits has 2^(b+1) levels, half of which can be reached after the path so far. Let u[n] be one stored bit of
component n and f its b - 1 others. The level's number is

    i = 4 f + 2 z1 + z0        z0[n] = u[n-2]        z1[n] = u[n] ^ u[n-1] ^ u[n-3]        u[n < 0] = 0

So decoding needs only the u of a token's components, no search and no sequential loop. The state before component n has u[n-1],
u[n-2], u[n-3] in bits 0, 1, 2; the Viterbi search keeps the best path into each of the 8 states.

A token's numbers are used in elementwise operations only, so that its path does not depend on the batch.
"""

from functools import cache

import torch
from torch import Tensor

from calib.kernels.pack.heads import join_heads, spread_heads
from calib.kernels.pack.reference import Widths, first_bits, unpack_columns
from calib.kernels.upload import upload

SUBSETS = 4
STATES = 8
# A component farther than this many steps outside all levels is clamped to that distance: the nearest level still wins, and sums of
# errors keep the digits of the other components.
OUTSIDE = 256.0
FAR = 1e30  # cost of a state that no path has reached
STRETCH = 2**15  # components (of all rows) that are searched at once, so that their data fit a processor's cache


def trellis_words(y: Tensor, widths: Widths, counts: tuple[int, ...], weights: Tensor) -> Tensor:
    """As `operation.trellis_words`."""
    half = _halves(widths, y.device)  # a component has 4 half levels, and a step is 1 / (2 half)
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
    """As `operation.trellis_levels`."""
    stored = unpack_columns(spread_heads(words, counts), widths, len(widths) * max(counts))
    along = _along_path(stored.mT, len(widths))
    found = (along >> 1).mul_(4).add_(subsets_of(along & 1))
    return _in_planes(found, len(widths)).movedim(0, -2)


def inside(at: Tensor, top: Tensor) -> Tensor:
    """Clamps `at`, in steps from level 0, to at most `OUTSIDE` steps outside all levels; NaN becomes -`OUTSIDE`."""
    return torch.minimum(at.nan_to_num(nan=-OUTSIDE).clamp_(min=-OUTSIDE), SUBSETS * top + OUTSIDE)


def _along_path(x: Tensor, fields: int) -> Tensor:
    """Reorders `x [..., components]` in plane form to contiguous `[components, ...]` in the order of the path: word by word."""
    return x.movedim(-1, 0).unflatten(0, (fields, -1)).transpose(0, 1).flatten(0, 1).contiguous()


def _in_planes(x: Tensor, fields: int) -> Tensor:
    """Reorders `x [components, ...]` in the order of the path to plane form."""
    return x.unflatten(0, (-1, fields)).transpose(0, 1).flatten(0, 1)


@cache
def _halves(widths: Widths, device: torch.device) -> Tensor:
    """2^(b-1) of each field, the number of values of f: float32 `[fields, 1, 1, 1]`; cached, as it costs as much as its use."""
    return torch.stack(
        [torch.full((1, 1, 1), 2.0 ** (width - 1), dtype=torch.float32, device=device) for width in widths]
    )


def subsets_of(u: Tensor) -> Tensor:
    """Subset 2 z1 + z0 of each component of paths `u [components, ...]`, integers 0 or 1."""
    found = u.clone()
    found[1:].bitwise_xor_(u[:-1])
    found[3:].bitwise_xor_(u[:-3])
    found.mul_(2)[2:].add_(u[:-2])
    return found


def best_path(at: Tensor, top: Tensor, weight: Tensor) -> Tensor:
    """Viterbi search for the path with the least weighted sum of squared errors.

    Args:
        at: components in steps from their level 0, clamped by `inside`, float32 `[components, rows]`.
        top: the largest f, 2^(b-1) - 1, float32 `[components, 1]`.
        weight: weight of a squared step, float32 `[components, rows]`.

    Returns:
        u of the path, int16 `[components, rows]`.
    """
    count, rows = at.shape
    together = min(count, max(1, STRETCH // max(1, rows)))
    errors = at.new_empty(together, 2, 2, 2, rows)
    # State 2 m + u is reached from states m + 4 h, h = 0, 1, with z0 = bit 1 of m and z1 = u ^ h ^ (bit 0 of m). With the errors
    # of z1 laid out as 0, 1, 0, 1 these errors can be addressed by strides.
    of_component, _, of_z1, of_z0, _ = errors.stride()
    steps = errors.as_strided((len(errors), 2, 2, 2, 2, rows), (of_component, of_z1, of_z0, of_z1, of_z1, 1)).unbind()
    cost = at.new_full((STATES, rows), FAR)
    cost[0] = 0
    before, after = cost.view(2, 2, 2, 1, rows), cost.view(2, 2, 2, rows)  # h and both bits of m; both bits of m and u
    ways = at.new_empty(2, 2, 2, 2, rows)
    low, high = ways
    later = torch.empty_like(errors)  # 1 if a state is reached by h = 1; float comparisons are vectorised
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
    """Weighted squared errors of the nearest level of each subset, minus the least of them, which all paths have in common. Written
    twice, one copy after the other: `out [components, 2, z1, z0, rows]`."""
    offset = torch.arange(SUBSETS, dtype=at.dtype, device=at.device).div_(SUBSETS).unsqueeze(1)
    found = (at * (1 / SUBSETS)).unsqueeze(1) - offset
    found.sub_(nearest_free(found, top.unsqueeze(1))).square_()
    found.sub_(found.amin(1, keepdim=True))
    twice = out.flatten(2, 3)
    torch.mul(found.unsqueeze(1).expand_as(twice), (SUBSETS**2 * weight)[:, None, None], out=twice)


def _followed_back(cost: Tensor, came: Tensor) -> Tensor:
    """Traces the path back from the state of least cost (of equal ones the lowest); returns its u, int16 `[components, rows]`.

    `came`, int32 of that shape, is eight times a number whose bit s is 1 if the best path into state s comes by h = 1.
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
    """Combines `flags [..., STATES, rows]`, 0 or 1, to the bits of a number: int32 `[..., rows]`."""
    return torch.matmul(_powers(flags.device), flags).to(torch.int32)


@cache
def _powers(device: torch.device) -> Tensor:
    return 2.0 ** torch.arange(STATES, dtype=torch.float32, device=device)


@cache
def _tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """Two int32 tables: the previous state, by `came` plus the state; and the index of the lowest set bit of a number, or 0."""
    numbers, states = range(1 << STATES), range(STATES)
    before = [state // 2 + STATES // 2 * (number >> state & 1) for number in numbers for state in states]
    lowest = [max(0, (number & -number).bit_length() - 1) for number in numbers]
    return upload(before, torch.int32, device), upload(lowest, torch.int32, device)


def nearest_free(at: Tensor, top: Tensor) -> Tensor:
    """f, 0 ... `top`, of the nearest level of a subset, for `at` in units of four steps from the subset's first level."""
    found = at.round().clamp_(min=0)
    return torch.minimum(found, top, out=found)
