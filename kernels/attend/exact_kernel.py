"""Triton kernel for the last launch of a step's attention: attend to exact tokens (the window and the new ones), merge the other
parts of the softmax, and normalise. `exact.c` does the same on a CPU.

A program handles one KV head of one row, a block of query rows and a piece of the value channels. Tokens are the rows of every
product, as in `decode_kernel.py`.
"""

import triton
import triton.language as tl

from calib.kernels.attend.decode_scores import LOG2E, NOTHING
from calib.kernels.attend.loads import largest_of, query_planes
from calib.kernels.attend.tile_products import exact_product, factors_of, nearest

# Arguments that change from launch to launch and must not cause a recompilation.
UNFIXED = [
    "columns",
    "hidden_row",
    "hidden_head",
    "hidden_column",
    "tokens_0",
    "tokens_1",
    "tokens_2",
    "scored_0",
    "told",
    *(f"runs_{i}" for i in range(4)),
]


@triton.jit(do_not_specialize=UNFIXED)
def exact(
    QUERY, HIDDEN, INDEX, OUT, TOLD, NORMALISER,
    KEYS_0, VALUES_0, SCORES_0, KEYS_1, VALUES_1, SCORES_1, KEYS_2, VALUES_2, SCORES_2,
    TOP_0, MASS_0, MIXED_0, TOP_1, MASS_1, MIXED_1, TOP_2, MASS_2, MIXED_2, TOP_3, MASS_3, MIXED_3,
    query_scale, heads, query_rows, columns, hidden_row, hidden_head, hidden_column, tokens_0, tokens_1, tokens_2, scored_0, told,
    key_row_0, key_head_0, key_token_0, value_row_0, value_head_0, value_token_0,
    key_row_1, key_head_1, key_token_1, value_row_1, value_head_1, value_token_1,
    key_row_2, key_head_2, key_token_2, value_row_2, value_head_2, value_token_2,
    mixed_row_0, mixed_row_1, mixed_row_2, mixed_row_3, runs_0, runs_1, runs_2, runs_3,
    DK: tl.constexpr, DKP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, M: tl.constexpr, BN: tl.constexpr,
    RUNS: tl.constexpr, SOFTCAP: tl.constexpr, INTERPRET: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """At most three groups of tokens and four parts, each of several runs; absent ones are None. QUERY and OUT have the model's
    dtype; query rows are group-major. HIDDEN is a byte mask over the tokens of all groups, by row, head and query column. INDEX
    says, by row, which tokens of the first group have one of `scored_0` scores instead of a key. TOLD, if given, receives the
    scores of all groups' tokens, `told` per query row, and NORMALISER the log-sum-exp of the query rows. EARLY: the kernel may
    start while attention over pages still runs (`kernels/early_launch.py`)."""
    # That kernel writes the parts and maybe SCORES; TOLD is written before the parts are read. With either, wait for it at once.
    AT_ONCE: tl.constexpr = SCORES_0 is not None or SCORES_1 is not None or SCORES_2 is not None or TOLD is not None
    if EARLY and AT_ONCE:
        tl.extra.cuda.gdc_wait()
    of_row, block = tl.program_id(0), tl.program_id(1)
    channels = tl.arange(0, DVP)
    first, inside = 0, channels < DV  # often known to be all true at compile time
    if RUNS > 1:
        first = tl.program_id(2) * DVP
        if DV % DVP:
            inside = channels < DV - first
    row, head = (of_row // heads).to(tl.int64), (of_row % heads).to(tl.int64)
    rows = block * M + tl.arange(0, M)
    valid = rows < query_rows
    base = of_row.to(tl.int64)
    at = base * query_rows + rows  # index of a query row among those of all heads and rows
    query = query_planes(QUERY, base * query_rows * DK, query_scale, rows, valid, 1, DK, DKP, DK)
    size = largest_of(query)
    rounded, rest = factors_of(query, size, VALUES_0.dtype.element_ty)
    hidden, index = HIDDEN, INDEX
    if INDEX is not None:
        index += row * tokens_0
    if HIDDEN is not None:
        hidden += row * hidden_row + head * hidden_head + (rows % columns) * hidden_column
    tell, told_scores = valid, TOLD
    if TOLD is not None:
        told_scores += at * told
        if RUNS > 1:  # programs of all pieces compute the same scores: only the first stores them
            tell = rows < tl.where(tl.program_id(2) == 0, query_rows, 0)

    top, mass = tl.full([M], NOTHING, tl.float32), tl.zeros([M], tl.float32)
    mixed = tl.zeros([DVP, M], tl.float32)
    top, mass, mixed = met(
        top, mass, mixed, rounded, rest, size, at, valid, hidden, told_scores, tell, KEYS_0, VALUES_0, SCORES_0, index, scored_0,
        tokens_0, row * key_row_0 + head * key_head_0, key_token_0, row * value_row_0 + head * value_head_0 + first, value_token_0,
        channels, inside, DK, DKP, M, BN, SOFTCAP, INTERPRET,
    )  # fmt: skip
    if VALUES_1 is not None:
        if HIDDEN is not None:
            hidden += tokens_0
        if TOLD is not None:
            told_scores += tokens_0
        top, mass, mixed = met(
            top, mass, mixed, rounded, rest, size, at, valid, hidden, told_scores, tell, KEYS_1, VALUES_1, SCORES_1, None, tokens_1,
            tokens_1, row * key_row_1 + head * key_head_1, key_token_1, row * value_row_1 + head * value_head_1 + first,
            value_token_1, channels, inside, DK, DKP, M, BN, SOFTCAP, INTERPRET,
        )  # fmt: skip
    if VALUES_2 is not None:
        if HIDDEN is not None:
            hidden += tokens_1
        if TOLD is not None:
            told_scores += tokens_1
        top, mass, mixed = met(
            top, mass, mixed, rounded, rest, size, at, valid, hidden, told_scores, tell, KEYS_2, VALUES_2, SCORES_2, None, tokens_2,
            tokens_2, row * key_row_2 + head * key_head_2, key_token_2, row * value_row_2 + head * value_head_2 + first,
            value_token_2, channels, inside, DK, DKP, M, BN, SOFTCAP, INTERPRET,
        )  # fmt: skip

    if EARLY and not AT_ONCE:
        tl.extra.cuda.gdc_wait()
    if MASS_0 is not None:
        top, mass, mixed = joined(
            top, mass, mixed, TOP_0, MASS_0, MIXED_0 + first, base, runs_0, query_rows, rows, valid, mixed_row_0,
            channels, inside, RUNS,
        )  # fmt: skip
    if MASS_1 is not None:
        top, mass, mixed = joined(
            top, mass, mixed, TOP_1, MASS_1, MIXED_1 + first, base, runs_1, query_rows, rows, valid, mixed_row_1,
            channels, inside, RUNS,
        )  # fmt: skip
    if MASS_2 is not None:
        top, mass, mixed = joined(
            top, mass, mixed, TOP_2, MASS_2, MIXED_2 + first, base, runs_2, query_rows, rows, valid, mixed_row_2,
            channels, inside, RUNS,
        )  # fmt: skip
    if MASS_3 is not None:
        top, mass, mixed = joined(
            top, mass, mixed, TOP_3, MASS_3, MIXED_3 + first, base, runs_3, query_rows, rows, valid, mixed_row_3,
            channels, inside, RUNS,
        )  # fmt: skip

    # A row without any visible token has a mixture of 0.
    out = nearest(mixed / tl.maximum(mass, 1.0e-37)[None, :], OUT.dtype.element_ty, INTERPRET)
    tl.store(OUT + first + at[None, :] * DV + channels[:, None], out, mask=inside[:, None] & valid[None, :])
    if TOLD is not None:
        tl.store(NORMALISER + at, top + tl.log2(tl.maximum(mass, 1.0e-37)) / LOG2E, mask=tell)


@triton.jit
def joined(
    top, mass, mixed, TOP, MASS, MIXED, base, runs, query_rows, rows, valid, mixed_row, channels, inside, RUNS: tl.constexpr
):  # fmt: skip
    """Merges a part of the softmax into the running one. `RUNS` runs of the part are read together; 1: no part has several."""
    if RUNS == 1:
        at = base * query_rows + rows
        own = tl.load(TOP + at, mask=valid, other=NOTHING)
        higher = tl.maximum(top, own)
        stays, comes = tl.exp2((top - higher) * LOG2E), tl.exp2((own - higher) * LOG2E)
        there = inside[:, None] & valid[None, :]
        own_mixed = tl.load(MIXED + at[None, :] * mixed_row + channels[:, None], mask=there, other=0.0)
        mass = mass * stays + tl.load(MASS + at, mask=valid, other=0.0) * comes
        return higher, mass, mixed * stays[None, :] + own_mixed * comes[None, :]
    else:
        for first in range(0, runs, RUNS):
            run = first + tl.arange(0, RUNS)
            there = (run < runs)[:, None] & valid[None, :]
            part = (base * runs + run)[:, None] * query_rows + rows[None, :]
            own = tl.load(TOP + part, mask=there, other=NOTHING)
            higher = tl.maximum(top, tl.max(own, 0))
            stays, comes = tl.exp2((top - higher) * LOG2E), tl.exp2((own - higher[None, :]) * LOG2E)
            own_mixed = tl.load(
                MIXED + part[:, None, :] * mixed_row + channels[None, :, None],
                mask=there[:, None, :] & inside[None, :, None], other=0.0,
            )  # fmt: skip
            mass = mass * stays + tl.sum(tl.load(MASS + part, mask=there, other=0.0) * comes, 0)
            mixed = mixed * stays[None, :] + tl.sum(own_mixed * comes[:, None, :], 0)
            top = higher
        return top, mass, mixed


@triton.jit
def met(
    top, mass, mixed, rounded, rest, size, at, valid, hidden, told, tell, KEYS, VALUES, SCORES, INDEX, scored, tokens,
    key_at, key_token, value_at, value_token, value_channels, of_values,
    DK: tl.constexpr, DKP: tl.constexpr, M: tl.constexpr, BN: tl.constexpr,
    SOFTCAP: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Adds a group of tokens to the running softmax. For 16-bit tokens query and weights are each split into two 16-bit numbers."""
    key_channels = tl.arange(0, DKP)
    for start in range(0, tokens, BN):
        token = start + tl.arange(0, BN)
        there = token < tokens
        number, given = token, there
        if INDEX is not None:
            number = tl.load(INDEX + token, mask=there, other=-1)
            given = number >= 0
        product = tl.zeros([BN, M], tl.float32)
        if KEYS is not None:
            inside = (there if SCORES is None else there & (given == 0))[:, None] & (key_channels < DK)[None, :]
            keys = tl.load(KEYS + key_at + token[:, None] * key_token + key_channels[None, :], mask=inside, other=0.0)
            product = exact_product(keys, rounded[0], product, INTERPRET)
            if keys.dtype != tl.float32:
                product = exact_product(keys, rest[0], product, INTERPRET)
            product *= size[None, :]
        if SCORES is not None:
            asked = given[:, None] & valid[None, :]
            scores = tl.load(SCORES + at[None, :] * scored + number[:, None], mask=asked, other=0.0)
            product = tl.where(given[:, None], scores, product)
        if SOFTCAP is not None:
            product = SOFTCAP * (1 - 2 / (1 + tl.exp2(product * (2 * LOG2E / SOFTCAP))))
        seen = there[:, None]
        if hidden is not None:
            masked = tl.load(hidden[None, :] + token[:, None], mask=there[:, None] & valid[None, :], other=1)
            seen = seen & (masked == 0)
        product = tl.where(seen, product, float("-inf"))
        if told is not None:
            tl.store(told[None, :] + token[:, None], product, mask=there[:, None] & tell[None, :])
        higher = tl.maximum(top, tl.max(product, 0))
        stays = tl.exp2((top - higher) * LOG2E)
        weights = tl.exp2((product - higher[None, :]) * LOG2E)
        mass = mass * stays + tl.sum(weights, 0)
        top = higher
        inside = there[None, :] & of_values[:, None]
        values = tl.load(
            VALUES + value_at + token[None, :] * value_token + value_channels[:, None], mask=inside, other=0.0
        )
        taken = weights.to(values.dtype)
        mixed = exact_product(values, taken, mixed * stays[None, :], INTERPRET)
        if values.dtype != tl.float32:
            mixed = exact_product(values, (weights - taken.to(tl.float32)).to(values.dtype), mixed, INTERPRET)
    return top, mass, mixed
