"""Products of a tile of keys whose channels have scales and zero points for groups of tokens: x^ = c s + z, s and z of a channel.

A group of many tokens has its scales in the query: q . x^ = sum (q s) (c + b) - sum b (q s) + sum q z, so that nothing is done to
codes. The last two are the same for every token of the group. In a group of few tokens scales go into the codes, as float16.
"""

import triton
import triton.language as tl

from calib.kernels.attend.loads import channel_numbers
from calib.kernels.attend.tile_products import code_product, tokens_of
from calib.kernels.attend.unpack import bias_of, plane_count


@triton.jit
def channel_product(
    codes, numbers, words, query, exact_query, size, WIDTHS: tl.constexpr, D: tl.constexpr, W: tl.constexpr, WP: tl.constexpr,
    BN: tl.constexpr, FOLDED: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """float32 [BN, M] of a tile in one group, whose row of parameters begins at `numbers`; the query's planes [WP, M] are rounded
    to float16 and exact, the former in units of `size` [M]. FOLDED: scales go into the query."""
    M: tl.constexpr = size.shape[0]
    product, level = tl.zeros([BN, M], tl.float32), tl.zeros([16, M], tl.float32)
    for f in tl.static_range(plane_count(WIDTHS)):
        steps, zero_points = channel_numbers(numbers, words, f, D, W, WP, M == 8, FOLDED)
        exact = exact_query[f] / size[None, :]
        if FOLDED:
            scaled, left = scaled_factors(query[f], exact, steps, PRECISE)
            product = code_product(codes[f], scaled, left, product, PRECISE)
            level = level_of(query[f], exact, scaled, left, zero_points, bias_of(WIDTHS, f), level, PRECISE)
        else:
            keys = tokens_of(codes[f], bias_of(WIDTHS, f), steps[None, :], zero_points[None, :], PRECISE)
            product = tl.dot(keys, exact if PRECISE else query[f], product, input_precision="ieee")
    if FOLDED:
        product += (tl.sum(level, 0) / 16)[None, :]
    return product


@triton.jit
def scaled_factors(rounded, exact, steps, PRECISE: tl.constexpr):
    """A plane of the query times scales of its channels, as products take it; with PRECISE what that rounding took besides."""
    if PRECISE:
        scaled = exact * steps[:, None].to(tl.float32)
        taken = scaled.to(tl.float16)
        return taken, (scaled - taken.to(tl.float32)).to(tl.float16)
    else:
        scaled = rounded * steps[:, None]
        return scaled, scaled


@triton.jit
def level_of(rounded, exact, scaled, left, zero_points, bias: tl.constexpr, acc, PRECISE: tl.constexpr):
    """What a plane adds to the scores of every token, on sixteen equal rows, which are one matrix instruction: the query's product
    with zero points of its channels, less what the codes' bias adds to their product with `scaled`, as it was rounded."""
    biases = tl.full([16, scaled.shape[0]], -bias, tl.float16)
    raised = tl.broadcast_to(zero_points[None, :], [16, scaled.shape[0]])
    if PRECISE:
        acc = tl.dot(biases, left, acc)
        acc = tl.dot(raised.to(tl.float32), exact, acc, input_precision="ieee")
    else:
        acc = tl.dot(raised, rounded, acc)
    return tl.dot(biases, scaled, acc)
