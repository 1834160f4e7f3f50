"""Triton kernel of decode attention over packed pages: codes enter matrix products as small float16 numbers, and scales and zero
points are folded into queries, weights and outputs.

A program handles one KV head of one row, a block of query rows and a run of pages. It writes a part of the softmax (top, mass,
mixture); `merge` joins the parts of all runs. The steps are in `decode_scores.py` and `decode_mixture.py`; README.md derives which
numbers are folded where. The mode of a stream's parameters is 0 for none, 1 for per token and group of channels, 2 for per channel
and group of tokens. Values of mode 1 may also have a scale for each channel of a page. In mode 0, values may have sizes, and so may
keys that are rotated (RoPE), whose codes may be mixed as well. A turn is an iteration of the loop over tokens. A page need not be a
whole number of turns; its last one is then masked.
"""

import triton
import triton.language as tl

from calib.kernels.attend.decode_mixture import (
    LEAST_STEP,
    mixed_by_channel,
    mixed_by_token,
    mixed_coefficients,
    no_mixture,
    store_mixture,
)
from calib.kernels.attend.decode_scores import (
    LOG2E,
    NOTHING,
    code_scores,
    exact_scores,
    masked_scores,
    put_unseen,
    rotated_scores,
    with_coefficients,
)
from calib.kernels.attend.loads import (
    channel_maps,
    code_words,
    folded_query,
    largest_of,
    own_words,
    query_planes,
    token_coefficients,
    token_parameters,
    token_sizes,
    vector_products,
)
from calib.kernels.attend.rotate import halves_of, offsets, query_halves
from calib.kernels.attend.stacked_mixture import mixed_rows, no_rows, store_rows
from calib.kernels.attend.tile_products import (
    ROWS,
    exact_product,
    factors_of,
    product_unit,
    raised,
    rows_joined,
    sums_of,
)
from calib.kernels.attend.unpack import are_codes, codes_of, is_trellis, plane_count, unpacked

# A slot number beyond every slot.
NOWHERE = tl.constexpr(2**31 - 1)


@triton.jit(do_not_specialize=["columns", "table_width", "run", "ahead", "hidden_row", "hidden_head"])
def attend(
    QUERY, KEYS, KEY_NUMBERS, KEY_FIRST, VALUES, VALUE_NUMBERS, VALUE_FIRST, TABLE, USED, CONSTANT, BIAS, HIDDEN, POSITIONS, BACK,
    KEY_STEP, KEY_ZERO, KEY_SCALE, KEY_SHIFT, VALUE_STEP, VALUE_ZERO, VALUE_SCALE, VALUE_SHIFT,
    AXES, MEAN, SIZE, COARSE, FINE, KEY_COEFFICIENTS, KEY_VECTORS, VALUE_COEFFICIENTS, VALUE_SCALES,
    KEY_SIZES, VALUE_SIZES, TOP, MASS, MIXED, SCORES,
    query_scale, heads, query_rows, columns, table_width, run, slots, ahead,
    key_page, key_head, key_numbers_page, key_numbers_head,
    value_page, value_head, value_numbers_page, value_numbers_head,
    hidden_row, hidden_head, positions_page, positions_head,
    key_coefficients_page, key_coefficients_head, key_vectors_row, key_vectors_head,
    value_coefficients_page, value_coefficients_head,
    value_scales_page, value_scales_head, sizes_page,
    key_step_row, key_step_head, key_step_channel, key_map_row, key_map_head, key_map_channel,
    value_step_row, value_step_head, value_step_channel, value_map_row, value_map_head, value_map_channel,
    KEY_WIDTHS: tl.constexpr, KEY_MODE: tl.constexpr, KEY_GROUPS: tl.constexpr, KEY_TOKENS: tl.constexpr,
    VALUE_WIDTHS: tl.constexpr, VALUE_MODE: tl.constexpr, VALUE_GROUPS: tl.constexpr, VALUE_TOKENS: tl.constexpr,
    KEY_FOLDED: tl.constexpr, KEY_RANK: tl.constexpr, VALUE_RANK: tl.constexpr, VALUE_SCALED: tl.constexpr,
    SIZE_WORDS: tl.constexpr, KEYS_MIXED: tl.constexpr, KEY_DIVIDES: tl.constexpr, VALUE_DIVIDES: tl.constexpr,
    KEY_ROW: tl.constexpr, KEY_PIECE: tl.constexpr, KEY_FULL: tl.constexpr,
    VALUE_ROW: tl.constexpr, VALUE_PIECE: tl.constexpr, VALUE_FULL: tl.constexpr,
    DK: tl.constexpr, WK: tl.constexpr, WKP: tl.constexpr, DV: tl.constexpr, WV: tl.constexpr, WVP: tl.constexpr,
    HALF: tl.constexpr, HALFP: tl.constexpr, PAIRS: tl.constexpr, STRIDE: tl.constexpr,
    M: tl.constexpr, BN: tl.constexpr, PAGE: tl.constexpr, SOFTCAP: tl.constexpr,
    HAS_CONSTANT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_HIDDEN: tl.constexpr, HAS_POSITIONS: tl.constexpr,
    HAS_BACK: tl.constexpr, HAS_SCORES: tl.constexpr, HAS_AHEAD: tl.constexpr, PRECISE: tl.constexpr,
    INTERPRET: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Tokens are the rows of every product and query rows its columns, because a decode step has few query rows. QUERY has the
    model's dtype. SCORES receives the scores of all `slots` and, with HAS_AHEAD, after those of all query rows, the scores of the
    `ahead` keys behind the used slots, without a mask or a soft cap. EARLY: the next launch may start while this kernel runs
    (`kernels/early_launch.py`)."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    split, of_row, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, head, splits = of_row // heads, of_row % heads, tl.num_programs(0)
    FK: tl.constexpr = plane_count(KEY_WIDTHS)
    FV: tl.constexpr = plane_count(VALUE_WIDTHS)
    TURNED: tl.constexpr = HALF > 0
    KEYS_WHOLE: tl.constexpr = PRECISE or (KEY_MODE == 2 and not KEY_FOLDED)
    KEY_SIZED: tl.constexpr = KEY_SIZES is not None
    VALUE_SIZED: tl.constexpr = VALUE_SIZES is not None
    rows = block * M + tl.arange(0, M)
    valid = rows < query_rows
    base = of_row.to(tl.int64) * query_rows
    key_words, value_words, tokens = tl.arange(0, WKP), tl.arange(0, WVP), tl.arange(0, BN)
    key_first, own_keys = own_words(KEY_FIRST, head, key_head, key_words, WK, KEY_PIECE)
    value_first, own_values = own_words(VALUE_FIRST, head, value_head, value_words, WV, VALUE_PIECE)

    # The query, and the constant that is added to its scores.
    if TURNED:
        near, far, paired = halves_of(HALF, HALFP, PAIRS)
        exact_query, size = query_halves(QUERY + base * (2 * HALF), query_scale, rows, valid, near, far, paired, HALF)
        exact_query = (exact_query[0] / size[None, :], exact_query[1] / size[None, :])
        AXES += head * (FK * WK * 2 * HALF)
        offset = offsets(
            AXES, MEAN + head * (2 * HALF), SIZE + head, key_words, near, far, paired, KEY_WIDTHS, WK, HALF, KEY_SIZED
        )
    else:
        exact_query = query_planes(QUERY, base * DK, query_scale, rows, valid, FK, WK, WKP, DK)
    constant = tl.zeros([M], tl.float32)
    if HAS_CONSTANT:
        constant = tl.load(CONSTANT + base + rows, mask=valid, other=0.0)

    # Fold scales and zero points into query and constant. A score is scale * product + shift, and weights are powers of two, so
    # that one multiply-add per score suffices where the score itself is not needed.
    if TURNED:
        scale, shift = size * tl.load(SIZE + head), constant
    else:
        map_at, step_at = row * key_map_row + head * key_map_head, row * key_step_row + head * key_step_head
        steps, zero_points, scales, shifts = channel_maps(
            KEY_STEP, KEY_ZERO, KEY_SCALE, KEY_SHIFT, step_at, key_step_channel, map_at, key_map_channel, key_words, FK, DK, WK
        )  # fmt: skip
        exact_query, constant = folded_query(exact_query, constant, scales, shifts, KEY_DIVIDES)
        # Products of the query with the low-rank vectors of keys, before the codes' steps are folded into the query.
        products = vector_products(
            exact_query, KEY_VECTORS, row * key_vectors_row + head * key_vectors_head, key_words, KEY_RANK, DK, WK
        )
        exact_query, constant = folded_query(exact_query, constant, steps, zero_points, False)
        size = largest_of(exact_query)
        # The query as the products take it, and its sum over each group of channels, which zero points are multiplied by.
        KIND: tl.constexpr = tl.float16 if are_codes(KEY_WIDTHS) else KEYS.dtype.element_ty
        UNIT: tl.constexpr = product_unit(KEY_WIDTHS, KEYS_WHOLE, KEY_FOLDED)
        query, rest = factors_of(raised(exact_query, KEY_WIDTHS, KEYS_WHOLE, KEY_FOLDED), size, KIND)
        summed = sums_of(exact_query, size / UNIT, KEY_GROUPS)
        scale, shift = size / UNIT, constant
    shared = ()  # the query's products with the low-rank vectors, in the units of `product`
    for j in tl.static_range(KEY_RANK):
        shared += (products[j] / scale,)
    hidden = None
    if HAS_HIDDEN:
        hidden = HIDDEN + row * hidden_row + head * hidden_head
    back = None
    if HAS_BACK:
        back = BACK + row * columns + rows % columns

    # Tiles of the run, counted as if every page were padded to whole tiles. (Triton 3.6 has no `tl.cdiv` of constants.)
    PADDED: tl.constexpr = (PAGE + BN - 1) // BN * BN
    RAGGED: tl.constexpr = PADDED != PAGE
    used = tl.load(USED + row)
    first = split * run * BN
    stop = used
    if HAS_AHEAD:
        stop = tl.minimum(used + ahead, slots)
    if RAGGED:
        stop = stop // PAGE * PADDED + stop % PAGE
    stop = tl.minimum(first + run * BN, stop)
    if HAS_SCORES:
        unseen = first + (tl.maximum(stop - first, 0) + BN - 1) // BN * BN
        last = tl.minimum(first + run * BN, slots // PAGE * PADDED)
        put_unseen(SCORES, base, rows, valid, tokens, unseen, last, slots, PAGE, PADDED, BN)

    top, mass, largest = (
        tl.full([M], NOTHING, tl.float32),
        tl.zeros([ROWS, M], tl.float32),
        tl.full([], LEAST_STEP, tl.float32),
    )
    mixed, zeros, total = no_mixture(VALUE_WIDTHS, VALUE_GROUPS, VALUE_SIZED, WVP, M)
    ranked = ()
    for _ in tl.static_range(VALUE_RANK):
        ranked += (tl.zeros([ROWS, M], tl.float32),)
    if KEYS_MIXED:
        keys_mixed, keys_total = no_rows(KEY_WIDTHS, WKP, M)

    # Offsets of a turn's scores and words from its first token; the loop adds only one number to each.
    score_tile = rows[None, :] * slots + tokens[:, None]
    key_tile = tokens[:, None] * KEY_ROW + key_words[None, :]
    value_tile = tokens[None, :] * VALUE_ROW + value_words[:, None]
    for start in range(first, stop, BN):
        position = start // PADDED
        inside_page = start - position * PADDED
        page = tl.load(TABLE + row * table_width + position).to(tl.int64)
        slot = inside_page + tokens
        in_page = slot < PAGE
        at = start + tokens
        in_use = tokens < used - start
        if RAGGED:
            at = tl.where(in_page, position * PAGE + slot, NOWHERE)
            in_use = at < used
        positions = None
        if HAS_POSITIONS:
            positions = POSITIONS + page * positions_page + head * positions_head + slot
        if KEY_SIZED or VALUE_SIZED:
            sizes_at = page * sizes_page + head % SIZE_WORDS + slot * SIZE_WORDS

        # Products [BN, M] of keys and queries.
        words, odd = code_words(
            KEYS + (page * key_page + key_first + inside_page * KEY_ROW) + key_tile, key_words[None, :], own_keys[None, :],
            in_page[:, None], KEY_WIDTHS, KEY_FULL, RAGGED, INTERPRET,
        )  # fmt: skip
        if not are_codes(KEY_WIDTHS):
            product = exact_scores(words, query, rest, INTERPRET)
        elif TURNED:
            codes = unpacked(words, odd, KEY_WIDTHS, True, INTERPRET)
            sizes = None
            if KEY_SIZED:
                sizes = token_sizes(KEY_SIZES, sizes_at, head, in_page, SIZE_WORDS, RAGGED)
            product = rotated_scores(
                codes, sizes, offset, exact_query, AXES, COARSE, FINE, positions, key_words, near, far, paired, start, tokens,
                in_use, KEY_WIDTHS, WK, HALF, PAIRS, STRIDE, PRECISE,
            )  # fmt: skip
        else:
            codes = codes_of(words, odd, KEY_WIDTHS, KEYS_WHOLE, INTERPRET)
            product = code_scores(
                codes, KEY_NUMBERS + page * key_numbers_page + head * key_numbers_head, query, rest, summed, exact_query, size,
                key_words, inside_page, slot, in_page, KEY_WIDTHS, KEY_MODE, KEY_GROUPS, KEY_TOKENS, KEY_FOLDED, DK, WK, WKP,
                RAGGED, PRECISE,
            )  # fmt: skip
        if KEY_RANK > 0:
            own = KEY_COEFFICIENTS + page * key_coefficients_page + head * key_coefficients_head
            own = token_coefficients(own, slot, in_use, KEY_RANK)
            product = with_coefficients(product, own, shared, KEY_RANK)

        # Weights, and the factor by which the sums so far are rescaled.
        product, steepness, lift = masked_scores(
            product, scale, shift, BIAS, SCORES, hidden, positions, back, rows, at, score_tile, in_use, start, start + BN - 1, used,
            ahead, slots, base, query_rows, valid, HAS_BIAS, HAS_SCORES, HAS_AHEAD, SOFTCAP, RAGGED,
        )  # fmt: skip
        higher = tl.maximum(top, tl.max(product, 0) * steepness + lift)
        stays = tl.exp2(top - higher)
        weights = tl.exp2(product * steepness[None, :] + (lift - higher)[None, :])
        mass = mass * stays[None, :] + rows_joined(weights)
        top = higher

        # Mixtures of low-rank coefficients of values, of key codes, and of values.
        if VALUE_RANK > 0:
            own = VALUE_COEFFICIENTS + page * value_coefficients_page + head * value_coefficients_head
            own = token_coefficients(own, slot, in_use, VALUE_RANK)
            ranked = mixed_coefficients(own, weights, ranked, stays, VALUE_RANK)
        if KEYS_MIXED:
            if is_trellis(KEY_WIDTHS):
                odd = tl.trans(odd)
            keys_mixed, keys_total = mixed_rows(
                tl.trans(words), odd, weights * sizes[:, None], keys_mixed, keys_total, stays, KEY_WIDTHS,
                PRECISE, INTERPRET,
            )  # fmt: skip
        value_numbers = VALUE_NUMBERS + page * value_numbers_page + head * value_numbers_head
        words, odd = code_words(
            VALUES + (page * value_page + value_first + inside_page * VALUE_ROW) + value_tile, value_words[:, None],
            own_values[:, None], in_page[None, :], VALUE_WIDTHS, VALUE_FULL, RAGGED, INTERPRET,
        )  # fmt: skip
        if VALUE_SIZED:
            folded = weights * token_sizes(VALUE_SIZES, sizes_at, head, in_page, SIZE_WORDS, RAGGED)[:, None]
            mixed, total = mixed_rows(words, odd, folded, mixed, total, stays, VALUE_WIDTHS, PRECISE, INTERPRET)
        elif not are_codes(VALUE_WIDTHS):
            mixed = (exact_product(words, weights.to(words.dtype), mixed[0] * stays[None, :], INTERPRET),)
        elif VALUE_MODE == 2:
            codes = codes_of(words, odd, VALUE_WIDTHS, True, INTERPRET)
            value_numbers += inside_page // VALUE_TOKENS * (2 * DV)
            mixed = mixed_by_channel(
                codes, value_numbers, weights, mixed, stays, value_words, VALUE_WIDTHS, DV, WV, WVP, PRECISE
            )
        else:
            codes = codes_of(words, odd, VALUE_WIDTHS, PRECISE, INTERPRET)
            value_steps, value_zeros, value_scales = (), (), None
            if VALUE_MODE == 1:
                value_steps, value_zeros = token_parameters(value_numbers, slot, in_page, VALUE_GROUPS, RAGGED)
            if VALUE_SCALED:
                value_scales = VALUE_SCALES + page * value_scales_page + head * value_scales_head
            mixed, zeros, largest = mixed_by_token(
                codes, value_steps, value_zeros, value_scales, weights, mixed, zeros, largest, stays,
                value_words, in_use, VALUE_WIDTHS, VALUE_MODE, VALUE_GROUPS, DV, WV, WVP, PRECISE,
            )  # fmt: skip

    # Store the part. Columns behind the mixture's channels: sum of weights times sizes, mixture of the coefficients, mixture of the
    # key codes and the sum of their weights.
    WIDE: tl.constexpr = DV + VALUE_SIZED + VALUE_RANK + KEYS_MIXED * (DK + 1)
    part = (of_row * splits + split).to(tl.int64) * query_rows
    if not VALUE_SIZED:
        step_at, map_at = row * value_step_row + head * value_step_head, row * value_map_row + head * value_map_head
        maps = channel_maps(
            VALUE_STEP, VALUE_ZERO, VALUE_SCALE, VALUE_SHIFT, step_at, value_step_channel, map_at, value_map_channel, value_words,
            FV, DV, WV,
        )  # fmt: skip
    mass = tl.sum(mass, 0)
    tl.store(TOP + part + rows, top / LOG2E, mask=valid)
    tl.store(MASS + part + rows, mass, mask=valid)
    out = MIXED + (part + rows) * WIDE
    if VALUE_SIZED:
        store_rows(out, mixed, total, valid, VALUE_WIDTHS, DV, WV, WVP, PRECISE)
    else:
        store_mixture(
            out, mixed, zeros, largest, mass, maps, value_words, valid, VALUE_WIDTHS, VALUE_MODE, VALUE_GROUPS, VALUE_SCALED,
            VALUE_DIVIDES, DV, WV, PRECISE,
        )  # fmt: skip
    for j in tl.static_range(VALUE_RANK):
        tl.store(out + (DV + VALUE_SIZED + j), tl.sum(ranked[j], 0), mask=valid)
    if KEYS_MIXED:
        out += DV + VALUE_SIZED + VALUE_RANK
        store_rows(out, keys_mixed, keys_total, valid, KEY_WIDTHS, DK, WK, WKP, PRECISE)
