"""Triton kernel for the bias of scores by outliers of keys and by low-rank terms with a basis per page (`PageTerms`).

A program handles one KV head of one row, a block of query rows and a run of tokens. Outliers that are listed by channel are
scattered into a dense matrix of tokens x channels in scratch memory of the program, which is then read tile by tile and multiplied
with the query in one product. Afterwards only the same cells are set to zero, a fiftieth of the matrix, because every store goes to
the L2 cache. Lists are sorted by token, so a program reads them sequentially. Nothing is accumulated in memory, so that the order
of sums is fixed.
"""

import triton
import triton.language as tl

# Entries of a channel that are read at once.
AT_ONCE = tl.constexpr(2)

UNFIXED = ["heads", "query_rows", "slots", "table_row", "run", "wide"]


@triton.jit(do_not_specialize=UNFIXED)
def score_terms(
    QUERY, SCALE, TABLE, USED, DELTA, INDEX, COEFFICIENTS, BASIS, PLACED, BIAS,
    query_scale, heads, query_rows, slots, table_row, run, wide,
    scale_row, scale_head, scale_channel, delta_page, delta_head, coefficients_page, coefficients_head, basis_page, basis_head,
    LISTED: tl.constexpr, ACROSS: tl.constexpr, RANK: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Stores BIAS `[rows, heads, query_rows, slots]`. `wide`: entries per channel of a page if LISTED, else entries per token."""
    part, of_row, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, head = of_row // heads, of_row % heads
    base = of_row.to(tl.int64) * query_rows
    rows, tokens, channels = block * M + tl.arange(0, M), tl.arange(0, BN), tl.arange(0, DP)
    valid = rows < query_rows
    QUERY += base * D
    query = tl.load(
        QUERY + rows[None, :] * D + channels[:, None], mask=valid[None, :] & (channels < D)[:, None], other=0.0
    )
    query = query.to(tl.float32) * query_scale
    if SCALE is not None:
        SCALE += row * scale_row + head * scale_head
        scale = tl.load(SCALE + channels * scale_channel, mask=channels < D, other=0.0).to(tl.float32)
        query *= scale[:, None]
    if LISTED:
        # Factors of the product, divided by the largest of each query row: float16 neither overflows nor underflows.
        size = tl.maximum(tl.max(tl.abs(query), 0), 1.0e-30)
        KIND: tl.constexpr = DELTA.dtype.element_ty
        rounded, left = factors(query / size[None, :], KIND)
        PLACED += own_piece() * (BN * DP)
        tl.store(PLACED + tokens[:, None] * DP + channels[None, :], tl.zeros([BN, DP], KIND))

    # Tiles are counted as if every page were padded to whole tiles.
    PADDED: tl.constexpr = (PAGE + BN - 1) // BN * BN
    used = tl.load(USED + row)
    begin = part * run * BN
    stop = tl.minimum(begin + run * BN, used // PAGE * PADDED + used % PAGE)
    at = tl.zeros([DP], tl.int32)
    for start in range(begin, stop, BN):
        position = start // PADDED
        inside_page = start - position * PADDED
        page = tl.load(TABLE + row * table_row + position).to(tl.int64)
        slot = inside_page + tokens
        slots_of = position * PAGE + slot
        there = (slot < PAGE) & (slots_of < used)
        list_at = page * delta_page + head * delta_head
        if LISTED:  # a program's run has whole pages
            at = tl.where(inside_page == 0, 0, at)
            # The zeros of the tile before must be stored before this tile's entries.
            tl.debug_barrier()
            written_from = at
            end = tl.minimum(tl.minimum(inside_page + BN, PAGE), used - position * PAGE)
            at, times = write_entries(
                PLACED + channels, DELTA + list_at, INDEX + list_at, at, inside_page, end, channels, wide, D, DP
            )
            tl.debug_barrier()
        product = tl.zeros([BN, M], tl.float32)
        if DELTA is not None:
            if LISTED:
                placed = tl.load(PLACED + tokens[:, None] * DP + channels[None, :])
                product = placed_product(placed, rounded, left, product) * size[None, :]
            else:
                of_tokens = page * delta_page + head * delta_head + slot * wide
                before = 0
                if ACROSS:
                    before = head * D
                for number in range(wide):
                    channel = index_of(INDEX + of_tokens + number, there) - before
                    own = there & (channel >= 0) & (channel < D)
                    delta = tl.load(DELTA + of_tokens + number, mask=own, other=0.0).to(tl.float32)
                    asked = own[:, None] & valid[None, :]
                    met = tl.load(QUERY + rows[None, :] * D + channel[:, None], mask=asked, other=0.0)
                    delta *= query_scale
                    if SCALE is not None:
                        delta *= tl.load(SCALE + channel * scale_channel, mask=own, other=0.0).to(tl.float32)
                    product += met.to(tl.float32) * delta[:, None]
        for j in tl.static_range(RANK):
            vector = BASIS + page * basis_page + head * basis_head + j * D + channels
            shared = tl.sum(query * tl.load(vector, mask=channels < D, other=0.0).to(tl.float32)[:, None], 0)
            own = COEFFICIENTS + page * coefficients_page + head * coefficients_head + slot * RANK + j
            product += tl.load(own, mask=there, other=0.0).to(tl.float32)[:, None] * shared[None, :]
        tl.store(
            BIAS + (base + rows)[None, :] * slots + slots_of[:, None], product, mask=valid[None, :] & there[:, None]
        )
        if LISTED:
            tl.debug_barrier()
            for _ in range(times):
                for _ in tl.static_range(AT_ONCE):
                    line = index_of(INDEX + list_at + written_from * D + channels, written_from < at) - inside_page
                    tl.store(PLACED + channels + line * DP, tl.zeros([DP], KIND), mask=written_from < at)
                    written_from += 1


@triton.jit
def token_at(
    at, PADDED: tl.constexpr, PAGE: tl.constexpr
):  # fmt: skip
    """Slot number of position `at`, which counts as if every page had PADDED slots."""
    return at // PADDED * PAGE + tl.minimum(at % PADDED, PAGE)


@triton.jit
def write_entries(
    PLACED, DELTA, INDEX, at, begin, end, channels, wide, D: tl.constexpr, DP: tl.constexpr
):  # fmt: skip
    """Scatters the entries of tokens `begin` ... `end` - 1, which start at `at` in each channel's list, into lines of DP numbers at
    PLACED. AT_ONCE entries of each channel are read before any is written. Return the new `at` and the number of iterations."""
    times, some_left = 0, True
    while some_left:
        first = at
        tokens, deltas = (), ()
        for number in tl.static_range(AT_ONCE):
            token, delta = entry(DELTA, INDEX, first + number, channels, wide, D)
            tokens += (token,)
            deltas += (delta,)
        for number in tl.static_range(AT_ONCE):
            at += write_entry(PLACED, tokens[number], deltas[number], begin, end, DP)
        some_left = tl.max(at - first, 0) == AT_ONCE
        times += 1
    return at, times


@triton.jit
def entry(
    DELTA, INDEX, at, channels, wide, D: tl.constexpr
):  # fmt: skip
    """Loads token and delta of the entry `at` of each channel, [DP]; both are 0 for unused entries and beyond a list."""
    inside = (at < wide) & (channels < D)
    token = index_of(INDEX + at * D + channels, inside)
    return token, tl.load(DELTA + at * D + channels, mask=inside, other=0.0)


@triton.jit
def write_entry(
    PLACED, token, delta, begin, end, DP: tl.constexpr
):  # fmt: skip
    """Stores an entry of each channel if it is used and its token is in the range; returns 1 for stored entries, else 0."""
    line = token - begin
    own = (line >= 0) & (line < end - begin) & ((token != 0) | (delta != 0.0))
    tl.store(PLACED + line * DP, delta, mask=own)
    return own.to(tl.int32)


@triton.jit
def index_of(pointers, inside):
    """Loads stored indices as int32; 16-bit ones are unsigned."""
    found = tl.load(pointers, mask=inside, other=0)
    if found.dtype == tl.int16:
        return found.to(tl.int32) & 0xFFFF
    else:
        return found.to(tl.int32)


@triton.jit
def own_piece():
    """Number of this program among all programs, int64."""
    line = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    return line * tl.num_programs(0) + tl.program_id(0)


@triton.jit
def factors(
    numbers, KIND: tl.constexpr
):  # fmt: skip
    """Numbers of magnitude 1 at most, prepared for products with deltas of type KIND: for float16 split into the nearest float16
    and the rest, else unchanged."""
    if tl.float16 == KIND:
        rounded = numbers.to(tl.float16)
        return rounded, (numbers - rounded.to(tl.float32)).to(tl.float16)
    else:
        return numbers, numbers


@triton.jit
def placed_product(placed, rounded, left, total):
    """`total` plus the product of the matrix `placed` with numbers prepared by `factors`."""
    if placed.dtype == tl.float16:
        return tl.dot(placed, rounded, tl.dot(placed, left, total))
    else:
        return tl.dot(placed, rounded, total, input_precision="tf32x3")
