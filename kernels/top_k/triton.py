"""The k largest scores on a GPU by radix select: four digits of 8 bits say which score is the k-th, a last pass collects.

A program for a row and head. Counts are whole numbers, so that no order of addition shows; a score's position among those chosen
is the count of chosen ones before it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from calib.kernels.ahead_of_time import Specialisation

# Scores in registers at once, 16 a lane; both counts of a tile fit in the halves of one number.
TILE, LEAST = 8192, 512
SIGN = tl.constexpr(-(2**31))
NEVER = tl.constexpr(0x007FFFFF)  # what -inf becomes
DIGITS = tl.constexpr(256)


@triton.jit
def rising(scores):
    """uint32 in the order of float32 scores; 0.0 and -0.0 are one number."""
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | SIGN)).to(tl.uint32, bitcast=True)


@triton.jit
def largest(scores, ends, chosen, row_stride, head_stride, heads, tokens, k, TILE: tl.constexpr):
    """Writes `chosen [rows, heads, k]` of `scores [rows, heads, tokens]`, or of those between a row's two `ends`."""
    pair = tl.cast(tl.program_id(0), tl.int64)
    row = pair // heads
    own = scores + row * row_stride + pair % heads * head_stride
    chosen += pair * k
    position = tl.arange(0, TILE)
    first, stop = 0, tokens
    if ends is not None:
        first, stop = tl.maximum(tl.load(ends + row * 2), 0), tl.minimum(tl.load(ends + row * 2 + 1), tokens)
    from_tile = first // TILE * TILE  # tiles begin where they always do, so that a lane's scores are read together

    # The key of the k-th largest score, from its highest digit on: `wanted` of those that agree so far are chosen.
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

    # Everything above it, and of its equals the first `wanted`.
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
        tl.store(chosen + slot, (at + position).to(tl.int64), mask=is_above | (is_equal & (equals <= wanted)))
        total = tl.sum(marks, 0)
        above += total & 0xFFFF
        equal += total >> 16
    written = above + tl.minimum(equal, wanted)
    for at in range(0, k, TILE):
        slot = at + position
        nowhere = tl.full([TILE], -1, tl.int64)
        tl.store(chosen + slot, nowhere, mask=(slot >= written) & (slot < k))


def supports(scores: Tensor) -> bool:
    """Whether the kernel takes these: float32, the scores of a row side by side."""
    return scores.dtype == torch.float32 and scores.stride(-1) == 1


def top_k(scores: Tensor, k: int, ends: Tensor | None = None) -> Tensor:
    """What `reference.top_k` gives."""
    rows, heads, tokens = scores.shape
    chosen = torch.empty(rows, heads, k, dtype=torch.int64, device=scores.device)
    if chosen.numel():
        tile = min(TILE, max(LEAST, triton.next_power_of_2(tokens)))
        with torch.cuda.device_of(scores):
            largest[(rows * heads,)](
                scores, ends if ends is None else ends.contiguous(), chosen, scores.stride(0), scores.stride(1),
                heads, tokens, k, TILE=tile, num_warps=_warps(tile),
            )  # fmt: skip
    return chosen


def _warps(tile: int) -> int:
    return max(4, tile // 512)


def _specialisation(tile: int, ends: bool) -> Specialisation:
    types = {"scores": "*fp32", "ends": "*i32", "chosen": "*i64"} | dict.fromkeys(("heads", "tokens", "k"), "i32")
    types |= dict.fromkeys(("row_stride", "head_stride"), "i32:16")
    return Specialisation(largest, types, {"TILE": tile} | ({} if ends else {"ends": None}), _warps(tile))


SPECIALISATIONS = {
    "whole tiles between ends": _specialisation(TILE, ends=True),
    "few blocks": _specialisation(LEAST, ends=False),
}
