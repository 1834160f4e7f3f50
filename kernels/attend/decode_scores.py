"""Scores of a tile of tokens inside `decode_kernel.py`: products of keys with the query, and what is done to them before they are
weights. README.md derives what is folded where.
"""

import triton
import triton.language as tl

from calib.kernels.attend.channel_keys import channel_product
from calib.kernels.attend.loads import token_parameters
from calib.kernels.attend.rotate import keys_of, rotated, unrotated
from calib.kernels.attend.tile_products import code_product, exact_product
from calib.kernels.attend.unpack import plane_count

# Below every score, and finite: a part in which all is hidden keeps weights of 0 instead of NaN.
NOTHING = tl.constexpr(-1.0e38)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def exact_scores(keys, query, rest, INTERPRET: tl.constexpr):
    """The product [BN, M] of keys as the model made them."""
    product = tl.zeros([keys.shape[0], query[0].shape[1]], tl.float32)
    product = exact_product(keys, query[0], product, INTERPRET)
    if keys.dtype != tl.float32:
        product = exact_product(keys, rest[0], product, INTERPRET)
    return product


@triton.jit
def rotated_scores(
    codes, sizes, offset, query, AXES, COARSE, FINE, positions, words, near, far, paired, start, tokens, inside,
    WIDTHS: tl.constexpr, W: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr, STRIDE: tl.constexpr,
    PRECISE: tl.constexpr,
):  # fmt: skip
    """The product [BN, M] of components of keys before RoPE, which are put together and rotated to their positions. Where these are
    slots, the coarse part of a position is a tile's, and unrotates the query."""
    HAS_POSITIONS: tl.constexpr = positions is not None
    keys = keys_of(codes, sizes, offset, AXES, words, near, far, paired, WIDTHS, W, HALF)
    if HAS_POSITIONS:
        position = tl.load(positions, mask=inside, other=0)
        asked = query
    else:
        position = start % STRIDE + tokens
        asked = unrotated(query, COARSE + start // STRIDE * (2 * PAIRS), paired, PAIRS)
    keys = rotated(keys, position, COARSE, FINE, paired, PAIRS, STRIDE, HAS_POSITIONS)
    product = tl.zeros([tokens.shape[0], query[0].shape[1]], tl.float32)
    for half in tl.static_range(2):
        if PRECISE:
            product = tl.dot(keys[half], asked[half], product, input_precision="ieee")
        else:
            product = tl.dot(keys[half].to(tl.float16), asked[half].to(tl.float16), product)
    return product


@triton.jit
def code_scores(
    codes, numbers, query, rest, summed, exact_query, size, words, inside_page, slot, in_page,
    WIDTHS: tl.constexpr, MODE: tl.constexpr, GROUPS: tl.constexpr, TOKENS: tl.constexpr, FOLDED: tl.constexpr,
    D: tl.constexpr, W: tl.constexpr, WP: tl.constexpr, RAGGED: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """The product [BN, M] of codes, in units of `size` [M] and of `product_unit`. Parameters of the page begin at `numbers`."""
    BN: tl.constexpr = slot.shape[0]
    M: tl.constexpr = size.shape[0]
    PLANES: tl.constexpr = plane_count(WIDTHS) // GROUPS
    product = tl.zeros([BN, M], tl.float32)
    if MODE == 2:
        of_group = numbers + inside_page // TOKENS * (2 * D)
        product = channel_product(
            codes, of_group, words, query, exact_query, size, WIDTHS, D, W, WP, BN, FOLDED, PRECISE
        )
    elif MODE == 1:
        steps, zero_points = token_parameters(numbers, slot, in_page, GROUPS, RAGGED)
        for j in tl.static_range(GROUPS):
            part = tl.zeros([BN, M], tl.float32)
            for f in tl.static_range(j * PLANES, (j + 1) * PLANES):
                part = code_product(codes[f], query[f], rest[f], part, PRECISE)
            product += part * steps[j][:, None]
            product += summed[j][None, :] * zero_points[j][:, None]
    else:
        for f in tl.static_range(plane_count(WIDTHS)):
            product = code_product(codes[f], query[f], rest[f], product, PRECISE)
    return product


@triton.jit
def with_coefficients(product, coefficients, shared, RANK: tl.constexpr):
    """`product`, and what the RANK coefficients [BN] of a token add: each times the query's product, of `shared`."""
    for j in tl.static_range(RANK):
        product += coefficients[j][:, None] * shared[j][None, :]
    return product


@triton.jit
def masked_scores(
    product, scale, shift, BIAS, SCORES, hidden, positions, back, rows, at, score_tile, in_use, turn, last, used, ahead, slots,
    base, query_rows, valid, HAS_BIAS: tl.constexpr, HAS_SCORES: tl.constexpr, HAS_AHEAD: tl.constexpr, SOFTCAP: tl.constexpr,
    RAGGED: tl.constexpr,
):  # fmt: skip
    """Scores [BN, M], -inf of what is not seen, and the `steepness` and `lift` [M] that make exponents of 2 of them.

    Where something has to know scores before, they are made whole here: a bias, a soft cap, whoever is told them. Else what is
    left to do goes into the exponents.
    """
    WHOLE: tl.constexpr = HAS_BIAS or HAS_SCORES or HAS_AHEAD or SOFTCAP is not None
    if WHOLE:
        product = product * scale[None, :] + shift[None, :]
        # Where a bias and scores lie: `score_tile`, from the turn's first token on; all slots are there but those of RAGGED pages.
        there, first = valid[None, :], base * slots + turn
        if RAGGED:
            there, first = valid[None, :] & (at < slots)[:, None], base * slots
            score_tile = rows[None, :] * slots + at[:, None]
        if HAS_BIAS:
            product += tl.load(BIAS + first + score_tile, mask=there, other=0.0)
        if HAS_AHEAD and last >= used:  # few turns have such keys
            behind_used = (at >= used) & (at < tl.minimum(used + ahead, slots))
            scores_of = (base + rows)[None, :] * ahead + (at - used)[:, None]
            if HAS_SCORES:
                scores_of += tl.num_programs(1).to(tl.int64) * query_rows * slots
            tl.store(SCORES + scores_of, product, mask=valid[None, :] & behind_used[:, None])
        if SOFTCAP is not None:
            product = SOFTCAP * (1 - 2 / (1 + tl.exp2(product * (2 * LOG2E / SOFTCAP))))
    seen = in_use[:, None]
    if hidden is not None:
        seen &= (tl.load(hidden + at, mask=at < slots, other=1) == 0)[:, None]
    if back is not None:
        position = at
        if positions is not None:
            position = tl.load(positions, mask=in_use, other=0)
        seen &= position[:, None] > tl.load(back, mask=valid, other=-1)[None, :]
    product = tl.where(seen, product, float("-inf"))
    if WHOLE:
        if HAS_SCORES:
            tl.store(SCORES + first + score_tile, product, mask=there)
        return product, tl.full([rows.shape[0]], LOG2E, tl.float32), tl.zeros([rows.shape[0]], tl.float32)
    else:
        return product, scale * LOG2E, shift * LOG2E


@triton.jit
def put_unseen(
    SCORES, base, rows, valid, tokens, start, stop, slots, PAGE: tl.constexpr, PADDED: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """Scores of -inf for the slots behind a row's tokens, from the turn at `start` on: other rows have more, tables have room."""
    for turn in range(start, stop, BN):
        position = turn // PADDED
        slot = turn - position * PADDED + tokens
        there = (slot < PAGE)[:, None] & valid[None, :]
        scores = SCORES + (base + rows)[None, :] * slots + (position * PAGE + slot)[:, None]
        tl.store(scores, tl.full([BN, rows.shape[0]], float("-inf"), tl.float32), mask=there)
