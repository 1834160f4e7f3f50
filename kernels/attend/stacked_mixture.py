"""Mixtures of codes of tokens with sizes, inside a Triton kernel: all planes are stacked as the rows of one matrix.

A plane of 16 words is one warp's share of a product: if planes were multiplied one by one, each of several warps would unpack every
plane and hold every plane's mixture. Stacked, the planes are divided among the warps. A mixture has WP rows per plane, W of which
are used, and rows of 0 behind the last plane up to a power of two.
"""

import triton
import triton.language as tl

from calib.kernels.attend.tile_products import code_product
from calib.kernels.attend.unpack import codes_of, plane_count, unit_of


@triton.constexpr_function
def doublings(count):
    """Base-2 logarithm of `count`, rounded up."""
    return (count - 1).bit_length()


@triton.constexpr_function
def row_count(widths, words):
    """Rows of a mixture: number of planes, rounded up to a power of two, times words."""
    return (1 << doublings(plane_count(widths))) * words


@triton.jit
def no_rows(WIDTHS: tl.constexpr, WP: tl.constexpr, M: tl.constexpr):
    """Initial mixture and `total`, both 0."""
    return tl.zeros([row_count(WIDTHS, WP), M], tl.float32), tl.zeros([16, M], tl.float32)


@triton.jit
def _stacked(planes):
    """Stacks planes [WP, BN] to one matrix, padded with planes of 0 to a power of two."""
    LEVELS: tl.constexpr = doublings(len(planes))
    COUNT: tl.constexpr = 1 << LEVELS
    WP: tl.constexpr = planes[0].shape[0]
    BN: tl.constexpr = planes[0].shape[1]
    for _ in tl.static_range(COUNT - len(planes)):
        planes += (tl.zeros([WP, BN], planes[0].dtype),)
    for level in tl.static_range(LEVELS):
        joined = ()
        for i in tl.static_range(COUNT >> (level + 1)):
            joined += (tl.join(planes[i], planes[i + (COUNT >> (level + 1))]),)
        planes = joined
    return planes[0].reshape(WP, BN, COUNT).permute(2, 0, 1).reshape(COUNT * WP, BN)


@triton.jit
def mixed_rows(
    words, odd, weights, mixed, total, kept, WIDTHS: tl.constexpr, PRECISE: tl.constexpr, PLAIN: tl.constexpr
):  # fmt: skip
    """Rescales `mixed` [rows, M], the mixture of codes, and `total` [16, M], the sum of weights, by `kept`, and adds a tile:
    `words` [WP, BN] (`odd`: words of the odd planes of trellis-coded levels) with `weights` [BN, M]."""
    rounded = weights.to(tl.float16)
    rest = (weights - rounded.to(tl.float32)).to(tl.float16)
    ones = tl.full([16, weights.shape[0]], 1.0, tl.float16)
    codes = _stacked(codes_of(words, odd, WIDTHS, PRECISE, PLAIN))
    total = code_product(ones, rounded, rest, total * kept[None, :], PRECISE)
    return code_product(codes, rounded, rest, mixed * kept[None, :], PRECISE), total


@triton.jit
def store_rows(
    OUT, mixed, total, valid, WIDTHS: tl.constexpr, D: tl.constexpr, W: tl.constexpr, WP: tl.constexpr,
    PRECISE: tl.constexpr,
):  # fmt: skip
    """Stores the mixture, in units of codes, to the D channels at OUT [M], and the sum of weights behind them."""
    row = tl.arange(0, mixed.shape[0])
    plane, word = row // WP, row % WP
    per_code = tl.zeros([mixed.shape[0]], tl.float32)
    for f in tl.static_range(plane_count(WIDTHS)):
        per_code = tl.where(plane == f, 1 / unit_of(WIDTHS, f, PRECISE), per_code)
    channel = plane * W + word
    inside = ((word < W) & (plane < plane_count(WIDTHS)) & (channel < D))[:, None] & valid[None, :]
    tl.store(OUT[None, :] + channel[:, None], mixed * per_code[:, None], mask=inside)
    tl.store(OUT + D, tl.sum(total, 0) / 16, mask=valid)  # all sixteen rows of a product with ones are the same
