"""Products of a tile of keys with a scale s and a zero point z per channel and group of tokens: x^ = c s + z.

For groups of many tokens the scales are folded into the query: q . x^ = sum (q s) c + sum q z, so that codes need no arithmetic.
The second sum is the same for every token of the group. For groups of few tokens the codes are decoded to float16.
"""

import triton
import triton.language as tl

from calib.kernels.attend.loads import channel_numbers
from calib.kernels.attend.tile_products import code_product, factor_of, product_unit, tokens_of
from calib.kernels.attend.unpack import plane_count


@triton.constexpr_function
def by_factor(widths, whole):
    """Planes in the order of the factors of their queries (`factor_of`), the smallest first."""
    return tuple(sorted(range(plane_count(widths)), key=lambda plane: factor_of(widths, plane, whole, True)))


@triton.constexpr_function
def growth_of(widths, number, whole):
    """Ratio of the factor of the plane after the `number`-th in that order to the `number`-th's; after the last one it is 1."""
    factors = [*(factor_of(widths, plane, whole, True) for plane in by_factor(widths, whole)), 1.0]
    return factors[number + 1] / factors[number]


@triton.jit
def channel_product(
    codes, numbers, words, query, exact_query, size, WIDTHS: tl.constexpr, D: tl.constexpr, W: tl.constexpr, WP: tl.constexpr,
    BN: tl.constexpr, FOLDED: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """Products [BN, M], float32, of a tile that lies in one group; `numbers` points to the group's row of parameters. The query's
    planes [WP, M] are given rounded to float16 in units of `size` [M] (`query`), and exact. FOLDED: scales go into the query."""
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
    """Adds a plane of channels to `product` and to `level` [16, M], the contribution of zero points, which all tokens share:
    sixteen equal rows, computed by one matrix instruction. `level` is rescaled by `growth` for the next plane, whose query has a
    larger factor."""
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
