"""Triton kernel that merges the softmax parts of `decode_kernel.py`'s runs and maps mixtures of component codes to channels."""

import triton
import triton.language as tl

from calib.kernels.attend.decode_scores import LOG2E, NOTHING


@triton.jit(do_not_specialize=["splits", "query_rows", "heads"])
def merge(
    TOP, MASS, MIXED, TOP_ALL, MASS_ALL, MIXED_ALL, AXES, SIZE, ORIGIN, MEAN, TABLE, UNIT, LARGEST,
    splits, query_rows, heads,
    D: tl.constexpr, DP: tl.constexpr, AT_ONCE: tl.constexpr,
    COMPONENTS: tl.constexpr, KEYS: tl.constexpr, CHANNELS: tl.constexpr, CHANNELS_AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Merges the parts of all splits, `[rows * heads, splits, R(, D)]`; a program handles one query row.

    `AT_ONCE` parts are read together: a long row has a hundred, and read one by one, each would wait for memory. With AXES
    (`CodeFold`) the columns are mapped to CHANNELS. The columns are: COMPONENTS; with MEAN the sum of weights times sizes; with
    TABLE, from column KEYS on, the mixture of key codes and the sum of weights times key sizes.
    """
    of_row, query = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, DP)
    top, mass, mixed = tl.full([], NOTHING, tl.float32), tl.full([], 0.0, tl.float32), tl.zeros([DP], tl.float32)
    for first in range(0, splits, AT_ONCE):
        split = first + tl.arange(0, AT_ONCE)
        there = split < splits
        part = (of_row * splits + split) * query_rows + query
        own_mixed = tl.load(
            MIXED + part[:, None] * D + columns[None, :], mask=there[:, None] & (columns < D)[None, :], other=0.0
        )
        own_mass = tl.load(MASS + part, mask=there, other=0.0)
        own = tl.load(TOP + part, mask=there, other=NOTHING)
        higher = tl.maximum(top, tl.max(own, 0))
        stays, comes = tl.exp2((top - higher) * LOG2E), tl.exp2((own - higher) * LOG2E)
        mass = mass * stays + tl.sum(own_mass * comes, 0)
        mixed = mixed * stays + tl.sum(own_mixed * comes[:, None], 0)
        top = higher
    out = of_row * query_rows + query
    tl.store(TOP_ALL + out, top)
    tl.store(MASS_ALL + out, mass)
    if AXES is None:
        tl.store(MIXED_ALL + out * D + columns, mixed, mask=columns < D)
    else:
        MIXED_ALL += out * CHANNELS
        head = of_row % heads
        size = tl.load(SIZE + head)
        told, is_key = mixed, (columns >= KEYS) & (columns < D - 1)
        if TABLE is not None:
            largest = tl.load(LARGEST + columns - KEYS, mask=is_key, other=0.0)
            told = 2 * mixed - largest * tl.sum(tl.where(columns == D - 1, mixed, 0.0), 0)
        for start in range(0, CHANNELS, CHANNELS_AT_ONCE):
            channels = start + tl.arange(0, CHANNELS_AT_ONCE)
            inside = channels < CHANNELS
            axes = tl.load(
                AXES + (head * COMPONENTS + columns[:, None]) * CHANNELS + channels[None, :],
                mask=(columns < COMPONENTS)[:, None] & inside[None, :], other=0.0,
            )  # fmt: skip
            found = tl.sum(mixed[:, None] * axes.to(tl.float32), 0) * size
            origin = tl.load(ORIGIN + head * CHANNELS + channels, mask=inside, other=0.0)
            if MEAN is None:
                found += origin * mass
            else:
                mean = tl.load(MEAN + head * CHANNELS + channels, mask=inside, other=0.0)
                sized_mass = tl.sum(tl.where(columns == COMPONENTS, mixed, 0.0), 0)
                found += mean * mass + (origin - mean) * sized_mass
            if TABLE is not None:
                table = tl.load(
                    TABLE + (head * (D - 1 - KEYS) + columns[:, None] - KEYS) * CHANNELS + channels[None, :],
                    mask=is_key[:, None] & inside[None, :], other=0,
                )  # fmt: skip
                unit = tl.load(UNIT + head * CHANNELS + channels, mask=inside, other=0.0)
                found += tl.sum(told[:, None] * table.to(tl.float32), 0) * unit
            tl.store(MIXED_ALL + channels, found, mask=inside)
