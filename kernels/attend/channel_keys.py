"""Products of a tile of keys whose channels have scales and zero points for groups of tokens: x^ = c s + z, s and z of a channel.

A group of many tokens has its scales in the query: q . x^ = sum (q s) c + sum q z, so that nothing is done to codes. The second sum
is the same for every token of the group. In a group of few tokens scales go into the codes, as float16.
"""

import triton
import triton.language as tl

from calib.kernels.attend.loads import channel_numbers
from calib.kernels.attend.tile_products import code_product, factor_of, product_unit, tokens_of
from calib.kernels.attend.unpack import plane_count


@triton.constexpr_function
def by_factor(widths, whole):
    """Planes in the order of the factors that their queries have, the smallest first."""
    return tuple(sorted(range(plane_count(widths)), key=lambda plane: factor_of(widths, plane, whole, True)))


@triton.constexpr_function
def growth_of(widths, number, whole):
    """How much larger the factor of the plane behind this `number` of that order is; behind the last one it is 1."""
    factors = [*(factor_of(widths, plane, whole, True) for plane in by_factor(widths, whole)), 1.0]
    return factors[number + 1] / factors[number]


@triton.jit
def channel_product(
    codes, numbers, words, query, exact_query, size, WIDTHS: tl.constexpr, D: tl.constexpr, W: tl.constexpr, WP: tl.constexpr,
    BN: tl.constexpr, FOLDED: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """float32 [BN, M] of a tile in one group, whose row of parameters begins at `numbers`; the query's planes [WP, M] are rounded
    to float16 and exact, the former in units of `size` [M]. FOLDED: scales go into the query."""
    M: tl.constexpr = size.shape[0]
    product, level = tl.zeros([BN, M], tl.float32), tl.zeros([16, M], tl.float32)
    if FOLDED:
        for number in tl.static_range(plane_count(WIDTHS)):
            product, level = with_plane(
                product, level, codes, numbers, words, query, exact_query, size, by_factor(WIDTHS, PRECISE)[number],
                growth_of(WIDTHS, number, PRECISE), D, W, WP, PRECISE,
            )  # fmt: skip
        product += (tl.sum(level, 0) * (product_unit(WIDTHS, PRECISE, True) / 16))[None, :]
    else:
        for f in tl.static_range(plane_count(WIDTHS)):
            steps, zero_points = channel_numbers(numbers, words, f, D, W, WP, M == 8, False)
            keys = tokens_of(codes[f], steps[None, :], zero_points[None, :], PRECISE)
            factors = exact_query[f] / size[None, :] if PRECISE else query[f]
            product = tl.dot(keys, factors, product, input_precision="ieee")
    return product


@triton.jit
def with_plane(
    product, level, codes, numbers, words, query, exact_query, size, plane: tl.constexpr, growth: tl.constexpr, D: tl.constexpr,
    W: tl.constexpr, WP: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """`product`, and the `level` [16, M] of all tokens' scores that zero points make, with a plane of channels added: sixteen equal
    rows, which are one matrix instruction. The next plane's query has a `growth` times as large factor, zero points have none."""
    steps, zero_points = channel_numbers(numbers, words, plane, D, W, WP, size.shape[0] == 8, True)
    raised = tl.broadcast_to(zero_points[None, :], [16, WP])
    if PRECISE:
        exact = exact_query[plane] / size[None, :]
        scaled = exact * steps[:, None].to(tl.float32)
        taken = scaled.to(tl.float16)
        product = code_product(codes[plane], taken, (scaled - taken.to(tl.float32)).to(tl.float16), product, True)
        level = tl.dot(raised.to(tl.float32), exact, level, input_precision="ieee")
    else:
        product = tl.dot(codes[plane], query[plane] * steps[:, None], product)
        level = tl.dot(raised, query[plane], level)
    if growth > 1:
        level *= growth
    return product, level
