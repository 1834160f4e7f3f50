"""Triton kernel that adds outliers of values in lists of whole segments, sorted by channel (`RowLists`), to softmax parts.

A program handles one part: a KV head of one row, a block of query rows and a run of tokens. It loops over the stretches that
contain the run, two at a time, one per warp. For each it computes weights from the part's scores and its `top` and stores them to
scratch memory, token by token. Each lane then loops over its share of the stretch's outliers (`row_lists.py`), loads the weights
of each and accumulates until the channel changes. Entries are sorted by channel, so a channel that begins and ends within a lane
belongs to that lane alone; only the first and the last channel of a lane may continue in other lanes, and these sums are combined
after the stretch. The order of sums is fixed.
"""

import triton
import triton.language as tl

from calib.kernels.outliers.mixture_kernel import LOG2E, add_to_part
from calib.kernels.outliers.row_lists import LANES as OF_STRETCH
from calib.kernels.outliers.score_kernel import index_of, own_piece, token_at

# Outliers of a lane that are read at once, and tokens whose weights are computed at once.
AT_ONCE, TOGETHER = tl.constexpr(4), tl.constexpr(128)

# Base-2 logarithm of the lanes of a stretch.
DOUBLINGS = tl.constexpr(OF_STRETCH.bit_length() - 1)

UNFIXED = ["heads", "query_rows", "slots", "first", "run"]


@triton.jit(do_not_specialize=UNFIXED)
def list_mixtures(
    SCORES, SCALE, USED, RECORDS, DELTA, INDEX, STARTS, VECTORS, TOP, PLACED, MIXED,
    heads, query_rows, slots, first, run,
    scale_row, scale_head, scale_channel, list_record, starts_record, starts_head, vectors_row, vectors_head,
    RANKED: tl.constexpr, COLUMNS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr,
    SPAN: tl.constexpr, LANES: tl.constexpr, STRETCHES: tl.constexpr, PAGE: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Updates MIXED. A part has `run` tokens, counted as if every page had PADDED slots; slot 0 has the segment's token `first`."""
    split, of_row, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, head, splits = of_row // heads, of_row % heads, tl.num_programs(0)
    base = of_row.to(tl.int64) * query_rows
    part = (of_row * splits + split).to(tl.int64) * query_rows
    of_block, lanes, channels = tl.arange(0, M), tl.arange(0, LANES * STRETCHES), tl.arange(0, DP)
    number, lane = lanes // LANES, lanes % LANES
    rows = block * M + of_block
    valid = rows < query_rows
    top = tl.load(TOP + part + rows, mask=valid, other=0.0)

    # Scratch memory: weights of the stretches' tokens, sums of channels, and each lane's sum of its first channel.
    SUMS_AT: tl.constexpr = STRETCHES * SPAN * M
    WEIGHTS = PLACED + own_piece() * (SUMS_AT + STRETCHES * (DP + LANES) * M)
    SUMS = WEIGHTS + SUMS_AT
    FIRSTS = SUMS + (STRETCHES * DP + lanes)[:, None] * M + of_block[None, :]
    whole = SUMS + channels[:, None] * M + of_block[None, :]
    record = row
    if RECORDS is not None:
        record = tl.load(RECORDS + row)
    record = record.to(tl.int64)
    DELTA += record * list_record
    INDEX += record * list_record
    STARTS += record * starts_record + head * starts_head
    used = tl.load(USED + row)
    begin = token_at(split * run, PADDED, PAGE)
    stop = tl.minimum(token_at(split * run + run, PADDED, PAGE), used)
    last = tl.where(begin < stop, (first + stop + SPAN - 1) // SPAN, 0)
    added = tl.zeros([DP, M], tl.float32)
    for stretch in range((first + begin) // SPAN, last, STRETCHES):
        for own in tl.static_range(STRETCHES):
            tl.store(whole + own * (DP * M), tl.zeros([DP, M], tl.float32))
        put_weights(
            WEIGHTS, SCORES, top, base, rows, of_block, valid, stretch * SPAN - first, begin, stop, slots, M, STRETCHES * SPAN,
        )  # fmt: skip
        tl.debug_barrier()
        channel = lanes * 0 - 1
        first_channel, alone = channel, lanes >= 0
        total = tl.zeros([LANES * STRETCHES, M], tl.float32)
        there = stretch + number < last
        at = tl.load(STARTS + stretch + number, mask=there, other=0)
        end = tl.load(STARTS + stretch + number + 1, mask=there, other=0)
        entry = at + lane
        index, delta = of_lane(INDEX, DELTA, entry, end, LANES)
        for _ in range(0, tl.max(end - at, 0), LANES * AT_ONCE):
            # All weights are read before anything is stored; the next entries are loaded while these weights arrive.
            owners, products = (), ()
            for turn in tl.static_range(AT_ONCE):
                inside = entry + turn * LANES < end
                weights = tl.load(WEIGHTS + (number * SPAN + index[turn] % SPAN)[:, None] * M + of_block[None, :])
                owners += (tl.where(inside, number * DP + index[turn] // SPAN, -1),)
                products += (weights * delta[turn][:, None],)
            entry += LANES * AT_ONCE
            index, delta = of_lane(INDEX, DELTA, entry, end, LANES)
            for turn in tl.static_range(AT_ONCE):
                changed = (owners[turn] >= 0) & (owners[turn] != channel)
                ended = changed & (channel >= 0)
                line = SUMS + tl.where(alone, STRETCHES * DP + lanes, channel)[:, None] * M + of_block[None, :]
                tl.store(line, total, mask=ended[:, None])
                first_channel = tl.where(ended & alone, channel, first_channel)
                alone = alone & ~ended
                total = tl.where(changed[:, None], 0.0, total) + products[turn]
                channel = tl.where(changed, owners[turn], channel)
        tl.debug_barrier()
        firsts = tl.where(alone[:, None], total, tl.load(FIRSTS, mask=(~alone)[:, None], other=0.0))
        add_lanes(SUMS, tl.where(alone, channel, first_channel), firsts, lanes, of_block, M, LANES * STRETCHES)
        add_lanes(SUMS, channel, tl.where(alone[:, None], 0.0, total), lanes, of_block, M, LANES * STRETCHES)
        for own in tl.static_range(STRETCHES):
            added += tl.load(whole + own * (DP * M))
        tl.debug_barrier()
    add_to_part(
        MIXED + part * COLUMNS, SCALE, VECTORS, added, row, head, rows, channels, valid,
        scale_row, scale_head, scale_channel, vectors_row, vectors_head, RANKED, COLUMNS, D,
    )  # fmt: skip


@triton.jit
def of_lane(INDEX, DELTA, entry, end, LANES: tl.constexpr):
    """Loads indices and deltas of AT_ONCE entries of each lane from its `entry` on; 0 behind the `end`."""
    indices, deltas = (), ()
    for turn in tl.static_range(AT_ONCE):
        inside = entry + turn * LANES < end
        indices += (index_of(INDEX + entry + turn * LANES, inside),)
        deltas += (tl.load(DELTA + entry + turn * LANES, mask=inside, other=0.0).to(tl.float32),)
    return indices, deltas


@triton.jit
def put_weights(
    WEIGHTS, SCORES, top, base, rows, of_block, valid, from_slot, begin, stop, slots, M: tl.constexpr, SPAN: tl.constexpr
):  # fmt: skip
    """Stores the weights of SPAN tokens from slot `from_slot` on; 0 for slots outside `begin` ... `stop` - 1."""
    SOME: tl.constexpr = min(TOGETHER, SPAN)
    for piece in tl.static_range(0, SPAN, SOME):
        tokens = piece + tl.arange(0, SOME)
        slot = from_slot + tokens
        there = (slot >= begin) & (slot < stop)
        scores = SCORES + (base + rows)[None, :] * slots + slot[:, None]
        scores = tl.load(scores, mask=valid[None, :] & there[:, None], other=float("-inf"))
        tl.store(WEIGHTS + tokens[:, None] * M + of_block[None, :], tl.exp2((scores - top[None, :]) * LOG2E))


@triton.jit
def add_lanes(
    SUMS, channel, total, lanes, of_block, M: tl.constexpr, COUNT: tl.constexpr
):  # fmt: skip
    """Adds the sums `total` of COUNT lanes to the sums of their `channel` (-1: none). Channels are sorted, so the lanes of one
    channel are neighbours: a segmented scan adds the sums 1, 2, 4, ... lanes before, and a channel's last lane has its total."""
    for number in tl.static_range(DOUBLINGS):
        before = tl.maximum(lanes - (1 << number), 0)
        same = (tl.gather(channel, before, 0) == channel) & (lanes >= (1 << number))
        others = tl.gather(total, tl.broadcast_to(before[:, None], [COUNT, M]), 0)
        total += tl.where(same[:, None], others, 0.0)
    following = tl.gather(channel, tl.minimum(lanes + 1, COUNT - 1), 0)
    ends = (channel >= 0) & ((channel != following) | (lanes == COUNT - 1))
    line = SUMS + channel[:, None] * M + of_block[None, :]
    tl.store(line, tl.load(line, mask=ends[:, None], other=0.0) + total, mask=ends[:, None])
    tl.debug_barrier()
