"""Triton kernel that adds outliers and low-rank terms of values (`PageTerms`) to the softmax parts of attention's kernel.

A program handles one part: a KV head of one row, a block of query rows and a run of tokens. It computes weights from the part's
scores and its `top`, scatters the outliers of a tile of tokens into a dense matrix of channels x tokens in its own scratch memory,
reads the matrix back, adds its product with the weights to the part's mixture, and sets the same cells to zero. No other program
writes to that mixture. The parts are merged afterwards as usual.
"""

import triton
import triton.language as tl

from calib.kernels.outliers.score_kernel import factors, index_of, own_piece, placed_product

LOG2E = tl.constexpr(1.4426950408889634)
# Outliers of a lane that are read at once.
AT_ONCE = tl.constexpr(5)

UNFIXED = ["heads", "query_rows", "slots", "table_row", "run"]


@triton.jit(do_not_specialize=UNFIXED)
def mixture_terms(
    SCORES, SCALE, TABLE, USED, DELTA, INDEX, COEFFICIENTS, BASIS, VECTORS, TOP, PLACED, MIXED,
    heads, query_rows, slots, table_row, run,
    scale_row, scale_head, scale_channel, delta_page, delta_head, coefficients_page, coefficients_head, basis_page, basis_head,
    vectors_row, vectors_head,
    ACROSS: tl.constexpr, RANK: tl.constexpr, RANKED: tl.constexpr, COLUMNS: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, WIDE: tl.constexpr, LANES: tl.constexpr, M: tl.constexpr, BN: tl.constexpr,
    PAGE: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Updates MIXED. A part has `run` tokens, counted as if every page had PADDED slots. A row of MIXED has COLUMNS numbers: D
    channels, then the mixtures of RANKED coefficients, whose VECTORS all tokens of a row share. RANK further coefficients of a
    token belong to the BASIS of its page."""
    split, of_row, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, head, splits = of_row // heads, of_row % heads, tl.num_programs(0)
    base = of_row.to(tl.int64) * query_rows
    part = (of_row * splits + split).to(tl.int64) * query_rows
    rows, tokens, channels = block * M + tl.arange(0, M), tl.arange(0, BN), tl.arange(0, DP)
    valid = rows < query_rows
    added = tl.zeros([DP, M], tl.float32)
    if SCORES is not None:
        top = tl.load(TOP + part + rows, mask=valid, other=0.0)
        used = tl.load(USED + row)
        begin = split * run
        stop = tl.minimum(begin + run, used // PAGE * PADDED + used % PAGE)
        if DELTA is not None:
            KIND: tl.constexpr = DELTA.dtype.element_ty
            PLACED += own_piece() * (DP * BN)
            lanes = tl.arange(0, LANES)
            whole = PLACED + channels[:, None] * BN + tokens[None, :]
            tl.store(whole, tl.zeros([DP, BN], KIND))
        for start in range(begin, stop, BN):
            position = start // PADDED
            page = tl.load(TABLE + row * table_row + position).to(tl.int64)
            slot = start - position * PADDED + tokens
            slots_of = position * PAGE + slot
            there = (slot < PAGE) & (slots_of < used)
            scores = tl.load(
                SCORES + (base + rows)[None, :] * slots + slots_of[:, None],
                mask=valid[None, :] & there[:, None], other=float("-inf"),
            )  # fmt: skip
            weights = tl.exp2((scores - top[None, :]) * LOG2E)
            if DELTA is not None:
                of_tokens = page * delta_page + head * delta_head + (start - position * PADDED) * WIDE
                before = 0
                if ACROSS:
                    before = head * D
                held = tl.minimum(
                    tl.minimum(BN, PAGE + position * PADDED - start), used - position * (PAGE - PADDED) - start
                )
                # The zeros of the tile before must be stored before this tile's outliers.
                tl.debug_barrier()
                # The first outliers are all read before one is stored; their cells are kept for the zeros.
                cells, deltas = (), ()
                for number in tl.static_range(AT_ONCE):
                    at = AT_ONCE * lanes + number
                    cell, delta = outliers(DELTA, INDEX, of_tokens, at, held, before, WIDE, D, BN)
                    cells += (cell,)
                    deltas += (delta,)
                put_outliers(
                    PLACED, cells, deltas, DELTA, INDEX, of_tokens, lanes, held, before, WIDE, D, BN, LANES, False
                )
                tl.debug_barrier()
                rounded, left = factors(weights, KIND)
                added = placed_product(tl.load(whole), rounded, left, added)
                tl.debug_barrier()
                put_outliers(
                    PLACED, cells, deltas, DELTA, INDEX, of_tokens, lanes, held, before, WIDE, D, BN, LANES, True
                )
            for j in tl.static_range(RANK):
                own = COEFFICIENTS + page * coefficients_page + head * coefficients_head + slot * RANK + j
                ranked = tl.sum(weights * tl.load(own, mask=there, other=0.0).to(tl.float32)[:, None], 0)
                vector = BASIS + page * basis_page + head * basis_head + j * D + channels
                added += tl.load(vector, mask=channels < D, other=0.0).to(tl.float32)[:, None] * ranked[None, :]
    add_to_part(
        MIXED + part * COLUMNS, SCALE, VECTORS, added, row, head, rows, channels, valid,
        scale_row, scale_head, scale_channel, vectors_row, vectors_head, RANKED, COLUMNS, D,
    )  # fmt: skip


@triton.jit
def add_to_part(
    MIXED, SCALE, VECTORS, added, row, head, rows, channels, valid,
    scale_row, scale_head, scale_channel, vectors_row, vectors_head,
    RANKED: tl.constexpr, COLUMNS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Adds `added [DP, M]` to a part's mixture, and the product of VECTORS with the mixtures of coefficients behind its channels;
    both times SCALE, if given."""
    for j in tl.static_range(RANKED):
        ranked = tl.load(MIXED + rows * COLUMNS + (D + j), mask=valid, other=0.0)
        vector = VECTORS + row * vectors_row + head * vectors_head + j * D + channels
        added += tl.load(vector, mask=channels < D, other=0.0).to(tl.float32)[:, None] * ranked[None, :]
    if SCALE is not None:
        scale = SCALE + row * scale_row + head * scale_head + channels * scale_channel
        added *= tl.load(scale, mask=channels < D, other=0.0).to(tl.float32)[:, None]
    inside = valid[None, :] & (channels < D)[:, None]
    pointers = MIXED + rows[None, :] * COLUMNS + channels[:, None]
    tl.store(pointers, tl.load(pointers, mask=inside, other=0.0) + added, mask=inside)


@triton.jit
def put_outliers(
    PLACED, cells, deltas, DELTA, INDEX, of_tokens, lanes, held, before,
    WIDE: tl.constexpr, D: tl.constexpr, BN: tl.constexpr, LANES: tl.constexpr, CLEARED: tl.constexpr,
):  # fmt: skip
    """Stores a tile's outliers: the first ones, `deltas`, to their `cells`, then the rest. CLEARED: store zeros instead."""
    zeros = tl.zeros([LANES], DELTA.dtype.element_ty)
    for number in tl.static_range(AT_ONCE):
        tl.store(PLACED + cells[number], zeros if CLEARED else deltas[number], mask=cells[number] >= 0)
    for some in range(AT_ONCE * LANES, held * WIDE, AT_ONCE * LANES):
        for number in tl.static_range(AT_ONCE):
            at = some + AT_ONCE * lanes + number
            cell, delta = outliers(DELTA, INDEX, of_tokens, at, held, before, WIDE, D, BN)
            tl.store(PLACED + cell, zeros if CLEARED else delta, mask=cell >= 0)


@triton.jit
def outliers(
    DELTA, INDEX, of_tokens, at, held, before, WIDE: tl.constexpr, D: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """Loads the outliers with numbers `at` of a tile with `held` tokens: their cells in the matrix of channels x tokens, -1 for
    those of other heads and unused ones, and their deltas."""
    inside = at < held * WIDE
    channel = index_of(INDEX + of_tokens + at, inside) - before
    delta = tl.load(DELTA + of_tokens + at, mask=inside, other=0.0)
    own = (channel >= 0) & (channel < D) & (delta != 0.0)
    return tl.where(own, channel * BN + at // WIDE, -1), delta
