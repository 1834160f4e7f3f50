"""Products of a tile inside a kernel: what they take of the query; of exact tokens, of codes as they are, and of codes with
parameters of their channels; and their results in the model's type."""

import triton
import triton.language as tl

from calib.kernels.attend.unpack import bias_of


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
def biases_of(
    query, rounded, rest, size, WIDTHS: tl.constexpr, GROUPS: tl.constexpr, PRECISE: tl.constexpr
):  # fmt: skip
    """For each group of channels what the codes' bias adds to its product, and the sum of the query's own, [M] each."""
    PLANES: tl.constexpr = len(query) // GROUPS
    biased, summed = (), ()
    for j in tl.static_range(GROUPS):
        lift, whole = tl.zeros([size.shape[0]], tl.float32), tl.zeros([size.shape[0]], tl.float32)
        for f in tl.static_range(j * PLANES, (j + 1) * PLANES):
            lift += bias_of(WIDTHS, f) * tl.sum(rounded[f].to(tl.float32), 0)
            if PRECISE:
                lift += bias_of(WIDTHS, f) * tl.sum(rest[f].to(tl.float32), 0)
            whole += tl.sum(query[f], 0)
        biased += (lift,)
        summed += (whole / size,)
    return biased, summed


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
def tokens_of(codes, bias, steps, zero_points, PRECISE: tl.constexpr):
    """x^ = c s + z of a plane: float16, or float32."""
    exact = codes - bias
    if PRECISE:
        return exact.to(tl.float32) * steps + zero_points
    else:
        return exact * steps + zero_points
