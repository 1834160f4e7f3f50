"""Quantise and pack in one go: a tile's planes are read one after the other, so that packing is elementwise.

`token_groups` has parameters per token; `by_planes` parameters per channel of a block of tokens, or those that are there already
(a calibrated range, or groups of other shapes that plain torch has measured). Both read x `[rows, kv_heads, T, D]` by its
strides, gather by `order` and transform on the way, and write words `[rows, kv_heads, n, W]`.

The bits are the reference's, so no product may be joined to a sum: every launch says `enable_fp_fusion=False`.
"""

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from calib.kernels.ahead_of_time import Specialisation
from calib.kernels.pack.reference import words_per_token
from calib.kernels.powers import cdiv, next_power_of_2
from calib.kernels.quantise.arithmetic import code_fields, divisor, load_values, scale_and_zero, source_positions
from calib.kernels.quantise.prologue import IDENTITY, Prologue
from calib.kernels.quantise.reference import stored_parameters

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
WIDEST = 512  # channels
LONGEST = 128  # tokens of a group per channel: a program holds them all
TILE = 2048  # values of a plane that a program holds

new_buffer = torch.empty  # every result lies in one of these


@triton.jit(do_not_specialize=["total", "rows"])  # nothing is compiled again for another number of tokens
def token_groups(
    x, order, center, half, balance, clip, words, parameters, x_1, clip_1, words_1, parameters_1, ratio, ratio_1, total, rows,
    s_row, s_head, s_token, s_channel,
    D: tl.constexpr, BITS: tl.constexpr, W: tl.constexpr, SPAN: tl.constexpr, RUNS: tl.constexpr, RUN: tl.constexpr,
    TOKENS: tl.constexpr, RUNS_UP: tl.constexpr, RUN_UP: tl.constexpr,
):  # fmt: skip
    """Groups (1, g) of x, and behind its rows of x_1, which lies alike and has no prologue; None is not there."""
    row = tl.program_id(2)
    if x_1 is None:
        grouped(
            x, order, center, half, balance, clip, words, parameters, ratio, total, row, s_row, s_head, s_token, s_channel,
            D, BITS, W, SPAN, RUNS, RUN, TOKENS, RUNS_UP, RUN_UP,
        )  # fmt: skip
    elif row < rows:
        grouped(
            x, None, None, None, None, clip, words, parameters, ratio, total, row, s_row, s_head, s_token, s_channel,
            D, BITS, W, SPAN, RUNS, RUN, TOKENS, RUNS_UP, RUN_UP,
        )  # fmt: skip
    else:
        grouped(
            x_1, None, None, None, None, clip_1, words_1, parameters_1, ratio_1, total, row - rows, s_row, s_head, s_token,
            s_channel, D, BITS, W, SPAN, RUNS, RUN, TOKENS, RUNS_UP, RUN_UP,
        )  # fmt: skip


@triton.jit
def grouped(
    x, order, center, half, balance, clip, words, parameters, ratio, total, row, s_row, s_head, s_token, s_channel,
    D: tl.constexpr, BITS: tl.constexpr, W: tl.constexpr, SPAN: tl.constexpr, RUNS: tl.constexpr, RUN: tl.constexpr,
    TOKENS: tl.constexpr, RUNS_UP: tl.constexpr, RUN_UP: tl.constexpr,
):  # fmt: skip
    """A plane has RUNS runs of RUN channels; a group is one run, or the only run of each of SPAN planes."""
    head, row = tl.program_id(1).to(tl.int64), row.to(tl.int64)
    COLUMNS: tl.constexpr = (D + SPAN * RUN - 1) // (SPAN * RUN)
    HALF: tl.constexpr = parameters.dtype.element_ty == tl.float16
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None, None]
    run = tl.arange(0, RUNS_UP)[None, :, None]
    cell = tl.arange(0, RUN_UP)[None, None, :]
    inside = (run < RUNS) & (cell < RUN)
    positions = source_positions(order, row, head, tokens, total)
    first = (row * tl.num_programs(1) + head) * total
    factor = ratio
    if clip is not None:
        factor = tl.load(clip + head) * ratio
    word = tl.zeros([TOKENS, RUNS_UP, RUN_UP], tl.int32)
    for at in tl.static_range(0, (D + W - 1) // W, SPAN):
        low = tl.full([TOKENS, RUNS_UP, RUN_UP], float("inf"), tl.float32)
        high = tl.full([TOKENS, RUNS_UP, RUN_UP], float("-inf"), tl.float32)
        for plane in tl.static_range(at, at + SPAN):
            channels = plane * W + run * RUN + cell
            valid = inside & (channels < D)
            y = load_values(
                x, center, half, balance, row, head, positions, channels, valid & (tokens < total),
                s_row, s_head, s_token, s_channel, D,
            )  # fmt: skip
            low = tl.minimum(low, tl.where(valid, y, float("inf")))
            high = tl.maximum(high, tl.where(valid, y, float("-inf")))
        low, high = tl.min(low, 2, keep_dims=True), tl.max(high, 2, keep_dims=True)
        scale, zero = scale_and_zero(low, high, factor, BITS, HALF)
        column = at // SPAN * RUNS + run
        into = parameters + (first + tokens) * (2 * COLUMNS) + column
        kept = (tokens < total) & (run < RUNS) & (column < COLUMNS)
        tl.store(into, scale.to(parameters.dtype.element_ty), mask=kept)
        tl.store(into + COLUMNS, zero.to(parameters.dtype.element_ty), mask=kept)
        negative, reciprocal, most = divisor(scale, BITS, HALF)
        for plane in tl.static_range(at, at + SPAN):
            channels = plane * W + run * RUN + cell
            valid = inside & (channels < D)
            if SPAN > 1:  # read again, near by; registers would not hold all planes
                y = load_values(
                    x, center, half, balance, row, head, positions, channels, valid & (tokens < total),
                    s_row, s_head, s_token, s_channel, D,
                )  # fmt: skip
            word |= tl.where(valid, code_fields(y, zero, negative, reciprocal, most, plane, BITS, HALF), 0)
    into = words + (first + tokens) * W + run * RUN + cell
    tl.store(into, word.to(tl.int16), mask=inside & (tokens < total))


@triton.jit(do_not_specialize=["p_row", "p_head", "step", "group", "total"])
def by_planes(
    x, order, center, half, balance, clip, words, parameters, bound, ratio, p_row, p_head, step, group, total,
    s_row, s_head, s_token, s_channel,
    D: tl.constexpr, BITS: tl.constexpr, W: tl.constexpr, COLUMN: tl.constexpr, MEASURED: tl.constexpr,
    TOKENS: tl.constexpr, W_UP: tl.constexpr, D_UP: tl.constexpr,
):  # fmt: skip
    """`step` tokens with the `parameters` of groups (group, COLUMN), or the range [-bound, bound] where there are none. Of these
    a row has `p_row` and a head `p_head` groups of tokens; what lies between two is a constant, so that loads may be wide.

    MEASURED: the tokens are a group (step, 1) and their parameters are found here.
    """
    head, row = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    slot = tl.arange(0, TOKENS)[:, None]
    tokens = tl.program_id(0) * step + slot
    here = (slot < step) & (tokens < total)
    # A group may have fewer tokens than the tile: its last one again changes neither extreme.
    positions = source_positions(order, row, head, tl.minimum(tokens, tl.program_id(0) * step + step - 1), total)
    COLUMNS: tl.constexpr = D // COLUMN
    HALF: tl.constexpr = parameters is not None and parameters.dtype.element_ty == tl.float16
    factor = ratio
    if clip is not None:
        factor = tl.load(clip + head) * ratio
    if MEASURED:
        channels = tl.arange(0, D_UP)[None, :]
        mask = (slot >= 0) & (channels < D)
        y = load_values(
            x, center, half, balance, row, head, positions, channels, mask, s_row, s_head, s_token, s_channel, D
        )
        low, high = tl.min(y, 0, keep_dims=True), tl.max(y, 0, keep_dims=True)
        scale, zero = scale_and_zero(low, high, factor, BITS, HALF)
        into = parameters + (row * p_row + head * p_head + tl.program_id(0)) * (2 * D) + channels
        tl.store(into, scale.to(parameters.dtype.element_ty), mask=channels < D)
        tl.store(into + D, zero.to(parameters.dtype.element_ty), mask=channels < D)
        tl.debug_barrier()  # the program's other threads read them, and the same tokens again, near by
    else:
        if clip is not None:
            bound = tl.load(clip + head)
        bound = tl.full([1, 1], bound, tl.float32)  # the interpreter would multiply two numbers of Python's
        scale, zero = bound * ratio, -bound
        negative, reciprocal, most = divisor(scale, BITS, HALF)
    cell = tl.arange(0, W_UP)[None, :]
    word = tl.zeros([TOKENS, W_UP], tl.int32)
    for plane in tl.static_range(0, (D + W - 1) // W):
        channels = plane * W + cell
        valid = (cell < W) & (channels < D)
        mask = valid & here
        y = load_values(
            x, center, half, balance, row, head, positions, channels, mask, s_row, s_head, s_token, s_channel, D
        )
        if parameters is not None:
            if MEASURED:
                own = parameters + (row * p_row + head * p_head + tl.program_id(0)) * (2 * D) + channels
                scale = tl.load(own, mask=valid, other=1.0).to(tl.float32)
                zero = tl.load(own + D, mask=valid, other=0.0).to(tl.float32)
            else:
                groups = row * p_row + head * p_head + tokens // group
                own = parameters + groups * (2 * COLUMNS) + channels // COLUMN
                scale = tl.load(own, mask=mask, other=1.0).to(tl.float32)
                zero = tl.load(own + COLUMNS, mask=mask, other=0.0).to(tl.float32)
            negative, reciprocal, most = divisor(scale, BITS, HALF)
        word |= tl.where(valid, code_fields(y, zero, negative, reciprocal, most, plane, BITS, HALF), 0)
    into = words + ((row * tl.num_programs(1) + head) * total + tokens) * W + cell
    tl.store(into, word.to(tl.int16), mask=(cell < W) & here)


def supports(x: Tensor, clip: Tensor | float, prologue: Prologue = IDENTITY) -> bool:
    """Every number of bits and every group: those that no kernel measures in its pass are measured by torch."""
    by_head = not isinstance(clip, Tensor) or clip.shape in ((x.shape[1], 1, 1), (1, 1, 1))
    some = x.numel() > 0 and (prologue.order is None or prologue.order.numel() > 0)
    return x.dim() == 4 and x.dtype in DTYPES and x.shape[-1] <= WIDEST and by_head and some


def in_one_pass(x: Tensor, group: tuple[int, int] | None, bits: int, clip: Tensor | float) -> bool:
    """As `operation.encodes_in_one_pass`."""
    measured = group is None or _by_tokens(group, x.shape[-1], bits) or _by_channels(group)
    return supports(x, clip) and measured


def encode_uniform(
    x: Tensor,
    group: tuple[int, int],
    bits: int,
    clip: Tensor | float,
    parameter_dtype: torch.dtype,
    across_heads: bool = False,
    prologue: Prologue = IDENTITY,
) -> tuple[Tensor, Tensor]:
    """As `operation.encode_uniform`."""
    words = _words(x, bits, prologue)
    (rows, heads, total, _), width = words.shape, x.shape[-1]
    in_planes = _by_tokens(group, width, bits)
    measured = not in_planes and _by_channels(group)
    if across_heads or not (in_planes or measured):
        x, prologue = prologue.forward(x), IDENTITY
        parameters = stored_parameters(x, group, bits, clip, parameter_dtype, across_heads).contiguous()
        _by_planes(x, words, bits, prologue, None, parameters, group, False)
        return words, parameters
    shape = (rows, heads, total // group[0], 2 * width // group[1])
    parameters = new_buffer(shape, dtype=parameter_dtype, device=x.device)
    if measured:
        _by_planes(x, words, bits, prologue, clip, parameters, group, True)
        return words, parameters
    clips, number = _clip(clip, heads)
    _token_groups((*_operands(x, prologue), clips, words, parameters), (None,) * 4, (number, number), group[1], bits)
    return words, parameters


def encode_pair(
    pair: tuple[Tensor, Tensor], group: int, bits: int, clips: tuple[Tensor | float, Tensor | float], dtype: torch.dtype
) -> list[tuple[Tensor, Tensor]]:
    """As `operation.encode_pair`."""
    (rows, heads, total, width), found, given = pair[0].shape, [], []
    for x, clip in zip(pair, clips, strict=True):
        words = _words(x, bits, IDENTITY)
        parameters = new_buffer((rows, heads, total, 2 * width // group), dtype=dtype, device=x.device)
        found.append((words, parameters))
        given.append(_clip(clip, heads))
    (first, one), (second, other) = given
    operands = (*_operands(pair[0], IDENTITY), first, *found[0])
    _token_groups(operands, (pair[1], second, *found[1]), (one, other), group, bits)
    return found


def supports_pair(
    pair: tuple[Tensor, Tensor], group: int, bits: int, clips: tuple[Tensor | float, Tensor | float]
) -> bool:
    """Whether one launch encodes both: tensors that lie alike, in groups that are whole planes or divide one."""
    x, other = pair
    return (
        (x.shape, x.dtype, x.device) == (other.shape, other.dtype, other.device)
        and (x.stride() == other.stride() or _lie_alike(x, other))
        and supports(x, clips[0])
        and supports(other, clips[1])
        and _in_planes(group, x.shape[-1], words_per_token(x.shape[-1], bits))
    )


def _lie_alike(x: Tensor, other: Tensor) -> bool:
    return all(size == 1 or x.stride(axis) == other.stride(axis) for axis, size in enumerate(x.shape))


def _by_tokens(group: tuple[int, int], width: int, bits: int) -> bool:
    """Whether `token_groups` measures these groups."""
    return group[0] == 1 and _in_planes(group[1], width, words_per_token(width, bits))


def _by_channels(group: tuple[int, int]) -> bool:
    """Whether `by_planes` does."""
    return group[1] == 1 and group[0] <= LONGEST


def _in_planes(group: int, width: int, runs: int) -> bool:
    return group == width or group % runs == 0 or runs % group == 0


def _token_groups(
    operands: tuple[Tensor | None, ...],
    others: tuple[Tensor | None, ...],
    clips: tuple[float, float],
    group: int,
    bits: int,
) -> None:
    """Launches the kernel for x and what is done to it, with its clip, words and parameters, and for the others of a pair."""
    x, words = operands[0], operands[6]
    assert x is not None and words is not None
    (rows, heads, total, runs), width = words.shape, x.shape[-1]
    tokens, constants = _of_groups(width, bits, runs, group)
    ratio = 2 / (2**bits - 1)
    token_groups[cdiv(total, tokens), heads, rows * (1 if others[0] is None else 2)](
        *operands, *others, clips[0] * ratio, clips[1] * ratio, total, rows, *x.stride(), **constants, enable_fp_fusion=False,
    )  # fmt: skip


@lru_cache
def _of_groups(width: int, bits: int, runs: int, group: int) -> tuple[int, dict[str, int]]:
    """Tokens of a program, and the constants of `token_groups`."""
    run = min(runs, group)
    up = {"RUNS_UP": next_power_of_2(runs // run), "RUN_UP": next_power_of_2(run)}
    tokens = _tokens(up["RUNS_UP"] * up["RUN_UP"])
    sizes = {"D": width, "BITS": bits, "W": runs, "SPAN": cdiv(group, runs), "RUNS": runs // run, "RUN": run}
    return tokens, sizes | {"TOKENS": tokens} | up


def encode_fixed(x: Tensor, bits: int, clip: Tensor | float, prologue: Prologue = IDENTITY) -> Tensor:
    """As `operation.encode_fixed`."""
    words = _words(x, bits, prologue)
    _by_planes(x, words, bits, prologue, clip, None, (1, x.shape[-1]), False)
    return words


def _words(x: Tensor, bits: int, prologue: Prologue) -> Tensor:
    """Where the words go."""
    total = x.shape[2] if prologue.order is None else prologue.order.shape[-1]
    return new_buffer((*x.shape[:2], total, words_per_token(x.shape[-1], bits)), dtype=torch.int16, device=x.device)


def _operands(x: Tensor, prologue: Prologue) -> tuple[Tensor | None, ...]:
    """x and what is done to it; numbers of channels laid out alike, for each row and head."""
    if prologue is IDENTITY:
        return x, None, None, None, None
    rows, heads, _, width = x.shape
    numbers = (prologue.center, prologue.half, prologue.balance)
    spread = (None if part is None else part.expand(rows, heads, 1, width).contiguous() for part in numbers)
    return x, None if prologue.order is None else prologue.order.contiguous(), *spread


def _clip(clip: Tensor | float | None, heads: int) -> tuple[Tensor | None, float]:
    """A clip for each head, or a number."""
    if isinstance(clip, Tensor):
        return clip.expand(heads, 1, 1).contiguous(), 1.0
    return None, 0.0 if clip is None else float(clip)


def _by_planes(
    x: Tensor,
    words: Tensor,
    bits: int,
    prologue: Prologue,
    clip: Tensor | float | None,
    parameters: Tensor | None,
    group: tuple[int, int],
    measured: bool,
) -> None:
    (rows, heads, total, runs), width = words.shape, x.shape[-1]
    clips, number = _clip(clip, heads)
    ratio = 2 / (2**bits - 1)
    # Calibrated ranges multiply in float32, measured ones a number in float64: as the reference does.
    bound, ratio = (number, number * ratio) if measured and clips is None else (number, ratio)
    up = next_power_of_2(runs)
    tokens = next_power_of_2(group[0]) if measured else _tokens(up)
    step = group[0] if measured else tokens
    wide = next_power_of_2(width) if measured else 1
    p_row, p_head = 0, 0
    if parameters is not None:
        p_head = parameters.shape[2]
        p_row = parameters.shape[1] * p_head
        if parameters.shape[1] == 1:  # across heads
            p_head = 0
    by_planes[cdiv(total, step), heads, rows](
        *_operands(x, prologue), clips, words, parameters, bound, ratio, p_row, p_head, step, group[0], total, *x.stride(),
        width, bits, runs, group[1], measured, tokens, up, wide,
        num_warps=max(1, min(8, tokens * wide // 4096)) if measured else 4, enable_fp_fusion=False,
    )  # fmt: skip


def _tokens(cells: int) -> int:
    """Tokens of a tile with so many values each."""
    return max(1, min(LONGEST, TILE // cells))


def _specialisation(kernel: Any, bits: int, dtype: str, constants: dict[str, object], **own: str) -> Specialisation:
    """A kernel at 128 channels."""
    numbers = ("total", "rows", "step", "group", "s_row", "s_head", "s_token", "p_row", "p_head")
    types = dict.fromkeys(numbers, "i32") | dict.fromkeys(("ratio", "ratio_1", "bound"), "fp32")
    types |= {"x": f"*{dtype}", "words": "*i16", "parameters": "*fp16", **own}
    runs = words_per_token(128, bits)
    absent = {"order", "center", "half", "balance", "clip"}
    absent |= {"x_1", "clip_1", "words_1", "parameters_1"} if kernel is token_groups else set()
    arguments = dict.fromkeys(absent - types.keys()) | constants
    arguments |= {"s_channel": 1, "D": 128, "BITS": bits, "W": runs}
    return Specialisation(kernel, types, arguments, warps=1 if constants.get("MEASURED") else 4)


_TOKEN = {"RUNS": 1, "RUNS_UP": 1}
_PLANES = {"COLUMN": 1, "MEASURED": True, "D_UP": 128}
SPECIALISATIONS = {
    "2 bit, values of KIVI (1, 32)": _specialisation(
        token_groups, 2, "fp16", {**_TOKEN, "SPAN": 2, "RUN": 16, "RUN_UP": 16, "TOKENS": 128},
    ),
    "4 bit, a token (1, 128)": _specialisation(
        token_groups, 4, "bf16", {**_TOKEN, "SPAN": 4, "RUN": 32, "RUN_UP": 32, "TOKENS": 64},
    ),
    "4 bit, tokens of both streams (1, 128)": _specialisation(
        token_groups, 4, "bf16", {**_TOKEN, "SPAN": 4, "RUN": 32, "RUN_UP": 32, "TOKENS": 64},
        x_1="*bf16", words_1="*i16", parameters_1="*fp16",
    ),
    "2 bit, keys of KIVI (32, 1)": _specialisation(by_planes, 2, "bf16", {**_PLANES, "W_UP": 16, "TOKENS": 32}),
    "4 bit, calibrated, in order": _specialisation(
        by_planes, 4, "bf16", {"COLUMN": 128, "MEASURED": False, "D_UP": 1, "parameters": None, "W_UP": 32, "TOKENS": 64},
        order="*i64", center="*fp32", half="*fp32", clip="*fp32",
    ),
}  # fmt: skip
