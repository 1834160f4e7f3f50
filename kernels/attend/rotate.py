"""Rebuilds keys from codes of components before RoPE inside a Triton kernel, and rotates them to their positions.

The channels of a key are handled as two halves, "near" and "far": the first and second channels of the PAIRS pairs that RoPE
rotates, then the channels that it does not, split in two. The rotation by position a STRIDE + b is that by a STRIDE (`COARSE`)
times that by b (`FINE`), tables of `[n, cos and sin, PAIRS]`.
"""

import triton
import triton.language as tl

from calib.kernels.attend.unpack import bias_of, level_bits, plane_count


@triton.constexpr_function
def middle_of(widths, plane):
    """Number that is subtracted from a plane's biased codes (`unpack.py`): the bias plus half of the largest code."""
    return bias_of(widths, plane) + ((1 << level_bits(widths, plane)) - 1) / 2


@triton.jit
def halves_of(HALF: tl.constexpr, HALFP: tl.constexpr, PAIRS: tl.constexpr):
    """Channels of the near and the far half, and the index within a half, [HALFP] each; PAIRS of HALF channel pairs are rotated."""
    number = tl.arange(0, HALFP)
    near = tl.where(number < PAIRS, number, PAIRS + number)
    return near, tl.where(number < PAIRS, PAIRS + number, HALF + number), number


@triton.jit
def query_halves(QUERY, scale, rows, valid, near, far, number, HALF: tl.constexpr):
    """Loads the halves of the query times `scale`, float32 [HALFP, M]; also the largest magnitude of each row, at least 1e-30."""
    inside = (number < HALF)[:, None] & valid[None, :]
    at = QUERY + rows[None, :] * (2 * HALF)
    first = tl.load(at + near[:, None], mask=inside, other=0.0).to(tl.float32) * scale
    second = tl.load(at + far[:, None], mask=inside, other=0.0).to(tl.float32) * scale
    size = tl.maximum(tl.max(tl.abs(first), 0), tl.max(tl.abs(second), 0))
    return (first, second), tl.maximum(size, 1.0e-30)


@triton.jit
def _axes(AXES, components, inside, channels, number, HALF: tl.constexpr):
    """Loads one half of the channels of the axes of `components`: float16 [components, HALFP]."""
    at = AXES + components[:, None] * (2 * HALF) + channels[None, :]
    return tl.load(at, mask=inside[:, None] & (number < HALF)[None, :], other=0.0)


@triton.jit
def offsets(
    AXES, MEAN, SIZE, words, near, far, number, WIDTHS: tl.constexpr, W: tl.constexpr, HALF: tl.constexpr,
    SIZED: tl.constexpr,
):  # fmt: skip
    """Halves [HALFP] of the constant part of keys, in units of SIZE: the mean, and if keys have no sizes, minus the axes times the
    `middle_of` their codes."""
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
    """Biased codes minus their middle, exactly: float16 represents halves only below 1024, so a larger bias is subtracted first."""
    if bias_of(WIDTHS, plane) < 1024:
        return codes - middle_of(WIDTHS, plane)
    else:
        return (codes - bias_of(WIDTHS, plane)) - ((1 << level_bits(WIDTHS, plane)) - 1) / 2


@triton.jit
def keys_of(
    codes, sizes, offset, AXES, words, near, far, number, WIDTHS: tl.constexpr, W: tl.constexpr, HALF: tl.constexpr
):  # fmt: skip
    """Rebuilds the halves of keys, float32 [BN, HALFP] each: `offset` plus `codes` [BN, WP] of all planes times their axes.

    With `sizes` [BN] the sum over codes is multiplied by them. Then the codes' middles are subtracted before the products, because
    a second offset besides the mean would need more registers than there are.
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
    """Loads cos and sin [n, HALFP] of the `rows` [n] of a table; 1 and 0 for channels that are not rotated."""
    at, pairs = rows[:, None] + number[None, :], (number < PAIRS)[None, :]
    return tl.load(at, mask=pairs, other=1.0), tl.load(at + PAIRS, mask=pairs, other=0.0)


@triton.jit
def unrotated(halves, row, number, PAIRS: tl.constexpr):
    """Rotates the query's halves [HALFP, M] back by a row of COARSE."""
    pairs = number < PAIRS
    cos = tl.load(row + number, mask=pairs, other=1.0)[:, None]
    sin = tl.load(row + PAIRS + number, mask=pairs, other=0.0)[:, None]
    return halves[0] * cos + halves[1] * sin, halves[1] * cos - halves[0] * sin


@triton.jit
def rotated(
    keys, position, COARSE, FINE, number, PAIRS: tl.constexpr, STRIDE: tl.constexpr, WHOLE: tl.constexpr
):  # fmt: skip
    """Rotates the halves of keys to their `position` [BN], which is below STRIDE unless WHOLE."""
    cos, sin = _cos_sin(FINE + position % STRIDE * (2 * PAIRS), number, PAIRS)
    if WHOLE:
        more_cos, more_sin = _cos_sin(COARSE + position // STRIDE * (2 * PAIRS), number, PAIRS)
        cos, sin = cos * more_cos - sin * more_sin, sin * more_cos + cos * more_sin
    return keys[0] * cos - keys[1] * sin, keys[1] * cos + keys[0] * sin
