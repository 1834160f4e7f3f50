"""Triton kernel for the bias of scores by outliers of keys in lists of whole segments, sorted by token (`RowLists`).

A program handles one KV head of one row, a block of query rows and a run of tokens. It stores its query to scratch memory, channel
by channel, where it stays in the L1 cache. Each lane handles a token of a tile: it loops over the token's outliers, and for each
loads the query rows' numbers in its channel. A tile takes as many iterations as its token with the most outliers.
"""

import triton
import triton.language as tl

from calib.kernels.outliers.score_kernel import index_of, own_piece

# Outliers of a token that are read at once.
AT_ONCE = tl.constexpr(8)

UNFIXED = ["heads", "query_rows", "slots", "first", "run", "entries"]


@triton.jit(do_not_specialize=UNFIXED)
def list_scores(
    QUERY, SCALE, USED, RECORDS, DELTA, INDEX, STARTS, BEGINS, PLACED, BIAS,
    query_scale, heads, query_rows, slots, first, run, entries,
    scale_row, scale_head, scale_channel, list_record, starts_record, starts_head, begins_record, begins_head,
    D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Stores BIAS `[rows, heads, query_rows, slots]`. A program handles `run` tiles of BN tokens; slot 0 has the segment's token
    `first`. `entries`: length of a list."""
    part, of_row, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, head = of_row // heads, of_row % heads
    base = of_row.to(tl.int64) * query_rows
    rows, tokens, channels = block * M + tl.arange(0, M), tl.arange(0, BN), tl.arange(0, DP)
    valid = rows < query_rows
    asked = (channels < D)[:, None] & valid[None, :]
    query = tl.load(QUERY + (base + rows)[None, :] * D + channels[:, None], mask=asked, other=0.0)
    query = query.to(tl.float32) * query_scale
    if SCALE is not None:
        scale = SCALE + row * scale_row + head * scale_head + channels * scale_channel
        query *= tl.load(scale, mask=channels < D, other=0.0).to(tl.float32)[:, None]
    of_block = tl.arange(0, M)
    PLACED += own_piece() * (DP * M)
    tl.store(PLACED + channels[:, None] * M + of_block[None, :], query)
    tl.debug_barrier()

    record = row
    if RECORDS is not None:
        record = tl.load(RECORDS + row)
    record = record.to(tl.int64)
    DELTA += record * list_record
    INDEX += record * list_record
    STARTS += record * starts_record + head * starts_head
    BEGINS += record * begins_record + head * begins_head
    used = tl.load(USED + row)
    begin = part * run * BN
    for start in range(begin, tl.minimum(begin + run * BN, used), BN):
        slot = start + tokens
        token, there = first + slot, slot < used
        stretch = tl.load(STARTS + token // SPAN, mask=there, other=0)
        at = stretch + index_of(BEGINS + token, there)
        # The last token of a stretch ends where the next stretch begins.
        end = tl.load(STARTS + (token + 1) // SPAN, mask=there, other=0) + index_of(BEGINS + token + 1, there)
        end = tl.minimum(end, entries)
        product = tl.zeros([BN, M], tl.float32)
        for _ in range(0, tl.max(end - at, 0), AT_ONCE):
            for number in tl.static_range(AT_ONCE):
                inside = at + number < end
                channel = index_of(INDEX + at + number, inside)
                delta = tl.load(DELTA + at + number, mask=inside, other=0.0).to(tl.float32)
                met = tl.load(PLACED + channel[:, None] * M + of_block[None, :])
                product += met * delta[:, None]
            at += AT_ONCE
        tl.store(BIAS + (base + rows)[None, :] * slots + slot[:, None], product, mask=valid[None, :] & there[:, None])
