"""Mixtures of values in `decode_kernel.py`: sums of weights times values over tiles, and how the sums are stored. README.md derives
which numbers are folded where.

A mixture is a tuple of planes [WP, M], a channel per row. For each group of channels that share a token's parameters there is also
`zeros` [8, M], the mixture of zero points in eight partial sums (`rows_joined`). For values with sizes all planes are one matrix
(`stacked_mixture.py`).
"""

import triton
import triton.language as tl

from calib.kernels.attend.loads import channel_numbers, folded_mixture, plane_numbers
from calib.kernels.attend.stacked_mixture import no_rows
from calib.kernels.attend.tile_products import ROWS, code_product, rows_joined, tokens_of
from calib.kernels.attend.unpack import LEAST_EXPONENT, plane_count, unit_of

# The least step that is not 0, and the first value of the largest so far: mixtures in its units keep the zero points of tokens with
# step 0, whose channels are all equal.
LEAST_STEP = tl.constexpr(2.0**-LEAST_EXPONENT)


@triton.jit
def no_mixture(WIDTHS: tl.constexpr, GROUPS: tl.constexpr, SIZED: tl.constexpr, WP: tl.constexpr, M: tl.constexpr):
    """Initial `mixed` and `zeros`, or for values with sizes `mixed` and `total`; all 0."""
    mixed, zeros, total = (), (), ()
    if SIZED:
        mixed, total = no_rows(WIDTHS, WP, M)
    else:
        for _ in tl.static_range(plane_count(WIDTHS)):
            mixed += (tl.zeros([WP, M], tl.float32),)
        for _ in tl.static_range(GROUPS):
            zeros += (tl.zeros([ROWS, M], tl.float32),)
    return mixed, zeros, total


@triton.jit
def mixed_by_channel(
    codes, numbers, weights, mixed, stays, words, WIDTHS: tl.constexpr, D: tl.constexpr, W: tl.constexpr, WP: tl.constexpr,
    PRECISE: tl.constexpr,
):  # fmt: skip
    """Adds a tile of codes with parameters per channel to the planes; `numbers` points to the group's row of parameters."""
    found = ()
    for f in tl.static_range(plane_count(WIDTHS)):
        steps, zero_points = channel_numbers(numbers, words, f, D, W, WP, weights.shape[1] == 8, False)
        values = tokens_of(codes[f], steps[:, None], zero_points[:, None], PRECISE)
        factors = weights if PRECISE else weights.to(tl.float16)
        found += (tl.dot(values, factors, mixed[f] * stays[None, :], input_precision="ieee"),)
    return found


@triton.jit
def mixed_by_token(
    codes, steps, zero_points, scales, weights, mixed, zeros, largest, stays, words, inside,
    WIDTHS: tl.constexpr, MODE: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, W: tl.constexpr, WP: tl.constexpr,
    PRECISE: tl.constexpr,
):  # fmt: skip
    """Adds a tile of codes without parameters (MODE 0), or with `steps` and `zero_points` of each token (MODE 1), to `mixed` and
    `zeros`; update the `largest` step so far. In MODE 1 the page may have `scales` of its channels as well."""
    M: tl.constexpr = weights.shape[1]
    PLANES: tl.constexpr = plane_count(WIDTHS) // GROUPS
    share, kept = 1.0, stays
    if MODE == 1:
        # Steps are multiplied into the weights, divided by the largest step so far: float16 neither overflows nor underflows.
        most = largest
        for j in tl.static_range(GROUPS):
            most = tl.maximum(most, tl.max(tl.where(inside, steps[j], 0.0), 0))
        share = 1 / most
        kept = stays * (largest * share)
        largest = most
    new, new_zeros = (), ()
    for j in tl.static_range(GROUPS):
        folded = weights
        if MODE == 1:
            folded = weights * (steps[j] * share)[:, None]
            zeroed = weights * zero_points[j][:, None]
        if MODE == 1 and scales is None:
            new_zeros += (zeros[j] * stays[None, :] + rows_joined(zeroed),)
        else:
            new_zeros += (zeros[j],)
        rounded = folded.to(tl.float16)
        left = (folded - rounded.to(tl.float32)).to(tl.float16)
        for f in tl.static_range(j * PLANES, (j + 1) * PLANES):
            if scales is not None:
                # The page's mixture is completed, with zero points, before it is scaled by channel and added.
                part = code_product(codes[f], rounded, left, tl.zeros([WP, M], tl.float32), PRECISE)
                part += (tl.sum(zeroed, 0) * (share * unit_of(WIDTHS, f, PRECISE)))[None, :]
                channel_scales = plane_numbers(scales, words, f, D, W)
                new += (mixed[f] * kept[None, :] + part * channel_scales[:, None],)
            else:
                new += (code_product(codes[f], rounded, left, mixed[f] * kept[None, :], PRECISE),)
    return new, new_zeros, largest


@triton.jit
def mixed_coefficients(coefficients, weights, ranked, stays, RANK: tl.constexpr):
    """Adds a tile to the mixtures `ranked` of the RANK low-rank coefficients, each in partial sums [ROWS, M]."""
    found = ()
    for j in tl.static_range(RANK):
        found += (ranked[j] * stays[None, :] + rows_joined(weights * coefficients[j][:, None]),)
    return found


@triton.jit
def store_mixture(
    OUT, mixed, zeros, largest, mass, channel_maps, words, valid, WIDTHS: tl.constexpr, MODE: tl.constexpr,
    GROUPS: tl.constexpr, SCALED: tl.constexpr, DIVIDES: tl.constexpr, D: tl.constexpr, W: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """Stores the planes to the channels at OUT [M], in the units of values: with zero points, and mapped by the `channel_maps` that
    all tokens share."""
    steps, zero_points, scales, shifts = channel_maps
    PLANES: tl.constexpr = plane_count(WIDTHS) // GROUPS
    for f in tl.static_range(plane_count(WIDTHS)):
        out = mixed[f]
        if MODE != 2:
            out *= 1 / unit_of(WIDTHS, f, PRECISE)
        if MODE == 1:
            out = out * largest + (0.0 if SCALED else tl.sum(zeros[f // PLANES], 0)[None, :])
        channels = f * W + words
        inside = (words < W) & (channels < D)
        out = folded_mixture(out, mass, steps, zero_points, f, False)
        out = folded_mixture(out, mass, scales, shifts, f, DIVIDES)
        tl.store(OUT[None, :] + channels[:, None], out, mask=inside[:, None] & valid[None, :])
