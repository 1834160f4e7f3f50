"""The inner loop of decode attention over packed pages: codes go into matrix products as they are, all else is folded.

A program owns one KV head of one row, a block of query rows and a run of pages. It writes a part of the softmax (top, mass,
mixture); `merge` joins the parts of all runs. README.md derives what is folded where. Modes say how parameters lie: 0 none,
1 per token for groups of channels, 2 per channel for groups of tokens. Values of mode 1 may be scaled as well: by a number of
each page's channels. Tokens of mode 0 may have sizes: values, and keys that are turned, whose codes may be mixed as well. A page
need not be a whole number of turns; its last one is then masked.
"""

import triton
import triton.language as tl

from calib.kernels.attend.channel_keys import channel_product
from calib.kernels.attend.loads import (
    channel_numbers,
    code_words,
    folded_mixture,
    folded_query,
    largest_of,
    map_numbers,
    own_words,
    plane_numbers,
    query_planes,
    token_number,
    token_numbers,
    token_sizes,
    vector_products,
)
from calib.kernels.attend.rotate import halves_of, keys_of, offsets, query_halves, rotated, unrotated
from calib.kernels.attend.stacked_mixture import mixed_rows, no_rows, store_rows
from calib.kernels.attend.tile_products import biases_of, code_product, exact_product, factors_of, tokens_of
from calib.kernels.attend.unpack import are_codes, bias_of, is_trellis, plane_count, unpacked

# Below every score, and finite: a part in which all is hidden keeps weights of 0 instead of NaN.
NOTHING = tl.constexpr(-1.0e38)
# Beyond every slot.
NOWHERE = tl.constexpr(2**31 - 1)
LOG2E = tl.constexpr(1.4426950408889634)


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
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """Tokens are the rows of every product and query rows its columns, because a step has few of the latter. QUERY is of the
    model's type. SCORES are those of all `slots`, and with HAS_AHEAD, behind those of all rows, of the `ahead` keys behind the used
    ones, without a mask or a soft cap."""
    split, of_row, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, head, splits = of_row // heads, of_row % heads, tl.num_programs(0)
    FK: tl.constexpr = plane_count(KEY_WIDTHS)
    FV: tl.constexpr = plane_count(VALUE_WIDTHS)
    rows = block * M + tl.arange(0, M)
    valid = rows < query_rows
    base = of_row.to(tl.int64) * query_rows
    key_words, value_words, tokens = tl.arange(0, WKP), tl.arange(0, WVP), tl.arange(0, BN)
    key_first, own_keys = own_words(KEY_FIRST, head, key_head, key_words, WK, KEY_PIECE)
    value_first, own_values = own_words(VALUE_FIRST, head, value_head, value_words, WV, VALUE_PIECE)

    TURNED: tl.constexpr = HALF > 0
    KEY_SIZED: tl.constexpr = KEY_SIZES is not None
    VALUE_SIZED: tl.constexpr = VALUE_SIZES is not None
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
    if not TURNED:
        map_at, step_at = row * key_map_row + head * key_map_head, row * key_step_row + head * key_step_head
        scales = map_numbers(KEY_SCALE, map_at, key_map_channel, key_words, 1.0, FK, DK, WK)
        shifts = map_numbers(KEY_SHIFT, map_at, key_map_channel, key_words, 0.0, FK, DK, WK)
        steps = map_numbers(KEY_STEP, step_at, key_step_channel, key_words, 1.0, FK, DK, WK)
        zero_points = map_numbers(KEY_ZERO, step_at, key_step_channel, key_words, 0.0, FK, DK, WK)
        exact_query, constant = folded_query(exact_query, constant, scales, shifts, KEY_DIVIDES)
        # The query's products with the vectors that keys have coefficients of.
        products = vector_products(
            exact_query, KEY_VECTORS, row * key_vectors_row + head * key_vectors_head, key_words, KEY_RANK, DK, WK
        )
        exact_query, constant = folded_query(exact_query, constant, steps, zero_points, False)
        size = largest_of(exact_query)

    # The query as the products take it, and what the codes' bias and zero points make of it for each group of channels.
    query, rest, biased, summed = (), (), (), ()
    if not TURNED:
        KIND: tl.constexpr = tl.float16 if are_codes(KEY_WIDTHS) else KEYS.dtype.element_ty
        query, rest = factors_of(exact_query, size, KIND)
        biased, summed = biases_of(exact_query, query, rest, size, KEY_WIDTHS, KEY_GROUPS, PRECISE)

    # Scores are scale * product + shift, and powers of two: one multiply-add a score, where nothing has to be known between.
    scale, shift = size, constant
    if TURNED:
        scale = size * tl.load(SIZE + head)
    elif KEY_MODE == 0:
        shift = constant - biased[0] * size

    # The query's products with vectors, in the units of `product`.
    shared = ()
    for j in tl.static_range(KEY_RANK):
        shared += (products[j] / scale,)

    # Turns are counted as if pages were whole numbers of them. (Triton 3.6 has no `tl.cdiv` of constants.)
    PADDED: tl.constexpr = (PAGE + BN - 1) // BN * BN
    RAGGED: tl.constexpr = PADDED != PAGE
    EARLY: tl.constexpr = (
        M == 8 and BN <= 64 and VALUE_RANK == 0 and not RAGGED
    )  # registers are left for a turn's numbers
    used = tl.load(USED + row)
    first = split * run * BN
    stop = slots if HAS_SCORES else used
    if HAS_AHEAD and not HAS_SCORES:
        stop = tl.minimum(used + ahead, slots)
    if RAGGED:
        stop = stop // PAGE * PADDED + stop % PAGE
    stop = tl.minimum(first + run * BN, stop)
    top, mass, largest = tl.full([M], NOTHING, tl.float32), tl.zeros([M], tl.float32), tl.full([], 0.0, tl.float32)
    ones = tl.full([16, BN], 1.0, tl.float16)
    mixed, zeros, below, ranked = (), (), (), ()
    for _ in tl.static_range(VALUE_RANK):
        ranked += (tl.zeros([M], tl.float32),)
    if KEYS_MIXED:
        keys_mixed, keys_below = no_rows(KEY_WIDTHS, WKP, M)
    if VALUE_SIZED:
        mixed, below = no_rows(VALUE_WIDTHS, WVP, M)
    for _ in tl.static_range(0 if VALUE_SIZED else FV):
        mixed += (tl.zeros([WVP, M], tl.float32),)
    for _ in tl.static_range(0 if VALUE_SIZED else VALUE_GROUPS):
        zeros += (tl.zeros([M], tl.float32),)
        below += (tl.zeros([16, M], tl.float32),)

    for start in range(first, stop, BN):
        position = start // PADDED
        inside_page = start - position * PADDED
        page = tl.load(TABLE + row * table_width + position).to(tl.int64)
        slot = inside_page + tokens
        at = start + tokens
        if RAGGED:
            at = tl.where(slot < PAGE, position * PAGE + slot, NOWHERE)

        # Numbers of the turn's values, long before they are used where registers are left for them: a small load waits for memory
        # as long as a large one.
        numbers_of_values = VALUE_NUMBERS + page * value_numbers_page + head * value_numbers_head
        if VALUE_MODE == 1 and EARLY:
            value_steps = token_numbers(numbers_of_values, slot, slot < PAGE, 0, VALUE_GROUPS, RAGGED)
            value_zeros = token_numbers(numbers_of_values, slot, slot < PAGE, VALUE_GROUPS, VALUE_GROUPS, RAGGED)

        if KEY_SIZED or VALUE_SIZED:
            sizes_at = page * sizes_page + head % SIZE_WORDS + slot * SIZE_WORDS

        # Products [BN, M] of keys and queries.
        words, lowest = code_words(
            KEYS + page * key_page + key_first + slot[:, None] * KEY_ROW + key_words[None, :], key_words[None, :],
            own_keys[None, :], (slot < PAGE)[:, None], KEY_WIDTHS, KEY_FULL, RAGGED, INTERPRET,
        )  # fmt: skip
        product = tl.zeros([BN, M], tl.float32)
        if not are_codes(KEY_WIDTHS):
            product = exact_product(words, query[0], product, INTERPRET)
            if KEYS.dtype.element_ty != tl.float32:
                product = exact_product(words, rest[0], product, INTERPRET)
        else:
            codes = unpacked(words, lowest, KEY_WIDTHS, INTERPRET)
            numbers = KEY_NUMBERS + page * key_numbers_page + head * key_numbers_head
            if TURNED:
                # Components of keys before RoPE: put together and rotated to their positions. In slots' order the coarse part of
                # a position is a tile's, and unrotates the query.
                sizes = None
                if KEY_SIZED:
                    sizes = token_sizes(KEY_SIZES, sizes_at, head, slot < PAGE, SIZE_WORDS, RAGGED)
                keys = keys_of(codes, sizes, offset, AXES, key_words, near, far, paired, KEY_WIDTHS, WK, HALF)
                if HAS_POSITIONS:
                    held = POSITIONS + page * positions_page + head * positions_head + slot
                    position = tl.load(held, mask=at < used, other=0)
                    asked = exact_query
                else:
                    position = start % STRIDE + tokens
                    asked = unrotated(exact_query, COARSE + start // STRIDE * (2 * PAIRS), paired, PAIRS)
                keys = rotated(keys, position, COARSE, FINE, paired, PAIRS, STRIDE, HAS_POSITIONS)
                for half in tl.static_range(2):
                    if PRECISE:
                        product = tl.dot(keys[half], asked[half], product, input_precision="ieee")
                    else:
                        product = tl.dot(keys[half].to(tl.float16), asked[half].to(tl.float16), product)
            elif KEY_MODE == 2:
                numbers += inside_page // KEY_TOKENS * (2 * DK)
                product = channel_product(
                    codes,
                    numbers,
                    key_words,
                    query,
                    exact_query,
                    size,
                    KEY_WIDTHS,
                    DK,
                    WK,
                    WKP,
                    BN,
                    KEY_FOLDED,
                    PRECISE,
                )
            elif KEY_MODE == 1:
                for j in tl.static_range(KEY_GROUPS):
                    part = tl.zeros([BN, M], tl.float32)
                    for f in tl.static_range(j * (FK // KEY_GROUPS), (j + 1) * (FK // KEY_GROUPS)):
                        part = code_product(codes[f], query[f], rest[f], part, PRECISE)
                    own = numbers + slot * (2 * KEY_GROUPS) + j
                    product += (part - biased[j][None, :]) * token_number(own, slot < PAGE, RAGGED)[:, None]
                    product += summed[j][None, :] * token_number(own + KEY_GROUPS, slot < PAGE, RAGGED)[:, None]
            else:
                for f in tl.static_range(FK):
                    product = code_product(codes[f], query[f], rest[f], product, PRECISE)

        if KEY_RANK > 0:
            own = KEY_COEFFICIENTS + page * key_coefficients_page + head * key_coefficients_head + slot * KEY_RANK
            for j in tl.static_range(KEY_RANK):
                product += tl.load(own + j, mask=at < used, other=0.0).to(tl.float32)[:, None] * shared[j][None, :]

        if HAS_BIAS or HAS_SCORES or HAS_AHEAD or SOFTCAP is not None:
            product = product * scale[None, :] + shift[None, :]
            slots_of = (base + rows)[None, :] * slots + at[:, None]
            there = valid[None, :] & (at < slots)[:, None]
            if HAS_BIAS:
                product += tl.load(BIAS + slots_of, mask=there, other=0.0)
            if HAS_AHEAD:
                behind_used = (at >= used) & (at < tl.minimum(used + ahead, slots))
                scores_of = (base + rows)[None, :] * ahead + (at - used)[:, None]
                if HAS_SCORES:
                    scores_of += tl.num_programs(1).to(tl.int64) * query_rows * slots
                tl.store(SCORES + scores_of, product, mask=valid[None, :] & behind_used[:, None])
            if SOFTCAP is not None:
                product = SOFTCAP * (1 - 2 / (1 + tl.exp2(product * (2 * LOG2E / SOFTCAP))))
        seen = (at < used)[:, None]
        if HAS_HIDDEN:
            hidden = tl.load(HIDDEN + row * hidden_row + head * hidden_head + at, mask=at < slots, other=1)
            seen &= (hidden == 0)[:, None]
        if HAS_BACK:
            position = at
            if HAS_POSITIONS:
                position = tl.load(
                    POSITIONS + page * positions_page + head * positions_head + slot, mask=at < used, other=0
                )
            back = tl.load(BACK + row * columns + rows % columns, mask=valid, other=-1)
            seen &= position[:, None] > back[None, :]
        product = tl.where(seen, product, float("-inf"))
        if HAS_BIAS or HAS_SCORES or HAS_AHEAD or SOFTCAP is not None:
            if HAS_SCORES:
                tl.store(SCORES + slots_of, product, mask=there)
            steepness, lift = tl.full([M], LOG2E, tl.float32), tl.zeros([M], tl.float32)
        else:
            steepness, lift = scale * LOG2E, shift * LOG2E

        # Weights, and how much of what is there stays.
        higher = tl.maximum(top, tl.max(product, 0) * steepness + lift)
        stays = tl.exp2(top - higher)
        weights = tl.exp2(product * steepness[None, :] + (lift - higher)[None, :])
        mass = mass * stays + tl.sum(weights, 0)
        top = higher

        if VALUE_RANK > 0:
            own = (
                VALUE_COEFFICIENTS + page * value_coefficients_page + head * value_coefficients_head + slot * VALUE_RANK
            )
            new_ranked = ()
            for j in tl.static_range(VALUE_RANK):
                coefficient = tl.load(own + j, mask=at < used, other=0.0).to(tl.float32)[:, None]
                new_ranked += (ranked[j] * stays + tl.sum(weights * coefficient, 0),)
            ranked = new_ranked

        if KEYS_MIXED:
            if is_trellis(KEY_WIDTHS):
                lowest = tl.trans(lowest)
            keys_mixed, keys_below = mixed_rows(
                tl.trans(words), lowest, weights * sizes[:, None], keys_mixed, keys_below, stays, KEY_WIDTHS,
                PRECISE, INTERPRET,
            )  # fmt: skip

        # Mixtures [WV, M] of every plane.
        words, lowest = code_words(
            VALUES + page * value_page + value_first + slot[None, :] * VALUE_ROW + value_words[:, None],
            value_words[:, None], own_values[:, None], (slot < PAGE)[None, :], VALUE_WIDTHS, VALUE_FULL, RAGGED, INTERPRET,
        )  # fmt: skip
        new, new_zeros, new_below = (), (), ()
        if VALUE_SIZED:
            folded = weights * token_sizes(VALUE_SIZES, sizes_at, head, slot < PAGE, SIZE_WORDS, RAGGED)[:, None]
            new, new_below = mixed_rows(words, lowest, folded, mixed, below, stays, VALUE_WIDTHS, PRECISE, INTERPRET)
        elif not are_codes(VALUE_WIDTHS):
            new += (exact_product(words, weights.to(VALUES.dtype.element_ty), mixed[0] * stays[None, :], INTERPRET),)
            new_zeros, new_below = zeros, below
        else:
            codes = unpacked(words, lowest, VALUE_WIDTHS, INTERPRET)
            if VALUE_MODE == 2:
                numbers = numbers_of_values + inside_page // VALUE_TOKENS * (2 * DV)
                for f in tl.static_range(FV):
                    steps, zero_points = channel_numbers(numbers, value_words, f, DV, WV, WVP, M == 8)
                    values = tokens_of(
                        codes[f], bias_of(VALUE_WIDTHS, f), steps[:, None], zero_points[:, None], PRECISE
                    )
                    factors = weights if PRECISE else weights.to(tl.float16)
                    new += (tl.dot(values, factors, mixed[f] * stays[None, :], input_precision="ieee"),)
                new_zeros, new_below = zeros, below
            else:
                share, kept = 1.0, stays
                if VALUE_MODE == 1:
                    if not EARLY:
                        value_steps = token_numbers(numbers_of_values, slot, slot < PAGE, 0, VALUE_GROUPS, RAGGED)
                    # Scales go into the weights, as shares of the largest so far: float16 neither overflows nor starves.
                    most = largest
                    for j in tl.static_range(VALUE_GROUPS):
                        most = tl.maximum(most, tl.max(tl.where(at < used, value_steps[j], 0.0), 0))
                    share = 1 / tl.maximum(most, 1.0e-30)
                    kept = stays * (largest * share)
                    largest = most
                for j in tl.static_range(VALUE_GROUPS):
                    folded = weights
                    if VALUE_MODE == 1:
                        folded = weights * (value_steps[j] * share)[:, None]
                        if EARLY:
                            zero = value_zeros[j]
                        else:
                            own = numbers_of_values + slot * (2 * VALUE_GROUPS) + VALUE_GROUPS + j
                            zero = token_number(own, slot < PAGE, RAGGED)
                        zeroed = tl.sum(weights * zero[:, None], 0)
                        new_zeros += (zeros[j] if VALUE_SCALED else zeros[j] * stays + zeroed,)
                    else:
                        new_zeros += (zeros[j],)
                    rounded = folded.to(tl.float16)
                    left = (folded - rounded.to(tl.float32)).to(tl.float16)
                    # The bias comes back with the weights as the products took them: a product with ones sums just those.
                    if VALUE_SCALED:
                        # A page's channels have scales, so its mixture is made whole before it is added.
                        own_scales = VALUE_SCALES + page * value_scales_page + head * value_scales_head
                        summed_up = code_product(ones, rounded, left, tl.zeros([16, M], tl.float32), PRECISE)
                        lifted = tl.sum(summed_up, 0) / 16
                        new_below += (below[j],)
                        for f in tl.static_range(j * (FV // VALUE_GROUPS), (j + 1) * (FV // VALUE_GROUPS)):
                            part = code_product(codes[f], rounded, left, tl.zeros([WVP, M], tl.float32), PRECISE)
                            part += (zeroed * share - bias_of(VALUE_WIDTHS, f) * lifted)[None, :]
                            channel_scales = plane_numbers(own_scales, value_words, f, DV, WV)
                            new += (mixed[f] * kept[None, :] + part * channel_scales[:, None],)
                    else:
                        new_below += (code_product(ones, rounded, left, below[j] * kept[None, :], PRECISE),)
                        for f in tl.static_range(j * (FV // VALUE_GROUPS), (j + 1) * (FV // VALUE_GROUPS)):
                            new += (code_product(codes[f], rounded, left, mixed[f] * kept[None, :], PRECISE),)
        mixed, zeros, below = new, new_zeros, new_below

    # Behind a mixture's channels: the sum of weights times sizes, the coefficients' mixture, that of keys' codes and its sum.
    WIDE: tl.constexpr = DV + VALUE_SIZED + VALUE_RANK + KEYS_MIXED * (DK + 1)
    part = (of_row * splits + split).to(tl.int64) * query_rows
    if not VALUE_SIZED:
        step_at, map_at = row * value_step_row + head * value_step_head, row * value_map_row + head * value_map_head
        value_channel_steps = map_numbers(VALUE_STEP, step_at, value_step_channel, value_words, 1.0, FV, DV, WV)
        value_channel_zeros = map_numbers(VALUE_ZERO, step_at, value_step_channel, value_words, 0.0, FV, DV, WV)
        value_channel_scales = map_numbers(VALUE_SCALE, map_at, value_map_channel, value_words, 1.0, FV, DV, WV)
        value_channel_shifts = map_numbers(VALUE_SHIFT, map_at, value_map_channel, value_words, 0.0, FV, DV, WV)
    tl.store(TOP + part + rows, top / LOG2E, mask=valid)
    tl.store(MASS + part + rows, mass, mask=valid)
    if VALUE_SIZED:
        store_rows(MIXED + (part + rows) * WIDE, mixed, below, valid, VALUE_WIDTHS, DV, WV, WVP)
    for f in tl.static_range(0 if VALUE_SIZED else FV):
        out = mixed[f]
        if are_codes(VALUE_WIDTHS) and VALUE_MODE != 2:
            if VALUE_SCALED:
                out = out * largest
            else:
                # All sixteen rows of the product with ones are the same.
                out -= (bias_of(VALUE_WIDTHS, f) / 16) * tl.sum(below[f // (FV // VALUE_GROUPS)], 0)[None, :]
                if VALUE_MODE == 1:
                    out = out * largest + zeros[f // (FV // VALUE_GROUPS)][None, :]
        channels = f * WV + value_words
        inside = (value_words < WV) & (channels < DV)
        out = folded_mixture(out, mass, value_channel_steps, value_channel_zeros, f, False)
        out = folded_mixture(out, mass, value_channel_scales, value_channel_shifts, f, VALUE_DIVIDES)
        own_rows = inside[:, None] & valid[None, :]
        tl.store(MIXED + (part + rows)[None, :] * WIDE + channels[:, None], out, mask=own_rows)
    for j in tl.static_range(VALUE_RANK):
        tl.store(MIXED + (part + rows) * WIDE + (DV + VALUE_SIZED + j), ranked[j], mask=valid)
    if KEYS_MIXED:
        behind = MIXED + (part + rows) * WIDE + (DV + VALUE_SIZED + VALUE_RANK)
        store_rows(behind, keys_mixed, keys_below, valid, KEY_WIDTHS, DK, WK, WKP)
