"""Triton kernel that measures, quantises and packs tokens with parameters per token, for groups of 1 token x g channels: plane by
plane, or several planes at a time if a group spans them. Planes are read one after the other, so that packing is elementwise.
"""

import triton
import triton.language as tl

from calib.kernels.quantise.arithmetic import code_fields, divisor, load_values, scale_and_zero, source_positions


@triton.jit(do_not_specialize=["total", "rows"])  # another number of tokens causes no recompilation
def token_groups(
    x, order, center, half, balance, clip, words, parameters, x_1, clip_1, words_1, parameters_1, ratio, ratio_1, total, rows,
    s_row, s_head, s_token, s_channel,
    D: tl.constexpr, BITS: tl.constexpr, W: tl.constexpr, SPAN: tl.constexpr, RUNS: tl.constexpr, RUN: tl.constexpr,
    TOKENS: tl.constexpr, RUNS_UP: tl.constexpr, RUN_UP: tl.constexpr,
):  # fmt: skip
    """Encodes the groups (1, g) of x and, in further programs, of x_1 (None: absent), which has the same layout; with x_1 there is
    no prologue."""
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
    """Encodes one row and head of one tensor. A plane has RUNS runs of RUN channels; a group is one run, or SPAN whole planes."""
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
        held = ()
        for plane in tl.static_range(at, at + SPAN):
            channels = plane * W + run * RUN + cell
            valid = inside & (channels < D)
            y = load_values(
                x, center, half, balance, row, head, positions, channels, valid & (tokens < total),
                s_row, s_head, s_token, s_channel, D,
            )  # fmt: skip
            held += (y,)
            least, most = tl.where(valid, y, float("inf")), tl.where(valid, y, float("-inf"))
            if plane == at:
                low, high = least, most
            else:
                low, high = tl.minimum(low, least), tl.maximum(high, most)
        low, high = tl.min(low, 2, keep_dims=True), tl.max(high, 2, keep_dims=True)
        scale, zero = scale_and_zero(low, high, factor, BITS, HALF)
        column = at // SPAN * RUNS + run
        into = parameters + (first + tokens) * (2 * COLUMNS) + column
        kept = (tokens < total) & (run < RUNS) & (column < COLUMNS)
        tl.store(into, scale.to(parameters.dtype.element_ty), mask=kept)
        tl.store(into + COLUMNS, zero.to(parameters.dtype.element_ty), mask=kept)
        negative, reciprocal, top = divisor(scale, BITS, HALF)
        for plane in tl.static_range(at, at + SPAN):
            channels = plane * W + run * RUN + cell
            valid = inside & (channels < D)
            word += tl.where(
                valid, code_fields(held[plane - at], zero, negative, reciprocal, top, plane, BITS, HALF), 0
            )
    into = words + (first + tokens) * W + run * RUN + cell
    tl.store(into, word.to(tl.int16), mask=inside & (tokens < total))
