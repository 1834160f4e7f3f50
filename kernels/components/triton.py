# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, assignment"
"""Components of tokens and their words in Triton, bit by bit as the transform and codec stages compute them in plain torch.

A program handles some tokens of one KV head. A channel divided by its unit is an integer up to 2^22 in magnitude, an entry of the
basis a 16-bit integer. Both are split into digits of 8 bits, whose products matrix instructions sum exactly. The lower digit of an
entry, 0 to 255, is stored less 128; 128 times the sum of all channels corrects this. The sums are combined in 64 bits and rounded
once, as torch rounds its own sum in float64.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from calib.kernels.ahead_of_time import Specialisation
from calib.kernels.attend.loads import size_of
from calib.kernels.attend.packed_pages import SIZE_BITS, SIZE_OF_ONE
from calib.kernels.components.projection import TOKEN_BITS, Projection
from calib.kernels.launch import launch
from calib.kernels.pack.heads import first_words
from calib.kernels.pack.reference import Widths

SUMS = 32 * 128  # sums of a program: tokens x components
MOST_TOKENS, LEAST_TOKENS = 32, 16
CHANNELS = 32  # channels of a loop iteration
WARPS = 4
MOST_CHANNELS = 2**15  # so that sums of products of digits fit 32 bits

# Adding and subtracting this number rounds much smaller numbers to integers, halves to even.
_ROUNDS = tl.constexpr(1.5 * 2**23)
_MOST, _NORM_BITS = tl.constexpr(float(1 << TOKEN_BITS)), tl.constexpr(22)  # the latter as in `stages/exact_sums.py`
_SIZES = tl.constexpr(1 << SIZE_BITS)


@triton.constexpr_function
def edge_after(number):
    """Boundary between the sizes `number` and `number` + 1: their geometric mean."""
    return 2.0 ** ((number + 0.5 - SIZE_OF_ONE) / 2)


@triton.constexpr_function
def half_of(widths, field):
    """Half of the largest code of a field, which stands for 0."""
    return ((1 << widths[field]) - 1) / 2


@triton.constexpr_function
def factor_of(widths, field):
    """Factor of a field's code in its word: 2^(first bit)."""
    return float(1 << sum(widths[:field]))


@triton.jit
def _digit(whole):
    """Splits int32 numbers into the lowest digit, int8 -128 ... 127, and the rest divided by 256."""
    low = ((whole + 128) & 255) - 128
    return low.to(tl.int8), (whole - low) >> 8


@triton.jit
def _power(exponent):
    """2^exponent in float32, for int32 exponents from -126 to 127."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _size_numbers(weighted):
    """Number of each token's size, int32 [BN], from its weighted components `weighted [BN, NP]`: the size nearest to their norm.
    The squares are summed exactly, as integers in a unit chosen per token."""
    largest = tl.maximum(tl.max(tl.abs(weighted), 1), 2.0**-126)
    up = _NORM_BITS - ((largest.to(tl.int32, bitcast=True) >> 23) - 126)
    half = up >> 1  # 2^up itself may exceed float32
    whole = (weighted * _power(half)[:, None] * _power(up - half)[:, None] + _ROUNDS) - _ROUNDS
    whole = whole.to(tl.int32).to(tl.int64)
    total = tl.sum(whole * whole, 1).to(tl.float64)
    unit = ((1023 - up).to(tl.int64) << 52).to(tl.float64, bitcast=True)
    mean = (tl.sqrt(total) * unit).to(tl.float32)
    number = (mean > edge_after(0)).to(tl.int32)
    for edge in tl.static_range(1, _SIZES - 1):
        number += (mean > edge_after(edge)).to(tl.int32)
    return number


@triton.jit(do_not_specialize=["lines"])
def project(
    X, MEAN, UNIT, INTO, SCALE, WEIGHTS, FIRST, WORDS, COMPONENTS, NUMBERS,
    tokens, heads, lines, row_words, row_stride, head_stride, token_stride,
    WIDTHS: tl.constexpr, FIELDS: tl.constexpr, W: tl.constexpr, WP: tl.constexpr, D: tl.constexpr, NP: tl.constexpr,
    SIZED: tl.constexpr, CODED: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """X is `[rows, heads, tokens, D]`, MEAN and UNIT `[heads, D]`, INTO `[heads, D, FIELDS * W]`, SCALE and WEIGHTS
    `[heads, FIELDS * W]`, FIRST the offset of each head's words in a row. Store WORDS `[rows, tokens, row_words]` if CODED, else
    COMPONENTS `[rows, heads, tokens, FIELDS * W]`. SIZED: components are divided by the tokens' sizes, whose NUMBERS
    `[rows, heads, tokens]` are stored. Programs are numbered on one axis, the `lines` = rows * heads fastest: a second axis would
    be limited to 65,535 blocks of tokens."""
    N: tl.constexpr = FIELDS * W
    of_row, block = (tl.program_id(0) % lines).to(tl.int64), tl.program_id(0) // lines
    row, head = of_row // heads, of_row % heads
    lanes = block * BN + tl.arange(0, BN)
    inside = lanes < tokens
    own = tl.arange(0, NP)
    valid = own < N

    at = X + row * row_stride + head * head_stride + lanes.to(tl.int64) * token_stride
    first = tl.zeros([BN, NP], tl.int32)
    second, third, fourth = first, first, first
    mass = tl.zeros([BN], tl.int64)
    for start in range(0, D, BD):
        channels = start + tl.arange(0, BD)
        here = channels < D
        x = tl.load(at[:, None] + channels[None, :], mask=inside[:, None] & here[None, :], other=0.0).to(tl.float32)
        mean = tl.load(MEAN + head * D + channels, mask=here, other=0.0)
        unit = tl.load(UNIT + head * D + channels, mask=here, other=1.0)
        x = (x - mean[None, :]) * tl.div_rn(1.0, unit)[None, :]
        x = tl.minimum(tl.maximum(x, -_MOST), _MOST)
        whole = ((x + _ROUNDS) - _ROUNDS).to(tl.int32)
        mass += tl.sum(whole, 1).to(tl.int64)
        x_0, rest = _digit(whole)
        x_1, rest = _digit(rest)
        x_2 = rest.to(tl.int8)
        entries = INTO + head * (D * N) + channels[:, None] * N + own[None, :]
        entry = tl.load(entries, mask=here[:, None] & valid[None, :], other=0).to(tl.int32)
        low, high = ((entry & 255) - 128).to(tl.int8), (entry >> 8).to(tl.int8)
        first = tl.dot(x_0, low, first, out_dtype=tl.int32)
        second = tl.dot(x_1, low, tl.dot(x_0, high, second, out_dtype=tl.int32), out_dtype=tl.int32)
        third = tl.dot(x_2, low, tl.dot(x_1, high, third, out_dtype=tl.int32), out_dtype=tl.int32)
        fourth = tl.dot(x_2, high, fourth, out_dtype=tl.int32)
    total = (fourth.to(tl.int64) << 24) + (third.to(tl.int64) << 16) + (second.to(tl.int64) << 8) + first.to(tl.int64)
    total += (mass * 128)[:, None]
    scale = tl.load(SCALE + head * N + own, mask=valid, other=0.0)
    y = total.to(tl.float32) * scale[None, :]

    if SIZED:
        weights = tl.load(WEIGHTS + head * N + own, mask=valid, other=0.0)
        number = _size_numbers(y * weights[None, :])
        tl.store(NUMBERS + of_row * tokens + lanes, number.to(tl.int16), mask=inside)
        y = tl.div_rn(y, size_of(number)[:, None] + tl.zeros_like(y))
    if CODED:
        field, words = own // W, tl.arange(0, WP)
        half, factor = tl.zeros([NP], tl.float32), tl.zeros([NP], tl.float32)
        for one in tl.static_range(FIELDS):
            half = tl.where(field == one, half_of(WIDTHS, one), half)
            factor = tl.where(field == one, factor_of(WIDTHS, one), factor)
        code = y * (half + 0.5)[None, :] + half[None, :]
        code = (tl.minimum(tl.maximum(code, 0.0), 2 * half[None, :]) + _ROUNDS) - _ROUNDS
        # A word is the sum of its codes, each times 2^(first bit of its field): an integer below 2^16.
        table = tl.where((own % W)[:, None] == words[None, :], factor[:, None], 0.0)
        stored = tl.dot(code.to(tl.float16), table.to(tl.float16)).to(tl.int32)
        first_word = tl.load(FIRST + head)
        count = tl.load(FIRST + head + 1) - first_word
        to = WORDS + (row * tokens + lanes)[:, None] * row_words + (first_word + words)[None, :]
        tl.store(to, stored.to(tl.int16), mask=inside[:, None] & (words < count)[None, :])
    else:
        to = COMPONENTS + (of_row * tokens + lanes)[:, None] * N + own[None, :]
        tl.store(to, y, mask=inside[:, None] & valid[None, :])


def projected(
    x: Tensor, projection: Projection, widths: Widths, counts: tuple[int, ...], weights: Tensor | None, coded: bool
) -> tuple[Tensor, Tensor | None]:
    """As `operation.component_words` if `coded`, else as `operation.components`."""
    rows, heads, tokens, channels = x.shape
    x = x if x.stride(3) == 1 else x.contiguous()
    shape = (rows, 1, tokens, sum(counts)) if coded else (rows, heads, tokens, len(widths) * max(counts))
    found = torch.empty(shape, dtype=torch.int16 if coded else torch.float32, device=x.device)
    numbers = None if weights is None else torch.empty(rows, heads, tokens, dtype=torch.int16, device=x.device)
    if rows * tokens:
        constants = constants_of(widths, counts, channels, numbers is not None, coded)
        with torch.cuda.device_of(x):  # Triton launches on the current device
            launch(
                project, (rows * heads * triton.cdiv(tokens, constants["BN"]),),
                x, *projection.tensors(), projection.scale if weights is None else weights, first_words(counts, x.device),
                found, found, found if numbers is None else numbers, tokens, heads, rows * heads, sum(counts),
                *x.stride()[:3],
                **constants, num_warps=WARPS,
            )  # fmt: skip
    return found, numbers


def constants_of(widths: Widths, counts: tuple[int, ...], channels: int, sized: bool, coded: bool) -> dict[str, Any]:
    """Constants of the kernel. Matrix instructions need at least 16 columns."""
    padded, words = (max(16, triton.next_power_of_2(count)) for count in (len(widths) * max(counts), max(counts)))
    return {
        "WIDTHS": widths, "FIELDS": len(widths), "W": max(counts), "WP": words, "D": channels, "NP": padded,
        "SIZED": sized, "CODED": coded, "BN": max(LEAST_TOKENS, min(MOST_TOKENS, SUMS // padded)), "BD": CHANNELS,
    }  # fmt: skip


def _specialisation(
    widths: Widths, words: int, channels: int = 128, sized: bool = False, coded: bool = True
) -> Specialisation:
    types = dict.fromkeys(("MEAN", "UNIT", "SCALE", "WEIGHTS"), "*fp32") | {
        "X": "*bf16",
        "INTO": "*i16",
        "FIRST": "*i32",
    }
    types |= dict.fromkeys(("WORDS", "NUMBERS"), "*i16") | {"COMPONENTS": "*fp32"}
    types |= dict.fromkeys(
        ("tokens", "heads", "lines", "row_words", "row_stride", "head_stride", "token_stride"), "i32"
    )
    constants = constants_of(widths, (words, words), channels, sized, coded)
    return Specialisation(project, types, constants, warps=WARPS)


SPECIALISATIONS = {
    "6 4 3 2 1 bits, 16 words": _specialisation((6, 4, 3, 2, 1), 16),
    "6 4 3 2 1 bits, 16 words, sized": _specialisation((6, 4, 3, 2, 1), 16, sized=True),
    "6 4 3 2 1 bits, for a trellis": _specialisation((6, 4, 3, 2, 1), 16, sized=True, coded=False),
    "1 bit, 8 words, sized": _specialisation((1,) * 16, 8, sized=True),
    "4 bits, heads of 256": _specialisation((4, 4, 4, 4), 64, channels=256),
}
