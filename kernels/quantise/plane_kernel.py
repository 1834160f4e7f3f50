"""Triton kernel that quantises and packs tokens with parameters that several tokens share: per channel of a block, measured here,
or given ones (a calibrated range, or groups of other shapes that plain torch has measured). Planes are read one after the other, so
that packing is elementwise.
"""

import triton
import triton.language as tl

from calib.kernels.quantise.arithmetic import code_fields, divisor, load_values, scale_and_zero, source_positions


@triton.jit(do_not_specialize=["p_row", "p_head", "step", "group", "total"])
def by_planes(
    x, order, center, half, balance, clip, words, parameters, bound, ratio, p_row, p_head, step, group, total,
    s_row, s_head, s_token, s_channel,
    D: tl.constexpr, BITS: tl.constexpr, W: tl.constexpr, COLUMN: tl.constexpr, MEASURED: tl.constexpr,
    TOKENS: tl.constexpr, W_UP: tl.constexpr, D_UP: tl.constexpr,
):  # fmt: skip
    """Quantises `step` tokens with the `parameters` of groups (group, COLUMN), or with the range [-bound, bound] if `parameters` is
    None. `p_row` and `p_head` are strides of parameters in groups of tokens; the numbers per group are a constant, so that loads
    can be wide.

    MEASURED: the tokens are a group (step, 1), whose parameters are computed and stored here.
    """
    head, row = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    slot = tl.arange(0, TOKENS)[:, None]
    tokens = tl.program_id(0) * step + slot
    here = (slot < step) & (tokens < total)
    # A group may have fewer tokens than the tile: its last token is repeated, which changes neither extreme.
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
        tl.debug_barrier()  # other threads of the program read the parameters; the tokens are read again from the cache
    else:
        if clip is not None:
            bound = tl.load(clip + head)
        bound = tl.full([1, 1], bound, tl.float32)  # the interpreter would multiply Python floats, as doubles
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
        word += tl.where(valid, code_fields(y, zero, negative, reciprocal, most, plane, BITS, HALF), 0)
    into = words + ((row * tl.num_programs(1) + head) * total + tokens) * W + cell
    tl.store(into, word.to(tl.int16), mask=(cell < W) & here)
