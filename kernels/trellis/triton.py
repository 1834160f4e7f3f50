# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, assignment"
"""Trellis encoding in Triton; the bits equal those of `reference.py`.

A program handles some tokens of one KV head, one per lane. The costs of the 8 states are in registers. Which of the two previous
states a state was reached from is a bit in a byte per component, stored in memory for the backward pass. Multiplications and
additions must not be fused, so every launch has `enable_fp_fusion=False`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from calib.kernels.ahead_of_time import Specialisation
from calib.kernels.launch import launch
from calib.kernels.pack.heads import first_words
from calib.kernels.pack.reference import Widths
from calib.kernels.trellis.reference import FAR, OUTSIDE

TOKENS = 32  # tokens of a program
BEHIND = 3  # components behind a head's own after which all paths end in state 0 (README.md)
# Adding and subtracting this number rounds much smaller numbers to integers, halves to even.
ROUNDS = tl.constexpr(1.5 * 2**23)
_OUTSIDE, _FAR = tl.constexpr(OUTSIDE), tl.constexpr(FAR)


@triton.constexpr_function
def half_of(widths, plane):
    """Number of values of a field's f: 2^(b-1)."""
    return float(1 << widths[plane] - 1)


@triton.constexpr_function
def begin_of(widths, plane):
    """Lowest bit of a field in its word."""
    return sum(widths[:plane])


@triton.constexpr_function
def came_by(state, third):
    """Subset 2 z1 + z0 of a component on the transition to `state`, which holds u[n], u[n-1], u[n-2], from the previous state with
    u[n-3] = `third`."""
    return 2 * ((state + state // 2 + third) % 2) + state // 4


@triton.jit
def _in_steps(at, mask, HALF: tl.constexpr):
    """Loads components in steps from level 0, clamped as by `reference.inside`; 0 is loaded where there is no token."""
    scaled = tl.load(at, mask=mask, other=0.0) * (2 * HALF)
    steps = scaled + (2 * HALF - 0.5)
    steps = tl.where(steps == steps, steps, -_OUTSIDE)
    return tl.minimum(tl.maximum(steps, -_OUTSIDE), 4 * (HALF - 1) + _OUTSIDE)


@triton.jit
def _nearest_free(at, HALF: tl.constexpr):
    """f of the nearest level of a subset, for `at` in units of four steps from the subset's first level."""
    return tl.minimum(tl.maximum((at + ROUNDS) - ROUNDS, 0.0), HALF - 1)


@triton.jit
def _error(steps, z: tl.constexpr, HALF: tl.constexpr):
    """Squared error of the nearest level of subset z, in units of four steps."""
    left = steps * 0.25 - z * 0.25
    left = left - _nearest_free(left, HALF)
    return left * left


@triton.jit(do_not_specialize=["lines"])
def search(
    Y, WEIGHTS, FIRST, WAYS, WORDS, tokens, heads, lines, row_words,
    WIDTHS: tl.constexpr, FIELDS: tl.constexpr, W: tl.constexpr, EXTRA: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Viterbi search. Y is `[rows, heads, tokens, FIELDS * W]`, WEIGHTS `[heads, FIELDS * W]`, WAYS scratch memory with a byte per
    component and lane of all programs. Stores WORDS `[rows, tokens, row_words]`. FIRST: offset of each head's words in a row.
    Programs are numbered on one axis, the `lines` = rows * heads fastest: a second axis would be limited to 65,535 blocks of
    tokens."""
    of_row, block = tl.program_id(0) % lines, tl.program_id(0) // lines
    head, lanes = of_row % heads, block * BN + tl.arange(0, BN)
    mask = lanes < tokens
    first = tl.load(FIRST + head)
    own = tl.load(FIRST + head + 1) - first
    y = Y + (of_row.to(tl.int64) * tokens + lanes) * (FIELDS * W)
    weights = WEIGHTS + head * (FIELDS * W)
    room = tl.num_programs(0).to(tl.int64) * BN
    ways = WAYS + tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)

    nothing = tl.zeros([BN], tl.float32)
    far = tl.full([BN], _FAR, tl.float32)
    costs = (nothing, far, far, far, far, far, far, far)
    for word in range(tl.minimum(own + EXTRA, W)):
        for field in tl.static_range(FIELDS):
            steps = _in_steps(y + field * W + word, mask, half_of(WIDTHS, field))
            errors = ()
            for z in tl.static_range(4):
                errors += (_error(steps, z, half_of(WIDTHS, field)),)
            least = tl.minimum(tl.minimum(errors[0], errors[1]), tl.minimum(errors[2], errors[3]))
            weight = 16 * tl.load(weights + field * W + word)
            after, taken = (), tl.zeros([BN], tl.int32)
            for state in tl.static_range(8):
                low = (errors[came_by(state, 0)] - least) * weight + costs[state // 2]
                high = (errors[came_by(state, 1)] - least) * weight + costs[state // 2 + 4]
                taken += tl.where(high < low, 1 << state, 0)
                after += (tl.minimum(low, high),)
            costs = after
            tl.store(ways + (word * FIELDS + field) * room, taken.to(tl.uint8))

    # Start from the state of least cost, of equal ones the lowest, and trace back.
    state, cost = tl.full([BN], 7, tl.int32), costs[7]
    for other in tl.static_range(6, -1, -1):
        better = costs[other] <= cost
        state, cost = tl.where(better, other, state), tl.where(better, costs[other], cost)
    for back in range(tl.minimum(own + EXTRA, W)):
        word = tl.minimum(own + EXTRA, W) - 1 - back
        stored = tl.zeros([BN], tl.int32)
        for field in tl.static_range(FIELDS - 1, -1, -1):
            taken = tl.load(ways + (word * FIELDS + field) * room).to(tl.int32)
            u, before = state & 1, (state >> 1) + 4 * ((taken >> state) & 1)
            subset = 2 * ((u ^ before ^ (before >> 2)) & 1) + ((before >> 1) & 1)
            steps = _in_steps(y + field * W + word, mask, half_of(WIDTHS, field))
            free = _nearest_free((steps - subset.to(tl.float32)) * 0.25, half_of(WIDTHS, field)).to(tl.int32)
            stored |= (u + 2 * free) << begin_of(WIDTHS, field)
            state = before
        at = WORDS + (of_row // heads * tokens + lanes).to(tl.int64) * row_words + first + word
        tl.store(at, stored.to(tl.int16), mask=lanes < tl.where(word < own, tokens, 0))


def trellis_words(y: Tensor, widths: Widths, counts: tuple[int, ...], weights: Tensor) -> Tensor:
    """As `operation.trellis_words`."""
    rows, heads, tokens, components = y.shape
    words = torch.empty(rows, 1, tokens, sum(counts), dtype=torch.int16, device=y.device)
    grid = (rows * heads * triton.cdiv(tokens, TOKENS),)
    ways = torch.empty(components * grid[0] * TOKENS, dtype=torch.uint8, device=y.device)
    if words.numel():
        with torch.cuda.device_of(y):  # Triton launches on the current device
            launch(
                search, grid,
                y.contiguous(), weights.contiguous(), first_words(counts, y.device), ways, words, tokens, heads, rows * heads,
                sum(counts), **constants_of(widths, counts), num_warps=1, enable_fp_fusion=False,
            )  # fmt: skip
    return words


def constants_of(widths: Widths, counts: tuple[int, ...]) -> dict[str, object]:
    """Constants of the kernel."""
    extra = -(-BEHIND // len(widths))
    return {"WIDTHS": widths, "FIELDS": len(widths), "W": max(counts), "EXTRA": extra, "BN": TOKENS}


def _specialisation(widths: Widths, counts: tuple[int, ...]) -> Specialisation:
    types = dict.fromkeys(("Y", "WEIGHTS"), "*fp32") | {"FIRST": "*i32", "WAYS": "*u8", "WORDS": "*i16"}
    types |= dict.fromkeys(("tokens", "heads", "lines", "row_words"), "i32")
    return Specialisation(search, types, constants_of(widths, counts), warps=1, fusion=False)


SPECIALISATIONS = {
    "6 4 3 2 1 bits, 16 words": _specialisation((6, 4, 3, 2, 1), (16, 16)),
    "1 bit, 8 words": _specialisation((1,) * 16, (8, 8)),
}
