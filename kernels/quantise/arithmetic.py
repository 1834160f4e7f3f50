# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""Arithmetic of quantisation in Triton, for a tile of values; every rounding equals that of `reference.py`."""

import triton
import triton.language as tl

TINY = tl.constexpr(2.0**-126)  # least normal float32
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def fma(a, b, c):
    """Fused multiply-add: a b + c, rounded once."""
    if INTERPRETED:  # numpy has no fused multiply-add; in float64 the product is exact
        return (a.to(tl.float64) * b.to(tl.float64) + c.to(tl.float64)).to(tl.float32)
    else:
        return tl.fma(a, b, c)


@triton.jit
def reciprocal_of(divisor):
    """About 1 / divisor in one instruction, for divisors from 2^-126 to 2^126; Triton's division takes four more for all others."""
    if INTERPRETED:
        return 1.0 / divisor
    else:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [divisor], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def whole_part(level):
    """Whole part of `level`, or 0 if it is negative: a conversion to an unsigned number is clamped to its range."""
    if INTERPRETED:
        return tl.maximum(level, 0.0).to(tl.int32)
    else:
        return tl.inline_asm_elementwise(
            "cvt.rzi.u32.f32 $0, $1;", "=r,f", [level], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def quotient(y, divisor, HALF: tl.constexpr):
    """y / divisor, rounded to nearest. HALF: the divisor is a float16 number, which allows a cheaper division."""
    if HALF:  # as in `code_fields`
        reciprocal = reciprocal_of(divisor)
        found = y * reciprocal
        return fma(fma(found, -divisor, y), reciprocal, found)
    else:
        return tl.div_rn(y, divisor)


@triton.jit
def load_values(
    x, center, half, balance, row, head, positions, channels, mask, s_row, s_head, s_token, s_channel, D: tl.constexpr
):
    """Loads a tile of x and applies the `Prologue`: y = (x - center) / half * balance in float32. `positions` (int64) and
    `channels` broadcast to the tile's shape."""
    tile = x + row * s_row + head * s_head
    y = tl.load(tile + positions * s_token + channels * s_channel, mask=mask, other=0.0).to(tl.float32)
    own = (row * tl.num_programs(1) + head) * D + channels
    if center is not None:
        y = y - tl.load(center + own, mask=channels < D, other=0.0).to(tl.float32)
    if half is not None:
        divisor = tl.load(half + own, mask=channels < D, other=1.0).to(tl.float32)
        y = quotient(y, tl.where(divisor == 0.0, 1.0, divisor), half.dtype.element_ty == tl.float16)
    if balance is not None:
        y = y * tl.load(balance + own, mask=channels < D, other=0.0).to(tl.float32)
    return y


@triton.jit
def source_positions(order, row, head, tokens, total):
    """Positions in x of the `tokens` of the result, int64: from `order` if there is one."""
    positions = tokens.to(tl.int64)
    if order is not None:
        positions = tl.load(order + (row * tl.num_programs(1) + head) * total + tokens, mask=tokens < total, other=0)
    return positions


@triton.jit
def as_stored(value, HALF: tl.constexpr):
    """Rounds a parameter as it is stored (HALF: float16, clamped to its range), and returns it in float32."""
    half = tl.minimum(tl.maximum(value, -65504.0), 65504.0).to(tl.float16).to(tl.float32)
    if not HALF:
        half = tl.where(tl.abs(value) <= 65504.0, half, value)
    return half


@triton.jit
def scale_and_zero(low, high, factor, BITS: tl.constexpr, HALF: tl.constexpr):
    """Scale and zero point of groups with these least and largest values, rounded as stored (HALF: float16)."""
    low = low * 0.5
    high = high * 0.5
    scale = (high - low) * factor
    steps = tl.full(scale.shape, (1 - 2**BITS) / 2, tl.float32)
    zero = fma(scale, steps, low + high)  # torch rounds product and sum together, once
    return as_stored(scale, HALF), as_stored(zero, HALF)


@triton.jit
def divisor(scale, BITS: tl.constexpr, HALF: tl.constexpr):
    """Numbers for `code_fields` that a group shares: minus its scale, its reciprocal, and the dividend of the largest code."""
    scale = tl.maximum(scale, TINY)
    if HALF:
        reciprocal = reciprocal_of(scale)
    else:
        reciprocal = tl.div_rn(1.0, scale)
    return -scale, reciprocal, scale * (2**BITS - 1.0)


@triton.jit
def code_fields(y, zero, negative, reciprocal, most, plane, BITS: tl.constexpr, HALF: tl.constexpr):
    """Codes of y, shifted to the field of `plane` in the word. HALF: the scale is a float16 number."""
    # Clamped from above before the division, so that nothing overflows; the codes are the same.
    above = tl.minimum(y - zero, most)
    # Division rounded as IEEE without the division instructions: README.md shows why one correction step suffices, and two if the
    # scale has 24 bits.
    level = above * reciprocal
    level = fma(fma(level, negative, above), reciprocal, level)
    if not HALF:
        level = fma(fma(level, negative, above), reciprocal, level)
    return whole_part(level + 0.5) << (BITS * plane)
