"""Positions of the k largest scores on a GPU by radix select: four passes over digits of 8 bits find the k-th largest score, and a
last pass collects the positions.

A program handles a row and head. Counts are integers, so the order of additions does not matter; a score's index among the chosen
ones is the number of chosen ones before it.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from calib.kernels.ahead_of_time import Specialisation
from calib.kernels.launch import launch

# Scores in registers at once, 8 per lane; two counts of a tile fit the halves of one 32-bit number.
TILE, LEAST = 8192, 512
SIGN = tl.constexpr(-(2**31))
NEVER = tl.constexpr(0x007FFFFF)  # key of -inf
DIGITS = tl.constexpr(256)


@triton.jit
def rising(scores):
    """Maps float32 scores to uint32 keys of the same order; 0.0 and -0.0 get the same key."""
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | SIGN)).to(tl.uint32, bitcast=True)


@triton.jit
def largest(scores, ends, chosen, others, row_stride, head_stride, heads, tokens, k, TILE: tl.constexpr):
    """Stores to `chosen [rows, heads, k]` the positions of the k largest of `scores [rows, heads, tokens]`, or of those between a
    row's two `ends`. With `others [rows, heads, tokens - k]` all positions are divided between both: -inf is then treated as any
    score."""
    pair = tl.cast(tl.program_id(0), tl.int64)
    row = pair // heads
    own = scores + row * row_stride + pair % heads * head_stride
    chosen += pair * k
    if others is not None:
        others += pair * (tokens - k)
    position = tl.arange(0, TILE)
    first, stop = 0, tokens
    if ends is not None:
        first, stop = tl.maximum(tl.load(ends + row * 2), 0), tl.minimum(tl.load(ends + row * 2 + 1), tokens)
    from_tile = first // TILE * TILE  # tiles are aligned, so that loads are wide

    # Find the key of the k-th largest score, digit by digit: of the keys that agree in the digits so far, `wanted` are chosen.
    kth = tl.full([], 0, tl.uint32)
    agreed = tl.full([], 0, tl.uint32)
    wanted = tl.minimum(tl.cast(k, tl.int32), tl.maximum(stop - first, 0))
    for step in range(4):
        shift = tl.cast(24 - 8 * step, tl.uint32)
        counts = tl.zeros([DIGITS], tl.int32)
        for at in range(from_tile, stop, TILE):
            inside = (at + position >= first) & (at + position < stop)
            keys = rising(tl.load(own + at + position, mask=inside, other=0.0))
            digits = ((keys >> shift) & (DIGITS - 1)).to(tl.int32)
            counts += tl.histogram(digits, DIGITS, mask=inside & ((keys & agreed) == kth))
        at_least = tl.cumsum(counts, 0, reverse=True)
        digit = tl.sum((at_least >= wanted).to(tl.int32), 0) - 1
        wanted -= tl.sum(tl.where(tl.arange(0, DIGITS) > digit, counts, 0), 0)
        kth |= digit.to(tl.uint32) << shift
        agreed |= tl.cast(DIGITS - 1, tl.uint32) << shift

    # Choose all keys above it, and the first `wanted` of the equal ones.
    if others is None:
        wanted = tl.where(kth == NEVER, 0, wanted)
    above = tl.full([], 0, tl.int32)
    equal = tl.full([], 0, tl.int32)
    for at in range(from_tile, stop, TILE):
        inside = (at + position >= first) & (at + position < stop)
        keys = rising(tl.load(own + at + position, mask=inside, other=0.0))
        is_above = inside & (keys > kth)
        is_equal = inside & (keys == kth)
        marks = is_above.to(tl.int32) | (is_equal.to(tl.int32) << 16)  # one scan counts both
        counted = tl.cumsum(marks, 0)
        equals = equal + (counted >> 16)
        slot = above + (counted & 0xFFFF) + tl.minimum(equals, wanted) - 1
        is_chosen = is_above | (is_equal & (equals <= wanted))
        tl.store(chosen + slot, (at + position).to(tl.int64), mask=is_chosen)
        if others is not None:  # index: position minus the number of chosen ones before it
            behind = at + position - slot - 1
            tl.store(others + behind, (at + position).to(tl.int64), mask=inside & (is_chosen == 0))
        total = tl.sum(marks, 0)
        above += total & 0xFFFF
        equal += total >> 16
    if others is None:
        written = above + tl.minimum(equal, wanted)
        for at in range(0, k, TILE):
            slot = at + position
            nowhere = tl.full([TILE], -1, tl.int64)
            tl.store(chosen + slot, nowhere, mask=(slot >= written) & (slot < k))


def supports(scores: Tensor) -> bool:
    """Whether the kernel supports these scores: float32, contiguous along the last axis."""
    return scores.dtype == torch.float32 and scores.stride(-1) == 1


def top_k(scores: Tensor, k: int, ends: Tensor | None = None) -> Tensor:
    """As `operation.top_k`."""
    chosen = _room(scores, k)
    if chosen.numel():
        _launch(scores, ends if ends is None else ends.contiguous(), chosen, None)
    return chosen


def divided(scores: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """As `operation.divided`: each launch selects a part from the positions that earlier ones left."""
    found = list[Tensor]()
    left: Tensor | None = None  # positions that are in no part yet; `scores` are their scores
    for count in counts:
        chosen, others = _room(scores, count), _room(scores, scores.shape[2] - count)
        if scores.numel():
            _launch(scores, None, chosen, others)
        found.append(chosen if left is None else left.gather(2, chosen))
        if len(found) + 1 == len(counts) and counts[-1] == others.shape[2]:  # nothing is left to be divided
            return [*found, others if left is None else left.gather(2, others)]
        scores, left = scores.gather(2, others), others if left is None else left.gather(2, others)
    return found


def _room(scores: Tensor, count: int) -> Tensor:
    return torch.empty(*scores.shape[:2], count, dtype=torch.int64, device=scores.device)


def _launch(scores: Tensor, ends: Tensor | None, chosen: Tensor, others: Tensor | None) -> None:
    rows, heads, tokens = scores.shape
    tile = min(TILE, max(LEAST, triton.next_power_of_2(tokens)))
    with torch.cuda.device_of(scores):
        launch(
            largest, (rows * heads,),
            scores, ends, chosen, others, scores.stride(0), scores.stride(1), heads, tokens, chosen.shape[2],
            TILE=tile, num_warps=_warps(tile),
        )  # fmt: skip


def _warps(tile: int) -> int:
    """Warps of a program. There are few programs, one per row and head, so that each needs many warps to hide latency."""
    return max(4, tile // 256)


def _specialisation(tile: int, *asked: str) -> Specialisation:
    types = {"scores": "*fp32", "chosen": "*i64"} | dict.fromkeys(("heads", "tokens", "k"), "i32")
    types |= dict.fromkeys(("row_stride", "head_stride"), "i32:16")
    optional = {"ends": "*i32", "others": "*i64"}
    types |= {name: optional[name] for name in asked}
    absent = dict.fromkeys(optional.keys() - set(asked))
    return Specialisation(largest, types, {"TILE": tile} | absent, _warps(tile))


SPECIALISATIONS = {
    "whole tiles between ends": _specialisation(TILE, "ends"),
    "few blocks": _specialisation(LEAST),
    "a prompt in two tiers": _specialisation(TILE, "others"),
}
