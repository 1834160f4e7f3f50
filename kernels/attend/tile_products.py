"""Products of a tile inside a kernel: what they take of the query; of exact tokens, of codes as they are, and of codes with
parameters of their channels; and their results in the model's type."""

import triton
import triton.language as tl

from calib.kernels.attend.unpack import LEAST_EXPONENT, are_codes, unit_of

# The highest power of two of float16: what is below 2 may be multiplied by it.
HALF_EXPONENT = 15

# Rows of a product that lie in different lanes.
ROWS = tl.constexpr(8)


@triton.constexpr_function
def raised_by(folded):
    """The power of two of queries of size 1 where they meet codes: as high as float16 goes, so that small ones are rounded
    like large ones; none where scales are FOLDED into them, which may be as large."""
    return 0 if folded else HALF_EXPONENT


@triton.constexpr_function
def product_unit(widths, whole, folded):
    """What products of these are to those of the query itself with codes."""
    return 1.0 if whole or not are_codes(widths) else 2.0 ** (raised_by(folded) - LEAST_EXPONENT)


@triton.constexpr_function
def factor_of(widths, plane, whole, folded):
    """What a plane of the query is multiplied by before it meets the numbers of a plane of codes."""
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
    """The query's planes as products take them, in units of `size` [M] and of type KIND, and what that rounding took."""
    rounded, rest = (), ()
    for f in tl.static_range(len(query)):
        plane = query[f] / size[None, :]
        taken = plane.to(KIND)
        rounded += (taken,)
        rest += ((plane - taken.to(tl.float32)).to(KIND),)
    return rounded, rest


@triton.jit
def sums_of(query, size, GROUPS: tl.constexpr):
    """The sum of each group of channels of the query, in units of `size` [M]: what zero points meet."""
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
    """a @ b + acc in float32; the interpreter's bfloat16 products are wrong."""
    if INTERPRET and a.dtype == tl.bfloat16:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def nearest(number, kind: tl.constexpr, INTERPRET: tl.constexpr):
    """Float32 numbers as the nearest of type kind; the interpreter would cut bfloat16 off."""
    if INTERPRET and kind == tl.bfloat16:
        bits = number.to(tl.int32, bitcast=True)
        number = (bits + 0x7FFF + ((bits >> 16) & 1)).to(tl.float32, bitcast=True)
    return number.to(kind)


@triton.jit
def code_product(codes, rounded, rest, acc, PRECISE: tl.constexpr):
    """codes @ (rounded + rest) + acc, where `rest` is what rounding to float16 took: 11 bits of a factor, or with it 22."""
    if PRECISE:
        acc = tl.dot(codes, rest, acc)
    return tl.dot(codes, rounded, acc)


@triton.jit
def rows_joined(x):
    """[n, M], a number of a token in each row -> [8, M], the sums of every eighth: those that a lane holds. A loop that needs no
    sum over all tokens adds up these, and lanes exchange nothing before its end."""
    return tl.sum(x.reshape(x.shape[0] // ROWS, ROWS, x.shape[1]), 0)


@triton.jit
def tokens_of(codes, steps, zero_points, PRECISE: tl.constexpr):
    """x^ = c s + z of a plane: float16, or float32."""
    if PRECISE:
        return codes.to(tl.float32) * steps + zero_points
    else:
        return codes * steps + zero_points
