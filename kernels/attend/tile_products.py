"""Matrix products of a tile inside a Triton kernel: preparation of the query, products with exact tokens and with codes, and
rounding of results to the model's dtype. M is the number of query rows of a program."""

import triton
import triton.language as tl

from calib.kernels.attend.unpack import LEAST_EXPONENT, are_codes, unit_of

# Exponent of the largest power of two of float16: numbers below 2 may be multiplied by 2^15.
HALF_EXPONENT = 15

# Rows of partial sums (`rows_joined`); the rows of a product lie in this many different lanes.
ROWS = tl.constexpr(8)


@triton.constexpr_function
def raised_by(folded):
    """Exponent of the power of two that normalised queries are multiplied by before products with codes: the largest of float16, so
    that small numbers keep their precision; 0 where scales, which may be large, are FOLDED into the query."""
    return 0 if folded else HALF_EXPONENT


@triton.constexpr_function
def product_unit(widths, whole, folded):
    """Ratio of the computed products to products of the query itself with codes."""
    return 1.0 if whole or not are_codes(widths) else 2.0 ** (raised_by(folded) - LEAST_EXPONENT)


@triton.constexpr_function
def factor_of(widths, plane, whole, folded):
    """Factor that a plane of the query is multiplied by, to cancel the power of two of that plane's unpacked codes."""
    return product_unit(widths, whole, folded) / unit_of(widths, plane, whole)


@triton.jit
def raised(query, WIDTHS: tl.constexpr, WHOLE: tl.constexpr, FOLDED: tl.constexpr):
    """The query's planes, each times its `factor_of`."""
    found = ()
    for f in tl.static_range(len(query)):
        found += (query[f] * factor_of(WIDTHS, f, WHOLE, FOLDED),)
    return found


@triton.jit
def factors_of(query, size, KIND: tl.constexpr):
    """The query's planes divided by `size` [M] and rounded to type KIND, and the rounding errors in the same type."""
    rounded, rest = (), ()
    for f in tl.static_range(len(query)):
        plane = query[f] / size[None, :]
        taken = plane.to(KIND)
        rounded += (taken,)
        rest += ((plane - taken.to(tl.float32)).to(KIND),)
    return rounded, rest


@triton.jit
def sums_of(query, size, GROUPS: tl.constexpr):
    """Sum of the query over each group of channels, in units of `size` [M]; zero points are multiplied by it."""
    PLANES: tl.constexpr = len(query) // GROUPS
    found = ()
    for j in tl.static_range(GROUPS):
        whole = tl.zeros([size.shape[0]], tl.float32)
        for f in tl.static_range(j * PLANES, (j + 1) * PLANES):
            whole += tl.sum(query[f], 0)
        found += (whole / size,)
    return found


@triton.jit
def exact_product(a, b, acc, INTERPRET: tl.constexpr):
    """a @ b + acc in float32. (Triton's interpreter computes bfloat16 products wrongly, so it converts first.)"""
    if INTERPRET and a.dtype == tl.bfloat16:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def nearest(number, kind: tl.constexpr, INTERPRET: tl.constexpr):
    """Rounds float32 numbers to the nearest of type `kind`. (Triton's interpreter would truncate to bfloat16.)"""
    if INTERPRET and kind == tl.bfloat16:
        bits = number.to(tl.int32, bitcast=True)
        number = (bits + 0x7FFF + ((bits >> 16) & 1)).to(tl.float32, bitcast=True)
    return number.to(kind)


@triton.jit
def code_product(codes, rounded, rest, acc, PRECISE: tl.constexpr):
    """codes @ rounded + acc; if PRECISE, codes @ (rounded + rest) + acc with `rest` the rounding error: 22 bits instead of 11."""
    if PRECISE:
        acc = tl.dot(codes, rest, acc)
    return tl.dot(codes, rounded, acc)


@triton.jit
def rows_joined(x):
    """Sums every eighth row of [n, M], a token per row: [8, M]. These are rows that one lane holds, so a loop can accumulate them
    without exchange between lanes; the final sum over tokens follows after the loop."""
    return tl.sum(x.reshape(x.shape[0] // ROWS, ROWS, x.shape[1]), 0)


@triton.jit
def tokens_of(codes, steps, zero_points, PRECISE: tl.constexpr):
    """Decodes a plane: x^ = c s + z in float16, or in float32 if PRECISE."""
    if PRECISE:
        return codes.to(tl.float32) * steps + zero_points
    else:
        return codes * steps + zero_points
