"""Chooses the compile-time constants, warps and stages of the attention kernels, from the streams and the number of query rows.

A "turn" is one iteration of a kernel's loop over tokens; a "block" is the number of query rows of a program, padding included.
"""

import os
from functools import lru_cache
from math import gcd

import torch
from torch import Tensor

from calib.kernels.attend.packed_pages import EXACT, STRIDE, ChannelMap, PackedStream, RopeTables
from calib.kernels.dispatch import HOPPER, LITTLE_MEMORY
from calib.kernels.pack.reference import WORD_BITS, Widths, pattern, words_per_token
from calib.kernels.powers import next_power_of_2

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

# Modes of parameters (scales and zero points): none, per token for groups of channels, per channel for groups of tokens.
NONE, TOKEN, CHANNEL = 0, 1, 2

# Possible numbers of query rows of a KV head in one program.
BLOCK_ROWS = (8, 16, 64)

# Limit of the block where all planes of values form one matrix, and for wide tokens on GPUs with little shared memory.
MOST_OF_FEW = 16

# Most words of one load: 16 bytes per lane.
LOAD = 8

# Least number of tokens of a turn: rows of a matrix instruction.
LEAST = 16

# Programs per multiprocessor: enough to hide latencies, few enough that their parts are quickly merged.
PROGRAMS = 8

# Numbers that a program reads together in `merge_kernel.py` (MERGED) and, of the runs that it joins, in `exact_kernel.py` (JOINED);
# least number of value channels of a program of `exact_kernel.py`.
MERGED, JOINED, LEAST_PIECE = 8192, 4096, 32

# Largest mixture, in numbers, for which a program of `exact_kernel.py` has one warp.
ONE_WARP = 256

# Most tokens of a turn, and warps of a program: by its block, then by (`is_heavy`, `is_wide`) of the streams. Registers have to
# hold the query rows, their mixtures, and the weights and codes of a turn.
SHAPES = {
    8: {(False, False): (128, 1), (False, True): (64, 1), (True, False): (64, 1), (True, True): (32, 1)},
    16: {(False, False): (64, 1), (False, True): (32, 2), (True, False): (32, 1), (True, True): (32, 2)},
    64: {(False, False): (32, 4), (False, True): (32, 4), (True, False): (32, 4), (True, True): (32, 8)},
}

WIDE = 128  # channels

# Key scales per channel go into the query if a group has at least this many tokens per query row of the block.
FOLDED = 6

# Least `num_stages` with which Triton keeps codes in two buffers.
TWO_BUFFERS = 5

# Most words of a key, with scales in the query, beside which registers suffice for the largest turn.
LEAN = 16


@lru_cache
def block_of(query_rows: int, few: bool = False) -> int:
    """Query rows of a program, padding included. `few`: at most `MOST_OF_FEW`, where registers or shared memory are short."""
    sizes = [size for size in BLOCK_ROWS if size <= MOST_OF_FEW or not few]
    return next((size for size in sizes if query_rows <= size), sizes[-1])


def is_folded(keys: PackedStream, block: int) -> bool:
    """Whether the key scales of channels are multiplied into the query, once per group of tokens, and not into the codes. This is
    less work where a group has many more tokens than a program has query rows."""
    return mode_of(keys) == CHANNEL and block == BLOCK_ROWS[0] and keys.group_tokens >= FOLDED * block


def is_heavy(keys: PackedStream, values: PackedStream, block: int) -> bool:
    """Whether a turn needs more registers: exact tokens, or parameters per channel, except for keys of few words whose scales go
    into the query."""
    is_lean = is_folded(keys, block) and wide_of(keys) <= LEAN
    by_channel = mode_of(values) == CHANNEL or (mode_of(keys) == CHANNEL and not is_lean)
    return by_channel or EXACT in (keys.bits, values.bits)


def is_wide(keys: PackedStream, values: PackedStream) -> bool:
    """Whether keys or values have more channels than `WIDE`, or in float32 more than half of it."""
    return any(s.channels * (2 if s.pages.dtype == torch.float32 else 1) > WIDE for s in (keys, values))


def shape_of(keys: PackedStream, values: PackedStream, block: int) -> tuple[int, int]:
    """Most tokens of a turn and warps of a program, from `SHAPES`."""
    return SHAPES[block][is_heavy(keys, values, block), is_wide(keys, values)]


def has_wide_rope(rope_tables: RopeTables | None) -> bool:
    """Whether keys that are rebuilt from components before RoPE have more channels than `WIDE`."""
    return rope_tables is not None and rope_tables.axes.shape[-1] > WIDE


def turn_of(
    keys: PackedStream, values: PackedStream, block: int = BLOCK_ROWS[0], rope_tables: RopeTables | None = None
) -> int:
    """Tokens of one turn: a power of two that divides every group of tokens with common parameters (a group of a whole page is no
    limit), and the page if that leaves at least `LEAST` tokens. Otherwise the last turn of a page is not full."""
    most, _ = shape_of(keys, values, block)
    page = keys.pages.shape[2]
    if rope_tables is not None:  # the rebuilt keys take registers as well
        most = STRIDE if block < BLOCK_ROWS[-1] and not has_wide_rope(rope_tables) else STRIDE // 2
    groups = [s.group_tokens for s in (keys, values) if mode_of(s) == CHANNEL and s.group_tokens != page]
    whole = gcd(most, page, *groups)
    if whole >= LEAST or groups or rope_tables is not None:  # with RoPE a turn is one run of positions
        return whole
    return max(LEAST, min(most, next_power_of_2(page)))


def widths_of(stream: PackedStream) -> Widths:
    """Bit widths of the fields of a word, with a 0 appended for trellis-coded levels; exact tokens count as one 16-bit field."""
    return (WORD_BITS,) if stream.bits == EXACT else pattern(stream.bits) + (0,) * stream.trellis


def wide_of(stream: PackedStream) -> int:
    """Most words (for exact tokens: numbers) of a token and head."""
    return stream.channels if stream.bits == EXACT else words_per_token(stream.channels, stream.bits)


def mode_of(stream: PackedStream) -> int:
    """Mode of a stream's parameters: NONE, TOKEN or CHANNEL."""
    if stream.parameters is None:
        return NONE
    return TOKEN if stream.group_tokens == 1 else CHANNEL


def groups_of(stream: PackedStream) -> int:
    """Groups of channels of a head that have parameters of their own per token; 1 in the other modes."""
    return 1 if stream.parameters is None or stream.group_tokens > 1 else stream.parameters.shape[-1] // 2


def constants_of(
    keys: PackedStream,
    values: PackedStream,
    block: int,
    turn: int,
    softcap: float | None,
    rope_tables: RopeTables | None,
    interpreted: bool = INTERPRETED,
    mixes_keys: bool = False,
) -> dict[str, object]:
    """Constants of `decode_kernel.attend` that follow from the streams, for `block` query rows and `turn` tokens at once.
    `mixes_keys`: the weights also mix the codes of keys (for `PredictedValues`)."""
    found: dict[str, object] = {"M": block, "BN": turn, "PAGE": keys.pages.shape[2], "SOFTCAP": softcap}
    sizes = [stream.sizes.shape[-1] for stream in (keys, values) if stream.sizes is not None]
    found |= {"SIZE_WORDS": max(sizes, default=0), "KEYS_MIXED": mixes_keys, "KEY_FOLDED": is_folded(keys, block)}
    for role, letter, stream in (("KEY", "K", keys), ("VALUE", "V", values)):
        widths, wide, counts = widths_of(stream), wide_of(stream), stream.counts or (wide_of(stream),)
        room_of = max(16, next_power_of_2(wide))
        found |= {
            f"{role}_WIDTHS": widths,
            f"{role}_MODE": mode_of(stream),
            f"{role}_GROUPS": groups_of(stream),
            f"{role}_TOKENS": stream.group_tokens,
            f"{role}_RANK": rank_of(stream),
            f"{role}_DIVIDES": stream.map is not None and stream.map.divides,
            **({"VALUE_SCALED": stream.scales is not None} if role == "VALUE" else {}),
            f"{role}_ROW": sum(counts),
            f"{role}_PIECE": gcd(LOAD, *counts),
            f"{role}_FULL": min(counts) == room_of,
            f"D{letter}": stream.channels,
            f"W{letter}": wide,
            f"W{letter}P": room_of,
        }
    half = (
        0 if rope_tables is None else rope_tables.axes.shape[-1] // 2
    )  # HALF: channel pairs; PAIRS: those that RoPE rotates
    found |= {"HALF": half, "HALFP": max(16, next_power_of_2(half)), "STRIDE": STRIDE}
    return found | {"PAIRS": 0 if rope_tables is None else rope_tables.fine.shape[-1], "INTERPRET": interpreted}


def runs_of(turns: int, programs: int) -> tuple[int, int]:
    """Splits `turns` among at most `programs` programs: turns per program, and number of programs (per head and block)."""
    run = -(-turns // max(1, min(turns, programs)))
    return run, -(-turns // run)


def warps_of(block: int, keys: PackedStream, values: PackedStream, rope_tables: RopeTables | None) -> int:
    """Warps of a program of `decode_kernel.attend`."""
    if rope_tables is not None:
        return 8 if has_wide_rope(rope_tables) else 4
    return shape_of(keys, values, block)[1]


def stages_of(
    keys: PackedStream,
    values: PackedStream,
    rope_tables: RopeTables | None,
    block: int,
    capability: tuple[int, int] = HOPPER,
) -> int:
    """`num_stages` of `decode_kernel.attend`; 1 where the matrices that keys are rebuilt from fill the shared memory."""
    if rope_tables is not None:
        return 1 if has_wide_rope(rope_tables) or capability in LITTLE_MEMORY else 3
    exact, wide = EXACT in (keys.bits, values.bits), is_wide(keys, values)
    if capability >= HOPPER and not exact and not wide and has_two_buffers(keys, values, block):
        return TWO_BUFFERS
    return 2 if (exact and wide) or CHANNEL in (mode_of(keys), mode_of(values)) else 3


def has_two_buffers(keys: PackedStream, values: PackedStream, block: int) -> bool:
    """Whether registers suffice to load codes a whole turn ahead: in programs of the smallest block, for keys without parameters or
    with scales in the query. With one buffer loads are issued when a turn's last codes are in registers, and needed at once."""
    if block != BLOCK_ROWS[0] or values.scales is not None or rank_of(keys) or rank_of(values):
        return False
    return mode_of(keys) == NONE or is_folded(keys, block)


def rank_of(stream: PackedStream) -> int:
    """Low-rank coefficients of a token; 0 without a low-rank term."""
    return 0 if stream.ranked is None else stream.ranked.coefficients.shape[-1]


def maps_of(stream: PackedStream, fixed: bool) -> tuple[Tensor | None, ...]:
    """Kernel arguments STEP and ZERO (the stream's `fixed`, unless `fixed` is False), then SCALE and SHIFT (its `map`)."""
    found = stream.map or ChannelMap()
    return (*(stream.fixed if fixed and stream.fixed else (None, None)), found.scale, found.zero)


@lru_cache
def pieces_of(channels: int, block: int, wanted: int) -> int:
    """Number of pieces of value channels, a program each, where `exact_kernel.py` joins runs for `block` query rows: as many as are
    `wanted` to fill the device unless pieces become too narrow, and enough that two runs can be read at once."""
    whole, pieces = next_power_of_2(channels), 1
    while whole // (2 * pieces) >= LEAST_PIECE and (2 * pieces <= wanted or 2 * block * whole > JOINED * pieces):
        pieces *= 2
    return pieces


def columns_of(keys: PackedStream, values: PackedStream, mixes_keys: bool) -> tuple[int, ...]:
    """Columns of a mixture: channels, sum of weights times sizes, coefficients; with `mixes_keys` key codes and their sum."""
    sized = 0 if values.sizes is None else 1
    return values.channels, sized, rank_of(values), keys.channels + 1 if mixes_keys else 0


@lru_cache
def merge_constants(columns: tuple[int, ...], channels: int = 0) -> dict[str, int]:
    """Constants of `merge_kernel.merge` for parts with these `columns_of`: it reads up to `MERGED` numbers of several parts at once
    (64 per lane). Where components are mapped to `channels`, it reads half as many numbers of the axes at once."""
    wide = sum(columns)
    padded = next_power_of_2(wide)
    found = {"D": wide, "DP": padded, "AT_ONCE": max(1, MERGED // padded), "COMPONENTS": columns[0]}
    return found | {
        "KEYS": wide - columns[3], "CHANNELS": channels, "CHANNELS_AT_ONCE": max(16, MERGED // 2 // padded),
    }  # fmt: skip


def merge_warps(folds: bool) -> int:
    """Warps of `merge_kernel.merge`: more where it maps components to channels, which needs more registers."""
    return 8 if folds else 4


@lru_cache
def exact_constants(
    block: int,
    key_dim: int,
    value_dim: int,
    kind: torch.dtype,
    softcap: float | None,
    pieces: int = 0,
    interpreted: bool = INTERPRETED,
) -> dict[str, object]:
    """Constants of `exact_kernel.exact` for tokens of type `kind`: channels, query rows of a program, tokens of a turn (fewer where
    they take more registers). `pieces`: number of pieces of value channels, where parts have runs, which are read several at once;
    0: no part has runs."""
    wide = max(16, next_power_of_2(value_dim) // max(1, pieces))
    padded = {"DKP": max(16, next_power_of_2(key_dim)), "DVP": wide}
    padded["RUNS"] = max(2, JOINED // (block * wide)) if pieces else 1
    numbers = max(key_dim, value_dim) * (2 if kind == torch.float32 else 1) * block
    turn = {"M": block, "BN": 2 * LEAST if numbers <= WIDE * MOST_OF_FEW else LEAST}
    return {"DK": key_dim, "DV": value_dim} | padded | turn | {"SOFTCAP": softcap, "INTERPRET": interpreted}


@lru_cache
def exact_launch(block: int, value_dim: int, kind: torch.dtype, pieces: int = 0) -> dict[str, int]:
    """Warps and stages of `exact_kernel.exact`. A single warp needs no barriers while it joins runs, so it is faster where its
    registers hold a piece's mixture."""
    piece = block * max(16, next_power_of_2(value_dim) // max(1, pieces))
    alone = pieces > 0 and piece <= ONE_WARP and kind != torch.float32
    return {"num_warps": 1 if alone else 4, "num_stages": 2}
