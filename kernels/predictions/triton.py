# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, assignment"
"""Residuals of values after their prediction from keys, in Triton; the bits equal those of plain torch.

A program handles some tokens of one KV head and some of the values' channels. The numbers 2 c - L of codes c, and both bytes of the
table's entries, are integers that float16 represents, and the sums of their products are below 2^24, so that matrix instructions
compute them exactly. Combined they fit 32 bits and are rounded once, as torch rounds its own sum in float64.
"""

from dataclasses import replace
from functools import cache
from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from calib.kernels.ahead_of_time import Specialisation
from calib.kernels.attend.loads import code_words, own_words, token_sizes
from calib.kernels.attend.options import INTERPRETED, LOAD, wide_of, widths_of
from calib.kernels.attend.packed_pages import PackedStream, PredictedValues
from calib.kernels.attend.signatures import stream_of
from calib.kernels.attend.unpack import codes_of, level_bits, plane_count
from calib.kernels.current_device import launching_on
from calib.kernels.launch import launch
from calib.kernels.pack.heads import first_words
from calib.kernels.pack.reference import Widths
from calib.kernels.powers import cdiv, next_power_of_2

TOKENS, CHANNELS = 16, 64  # most tokens and channels of a program
WARPS = 4
MOST = 2**16  # limit of the sum of a token's numbers: times a byte of the table it is below 2^24


@triton.constexpr_function
def last_of(widths, plane):
    """L, the largest code of a plane."""
    return (1 << level_bits(widths, plane)) - 1


@triton.jit(do_not_specialize=["tokens", "lines"])
def take_off(
    WORDS, FIRST, SIZES, TABLE, UNIT, VALUES, OUT,
    heads, tokens, lines, word_row, size_row, value_row, value_head, value_token,
    WIDTHS: tl.constexpr, ROW: tl.constexpr, PIECE: tl.constexpr, W: tl.constexpr, WP: tl.constexpr, SIZE_WORDS: tl.constexpr,
    D: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Stores OUT `[rows, heads, tokens, D]`. ROW and SIZE_WORDS are the strides of tokens in WORDS and SIZES; TABLE is
    `[heads, planes * W, D]`, UNIT `[heads, D]`. The first axis of programs is `lines` = rows * heads, fastest, times blocks of
    tokens: another axis would be limited to 65,535 of these."""
    N: tl.constexpr = plane_count(WIDTHS) * W
    of_row, block = tl.program_id(0) % lines, tl.program_id(0) // lines
    row, head = (of_row // heads).to(tl.int64), of_row % heads
    token = block.to(tl.int64) * BN + tl.arange(0, BN)
    channels = tl.program_id(1) * BD + tl.arange(0, BD)
    words = tl.arange(0, WP)
    there, here = token < tokens, channels < D
    first, own = own_words(FIRST, head, 0, words, W, PIECE)
    found, odd = code_words(
        WORDS + row * word_row + first + token[:, None] * ROW + words[None, :], words[None, :], own[None, :], there[:, None],
        WIDTHS, False, True, INTERPRET,
    )  # fmt: skip
    planes = codes_of(found, odd, WIDTHS, True, INTERPRET)
    high, low = tl.zeros([BN, BD], tl.float32), tl.zeros([BN, BD], tl.float32)
    for f in tl.static_range(plane_count(WIDTHS)):
        numbers = 2 * planes[f] - last_of(WIDTHS, f)
        entries = TABLE + head * (N * D) + (f * W + words)[:, None] * D + channels[None, :]
        entry = tl.load(entries, mask=(words < W)[:, None] & here[None, :], other=0).to(tl.int32)
        above = (entry + 128) >> 8
        high = tl.dot(numbers, above.to(tl.float16), high)
        low = tl.dot(numbers, (entry - (above << 8)).to(tl.float16), low)
    total = (high.to(tl.int32) << 8) + low.to(tl.int32)
    sizes = token_sizes(SIZES, row * size_row + head % SIZE_WORDS + token * SIZE_WORDS, head, there, SIZE_WORDS, True)
    unit = tl.load(UNIT + head * D + channels, mask=here, other=0.0)
    predicted = total.to(tl.float32) * unit[None, :] * sizes[:, None]
    inside = there[:, None] & here[None, :]
    at = row * value_row + head.to(tl.int64) * value_head + token[:, None] * value_token + channels[None, :]
    values = tl.load(VALUES + at, mask=inside, other=0.0).to(tl.float32)
    to = OUT + (of_row.to(tl.int64) * tokens + token)[:, None] * D + channels[None, :]
    tl.store(to, values - predicted, mask=inside)


def is_exact(keys: PackedStream) -> bool:
    """Whether sums stay within the integers that float32 represents exactly."""
    return wide_of(keys) * _sum_of_last(widths_of(keys)) < MOST


@cache
def _sum_of_last(widths: Widths) -> int:
    return sum(int(last_of(widths, plane)) for plane in range(int(plane_count(widths))))


def unpredicted(values: Tensor, keys: PackedStream, predicted: PredictedValues) -> Tensor:
    """As `operation.unpredicted`."""
    rows, heads, tokens, channels = values.shape
    found = torch.empty(values.shape, dtype=torch.float32, device=values.device)
    if not rows * tokens:
        return found
    assert keys.counts is not None and keys.sizes is not None
    values = values if values.stride(3) == 1 else values.contiguous()
    words, sizes = keys.pages.contiguous(), keys.sizes.contiguous()
    constants = constants_of(keys, channels)
    with launching_on(values):
        launch(
            take_off, (rows * heads * cdiv(tokens, TOKENS), cdiv(channels, constants["BD"])),
            words, first_words(keys.counts, values.device), sizes, predicted.table, predicted.unit, values, found,
            heads, tokens, rows * heads, words.stride(0), sizes.stride(0), *values.stride()[:3],
            **constants, num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return found


def constants_of(keys: PackedStream, channels: int, interpreted: bool = INTERPRETED) -> dict[str, Any]:
    """Constants of the kernel."""
    assert keys.counts is not None and keys.sizes is not None
    wide = wide_of(keys)
    return {
        "WIDTHS": widths_of(keys), "ROW": sum(keys.counts), "PIECE": gcd(LOAD, *keys.counts), "W": wide,
        "WP": max(16, next_power_of_2(wide)), "SIZE_WORDS": keys.sizes.shape[-1], "D": channels, "BN": TOKENS,
        "BD": max(16, min(CHANNELS, next_power_of_2(channels))), "INTERPRET": interpreted,
    }  # fmt: skip


def _specialisation(channels: int = 128, trellis: bool = False) -> Specialisation:
    own = stream_of((6, 4, 3, 2, 1), channels=80, counts=(16, 16))
    keys = replace(own, trellis=trellis, sizes=torch.empty(1, 1, 64, 1, dtype=torch.int16, device="meta"))
    types = dict.fromkeys(("WORDS", "SIZES", "TABLE"), "*i16") | dict.fromkeys(("UNIT", "OUT"), "*fp32")
    types |= {"FIRST": "*i32", "VALUES": "*bf16"}
    types |= dict.fromkeys(
        ("heads", "tokens", "lines", "word_row", "size_row", "value_row", "value_head", "value_token"), "i32"
    )
    return Specialisation(take_off, types, constants_of(keys, channels, interpreted=False), warps=WARPS, fusion=False)


SPECIALISATIONS = {
    "6 4 3 2 1 bits, 16 words": _specialisation(),
    "6 4 3 2 1 bits, trellis": _specialisation(trellis=True),
    "values of 256 channels": _specialisation(256),
}
