"""Scores of a tile of tokens in `decode_kernel.py`: products of keys and queries, then bias, soft cap and masks. README.md derives
which numbers are folded where. BN is the number of tokens of a tile, M that of query rows of a program.
"""

import triton
import triton.language as tl

from calib.kernels.attend.channel_keys import channel_product
from calib.kernels.attend.loads import token_parameters
from calib.kernels.attend.rotate import keys_of, rotated, unrotated
from calib.kernels.attend.tile_products import code_product, exact_product
from calib.kernels.attend.unpack import plane_count

# Initial maximum: below every score but finite, so that a part whose tokens are all hidden has weights of 0 instead of NaN.
NOTHING = tl.constexpr(-1.0e38)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def exact_scores(keys, query, rest, INTERPRET: tl.constexpr):
    """Products [BN, M] of exact keys and the query, which for 16-bit keys comes as two 16-bit numbers, `query` and `rest`."""
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
    """Products [BN, M] of keys that are rebuilt from components and rotated to their positions. Where positions are slots, all
    tokens of a tile share the coarse part of the position; then the query is rotated back by it instead."""
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
    """Products [BN, M] of decoded keys and the query, in units of `size` [M] and of `product_unit`. `numbers` points to the page's
    parameters."""
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
    """Adds the low-rank part to `product`: RANK coefficients [BN], each times the query's product with its vector (`shared`)."""
    for j in tl.static_range(RANK):
        product += coefficients[j][:, None] * shared[j][None, :]
    return product


@triton.jit
def masked_scores(
    product, scale, shift, BIAS, SCORES, hidden, positions, back, rows, at, score_tile, in_use, turn, last, used, ahead, slots,
    base, query_rows, valid, HAS_BIAS: tl.constexpr, HAS_SCORES: tl.constexpr, HAS_AHEAD: tl.constexpr, SOFTCAP: tl.constexpr,
    RAGGED: tl.constexpr,
):  # fmt: skip
    """Returns scores [BN, M], -inf where masked, and `steepness` and `lift` [M]: the exponent of 2 is score * steepness + lift.

    With a bias, a soft cap or returned scores, the final scores are computed here. Otherwise `product` is only masked, and scale
    and shift are left to the exponent.
    """
    WHOLE: tl.constexpr = HAS_BIAS or HAS_SCORES or HAS_AHEAD or SOFTCAP is not None
    if WHOLE:
        product = product * scale[None, :] + shift[None, :]
        # Offsets of bias and scores: `score_tile` from the turn's first token; no mask of slots is needed unless pages are RAGGED.
        there, first = valid[None, :], base * slots + turn
        if RAGGED:
            there, first = valid[None, :] & (at < slots)[:, None], base * slots
            score_tile = rows[None, :] * slots + at[:, None]
        if HAS_BIAS:
            product += tl.load(BIAS + first + score_tile, mask=there, other=0.0)
        if HAS_AHEAD and last >= used:  # only the last turns contain keys behind the used slots
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
    """Stores scores of -inf for the slots behind a row's tokens, in turns from `start` to `stop`: the table has more slots than the
    row has tokens."""
    for turn in range(start, stop, BN):
        position = turn // PADDED
        slot = turn - position * PADDED + tokens
        there = (slot < PAGE)[:, None] & valid[None, :]
        scores = SCORES + (base + rows)[None, :] * slots + (position * PAGE + slot)[:, None]
        tl.store(scores, tl.full([BN, rows.shape[0]], float("-inf"), tl.float32), mask=there)
