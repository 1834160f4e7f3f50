# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""What a tile's values go through on the way to their codes, in Triton: the reference's roundings, one by one."""

import triton
import triton.language as tl

TINY = tl.constexpr(2.0**-126)  # the least normal number
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def fma(a, b, c):
    """a b + c, rounded once."""
    if INTERPRETED:  # numpy has no such operation; here the product is exact
        return (a.to(tl.float64) * b.to(tl.float64) + c.to(tl.float64)).to(tl.float32)
    else:
        return tl.fma(a, b, c)


@triton.jit
def quotient(y, divisor, HALF: tl.constexpr):
    """y / divisor, rounded to nearest; HALF: the divisor is a float16 number."""
    if HALF:  # as in `code_fields`
        reciprocal = 1.0 / divisor
        found = y * reciprocal
        return fma(fma(found, -divisor, y), reciprocal, found)
    else:
        return tl.div_rn(y, divisor)


@triton.jit
def load_values(
    x, center, half, balance, row, head, positions, channels, mask, s_row, s_head, s_token, s_channel, D: tl.constexpr
):
    """A tile of y in float32; `positions` (int64) and `channels` broadcast to its shape."""
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
    """Where tokens of the result lie in x, int64."""
    positions = tokens.to(tl.int64)
    if order is not None:
        positions = tl.load(order + (row * tl.num_programs(1) + head) * total + tokens, mask=tokens < total, other=0)
    return positions


@triton.jit
def as_stored(value, HALF: tl.constexpr):
    """A parameter as it is kept, in float32 again."""
    half = tl.minimum(tl.maximum(value, -65504.0), 65504.0).to(tl.float16).to(tl.float32)
    if not HALF:
        half = tl.where(tl.abs(value) <= 65504.0, half, value)
    return half


@triton.jit
def scale_and_zero(low, high, factor, BITS: tl.constexpr, HALF: tl.constexpr):
    """Scale and zero point, as kept (HALF: in float16), of groups whose least and largest values these are."""
    low = low * 0.5
    high = high * 0.5
    scale = (high - low) * factor
    # torch rounds the product and the sum once, together; in float64 the product is exact.
    zero = ((low + high).to(tl.float64) - scale.to(tl.float64) * ((2**BITS - 1) / 2)).to(tl.float32)
    return as_stored(scale, HALF), as_stored(zero, HALF)


@triton.jit
def divisor(scale, BITS: tl.constexpr, HALF: tl.constexpr):
    """What the codes of a group share: minus its scale, the reciprocal, and the largest dividend that makes a difference."""
    scale = tl.maximum(scale, TINY)
    if HALF:
        reciprocal = tl.where(scale > TINY, 1.0 / scale, 1.0 / TINY)
    else:
        reciprocal = tl.div_rn(1.0, scale)
    return -scale, reciprocal, scale * (2**BITS - 1.0)


@triton.jit
def code_fields(y, zero, negative, reciprocal, most, plane, BITS: tl.constexpr, HALF: tl.constexpr):
    """Codes where the word has them; HALF: the scale is a float16 number."""
    # Clamped before, not behind, so that nothing overflows; what is cut off has the same code.
    above = tl.minimum(tl.maximum(y - zero, 0.0), most)
    # IEEE division without its instructions: README.md says why one step makes it exact, and two where a scale has 24 bits.
    level = above * reciprocal
    level = fma(fma(level, negative, above), reciprocal, level)
    if not HALF:
        level = fma(fma(level, negative, above), reciprocal, level)
    return (level + 0.5).to(tl.int32) << (BITS * plane)
