"""Keys that are stored as codes of components before RoPE, inside a kernel: put together, and rotated to their positions.

A key is two halves, near and far: channel pairs that RoPE turns by one angle each, then what it leaves alone, paired as it
lies. The turn of position a STRIDE + b is that of a STRIDE (`COARSE`) and that of b (`FINE`), tables of `[n, cos and sin, PAIRS]`.
"""

import triton
import triton.language as tl

from calib.kernels.attend.unpack import bias_of, level_bits, plane_count


@triton.constexpr_function
def middle_of(widths, plane):
    """What is taken from the numbers of a plane's codes (`unpack.py`): their bias, and the middle of all codes."""
    return bias_of(widths, plane) + ((1 << level_bits(widths, plane)) - 1) / 2


@triton.jit
def halves_of(HALF: tl.constexpr, HALFP: tl.constexpr, PAIRS: tl.constexpr):
    """Channels of the near and the far half, and the number in both; PAIRS of HALF are turned."""
    number = tl.arange(0, HALFP)
    near = tl.where(number < PAIRS, number, PAIRS + number)
    return near, tl.where(number < PAIRS, PAIRS + number, HALF + number), number


@triton.jit
def query_halves(QUERY, scale, rows, valid, near, far, number, HALF: tl.constexpr):
    """The halves of the query times `scale`, float32 [HALFP, M] each, and the largest size of each row, at least a tiny one."""
    inside = (number < HALF)[:, None] & valid[None, :]
    at = QUERY + rows[None, :] * (2 * HALF)
    first = tl.load(at + near[:, None], mask=inside, other=0.0).to(tl.float32) * scale
    second = tl.load(at + far[:, None], mask=inside, other=0.0).to(tl.float32) * scale
    size = tl.maximum(tl.max(tl.abs(first), 0), tl.max(tl.abs(second), 0))
    return (first, second), tl.maximum(size, 1.0e-30)


@triton.jit
def _axes(AXES, components, inside, channels, number, HALF: tl.constexpr):
    """What steps of `components` move half the channels: float16 [components, HALFP]."""
    at = AXES + components[:, None] * (2 * HALF) + channels[None, :]
    return tl.load(at, mask=inside[:, None] & (number < HALF)[None, :], other=0.0)


@triton.jit
def offsets(
    AXES, MEAN, SIZE, words, near, far, number, WIDTHS: tl.constexpr, W: tl.constexpr, HALF: tl.constexpr,
    SIZED: tl.constexpr,
):  # fmt: skip
    """The halves of a key whose codes' numbers are all 0, [HALFP] each; of keys that have sizes, their mean's."""
    size = tl.load(SIZE)
    first = tl.load(MEAN + near, mask=number < HALF, other=0.0) / size
    second = tl.load(MEAN + far, mask=number < HALF, other=0.0) / size
    for f in tl.static_range(0 if SIZED else plane_count(WIDTHS)):
        first -= middle_of(WIDTHS, f) * tl.sum(
            _axes(AXES, f * W + words, words < W, near, number, HALF).to(tl.float32), 0
        )
        second -= middle_of(WIDTHS, f) * tl.sum(
            _axes(AXES, f * W + words, words < W, far, number, HALF).to(tl.float32), 0
        )
    return first, second


@triton.jit
def _from_middle(codes, WIDTHS: tl.constexpr, plane: tl.constexpr):
    """How many steps codes are from their middle, exactly: float16 has halves below 1024 alone."""
    if bias_of(WIDTHS, plane) < 1024:
        return codes - middle_of(WIDTHS, plane)
    else:
        return (codes - bias_of(WIDTHS, plane)) - ((1 << level_bits(WIDTHS, plane)) - 1) / 2


@triton.jit
def keys_of(
    codes, sizes, offset, AXES, words, near, far, number, WIDTHS: tl.constexpr, W: tl.constexpr, HALF: tl.constexpr
):  # fmt: skip
    """The halves of keys put together, float32 [BN, HALFP] each: `offset`, and what the `codes` [BN, WP] of all planes add.

    Of tokens that have `sizes` [BN], that times these. Codes' middles are taken away sooner then: an offset beside the mean would
    take registers that no lane has left.
    """
    first = tl.zeros([codes[0].shape[0], number.shape[0]], tl.float32)
    second = tl.zeros([codes[0].shape[0], number.shape[0]], tl.float32)
    if sizes is None:
        first, second = first + offset[0][None, :], second + offset[1][None, :]
    for f in tl.static_range(len(codes)):
        steps = codes[f] if sizes is None else _from_middle(codes[f], WIDTHS, f)
        first = tl.dot(steps, _axes(AXES, f * W + words, words < W, near, number, HALF), first)
        second = tl.dot(steps, _axes(AXES, f * W + words, words < W, far, number, HALF), second)
    if sizes is None:
        return first, second
    else:
        return first * sizes[:, None] + offset[0][None, :], second * sizes[:, None] + offset[1][None, :]


@triton.jit
def _cos_sin(rows, number, PAIRS: tl.constexpr):
    """cos and sin [n, HALFP] of the `rows` [n] of a table; what is not turned is turned by nothing."""
    at, pairs = rows[:, None] + number[None, :], (number < PAIRS)[None, :]
    return tl.load(at, mask=pairs, other=1.0), tl.load(at + PAIRS, mask=pairs, other=0.0)


@triton.jit
def unrotated(halves, row, number, PAIRS: tl.constexpr):
    """The query's halves [HALFP, M] rotated back by a row of COARSE."""
    pairs = number < PAIRS
    cos = tl.load(row + number, mask=pairs, other=1.0)[:, None]
    sin = tl.load(row + PAIRS + number, mask=pairs, other=0.0)[:, None]
    return halves[0] * cos + halves[1] * sin, halves[1] * cos - halves[0] * sin


@triton.jit
def rotated(
    keys, position, COARSE, FINE, number, PAIRS: tl.constexpr, STRIDE: tl.constexpr, WHOLE: tl.constexpr
):  # fmt: skip
    """The halves of keys rotated to their `position` [BN]: below STRIDE, or with `WHOLE` any."""
    cos, sin = _cos_sin(FINE + position % STRIDE * (2 * PAIRS), number, PAIRS)
    if WHOLE:
        more_cos, more_sin = _cos_sin(COARSE + position // STRIDE * (2 * PAIRS), number, PAIRS)
        cos, sin = cos * more_cos - sin * more_sin, sin * more_cos + cos * more_sin
    return keys[0] * cos - keys[1] * sin, keys[1] * cos + keys[0] * sin
