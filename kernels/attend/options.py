"""How the kernel of `decode_kernel.py` is compiled: its constants, warps and stages, by what is read and how much at once."""

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

# How parameters lie.
NONE, TOKEN, CHANNEL = 0, 1, 2

# Query rows of a KV head in one program.
BLOCK_ROWS = (8, 16, 64)

# The same at most where all planes of values are one matrix, and where shared memory is little for wide tokens.
MOST_OF_FEW = 16

# Words of one load at most: 16 bytes of a lane.
LOAD = 8

# Tokens of one turn of the loop at least: rows of a matrix instruction.
LEAST = 16

# Programs on every multiprocessor: enough to hide latencies, few enough that their parts are quickly merged.
PROGRAMS = 8

# Numbers that a program of `merge_kernel.py` reads together, and one of `exact_kernel.py` of the runs that it joins; channels of
# values at least that such a program has.
MERGED, JOINED, LEAST_PIECE = 8192, 4096, 32

# Numbers of a mixture that one warp of the latter may have.
ONE_WARP = 256

# Tokens of one turn of the loop at most, and warps of a program: by its query rows, then (`is_heavy`, `is_wide`) of what it reads.
# What a program holds at once has to lie in registers: query rows, their mixtures, and the weights and codes of a turn.
SHAPES = {
    8: {(False, False): (128, 1), (False, True): (64, 1), (True, False): (64, 1), (True, True): (32, 1)},
    16: {(False, False): (64, 1), (False, True): (32, 2), (True, False): (32, 1), (True, True): (32, 2)},
    64: {(False, False): (32, 4), (False, True): (32, 4), (True, False): (32, 4), (True, True): (32, 8)},
}

WIDE = 128  # channels

# Tokens of a group for each query row from which on keys' scales go into the query.
FOLDED = 6

# Stages from which on Triton keeps codes in two buffers.
TWO_BUFFERS = 5

# Words of a token beside which a turn of most tokens then leaves enough registers.
LEAN = 16


@lru_cache
def block_of(query_rows: int, few: bool = False) -> int:
    """Query rows of a program, padding included; `few` where their mixtures take more registers, or shared memory is little."""
    sizes = [size for size in BLOCK_ROWS if size <= MOST_OF_FEW or not few]
    return next((size for size in sizes if query_rows <= size), sizes[-1])


def is_folded(keys: PackedStream, block: int) -> bool:
    """Whether keys' scales of channels go into the query, group by group, and not into the codes: where a group has so many more
    tokens than a program has query rows that it is less to multiply."""
    return mode_of(keys) == CHANNEL and block == BLOCK_ROWS[0] and keys.group_tokens >= FOLDED * block


def is_heavy(keys: PackedStream, values: PackedStream, block: int) -> bool:
    """Whether tokens are read as they are, or have parameters for each channel: those of a turn lie in registers as well, but for
    keys of few words whose scales go into the query."""
    is_lean = is_folded(keys, block) and wide_of(keys) <= LEAN
    by_channel = mode_of(values) == CHANNEL or (mode_of(keys) == CHANNEL and not is_lean)
    return by_channel or EXACT in (keys.bits, values.bits)


def is_wide(keys: PackedStream, values: PackedStream) -> bool:
    """Whether a token has more channels than `WIDE`, or than half as many in float32."""
    return any(s.channels * (2 if s.pages.dtype == torch.float32 else 1) > WIDE for s in (keys, values))


def shape_of(keys: PackedStream, values: PackedStream, block: int) -> tuple[int, int]:
    """Of `SHAPES`."""
    return SHAPES[block][is_heavy(keys, values, block), is_wide(keys, values)]


def is_wide_turned(rope_tables: RopeTables | None) -> bool:
    """The same of keys that are put together from components."""
    return rope_tables is not None and rope_tables.axes.shape[-1] > WIDE


def turn_of(
    keys: PackedStream, values: PackedStream, block: int = BLOCK_ROWS[0], rope_tables: RopeTables | None = None
) -> int:
    """Tokens of one turn of the loop: a power of two that divides every group of tokens that share parameters, and a page where
    `LEAST` are left; else a page's last turn is not full. A group that is a page is in no turn's way."""
    most, _ = shape_of(keys, values, block)
    page = keys.pages.shape[2]
    if rope_tables is not None:  # the channels of keys that are put together, too
        most = STRIDE if block < BLOCK_ROWS[-1] and not is_wide_turned(rope_tables) else STRIDE // 2
    groups = [s.group_tokens for s in (keys, values) if mode_of(s) == CHANNEL and s.group_tokens != page]
    whole = gcd(most, page, *groups)
    if whole >= LEAST or groups or rope_tables is not None:  # slots of ragged pages are no positions' run
        return whole
    return max(LEAST, min(most, next_power_of_2(page)))


def widths_of(stream: PackedStream) -> Widths:
    """Of the fields of a word, and behind those of trellis-coded levels a 0; a token that is no code is one field."""
    return (WORD_BITS,) if stream.bits == EXACT else pattern(stream.bits) + (0,) * stream.trellis


def wide_of(stream: PackedStream) -> int:
    """Words that a head has of a token, at most."""
    return stream.channels if stream.bits == EXACT else words_per_token(stream.channels, stream.bits)


def mode_of(stream: PackedStream) -> int:
    """How a stream's parameters lie."""
    if stream.parameters is None:
        return NONE
    return TOKEN if stream.group_tokens == 1 else CHANNEL


def groups_of(stream: PackedStream) -> int:
    """Groups of channels of a head whose parameters a token has."""
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
    """All that follows from how streams lie; `block` query rows and `turn` tokens at once. `mixes_keys`: their codes as well."""
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
    )  # channel pairs, and how many of them are turned
    found |= {"HALF": half, "HALFP": max(16, next_power_of_2(half)), "STRIDE": STRIDE}
    return found | {"PAIRS": 0 if rope_tables is None else rope_tables.fine.shape[-1], "INTERPRET": interpreted}


def runs_of(turns: int, programs: int) -> tuple[int, int]:
    """Turns of a program and programs of a head and block of query rows, where `programs` of each may share its `turns`."""
    run = -(-turns // max(1, min(turns, programs)))
    return run, -(-turns // run)


def warps_of(block: int, keys: PackedStream, values: PackedStream, rope_tables: RopeTables | None) -> int:
    """Warps of a program."""
    if rope_tables is not None:
        return 8 if is_wide_turned(rope_tables) else 4
    return shape_of(keys, values, block)[1]


def stages_of(
    keys: PackedStream,
    values: PackedStream,
    rope_tables: RopeTables | None,
    block: int,
    capability: tuple[int, int] = HOPPER,
) -> int:
    """Turns whose loads are under way; none where what keys are put together from fills shared memory."""
    if rope_tables is not None:
        return 1 if is_wide_turned(rope_tables) or capability in LITTLE_MEMORY else 3
    exact, wide = EXACT in (keys.bits, values.bits), is_wide(keys, values)
    if capability >= HOPPER and not exact and not wide and has_two_buffers(keys, values, block):
        return TWO_BUFFERS
    return 2 if (exact and wide) or CHANNEL in (mode_of(keys), mode_of(values)) else 3


def has_two_buffers(keys: PackedStream, values: PackedStream, block: int) -> bool:
    """Whether registers are left to ask for codes a whole turn ahead: one warp's, of keys without parameters, or with scales that
    go into the query. With one buffer loads are asked for when a turn's last codes are in registers, and needed at once."""
    if block != BLOCK_ROWS[0] or values.scales is not None or rank_of(keys) or rank_of(values):
        return False
    return mode_of(keys) == NONE or is_folded(keys, block)


def rank_of(stream: PackedStream) -> int:
    """Coefficients of a token, 0 without."""
    return 0 if stream.ranked is None else stream.ranked.coefficients.shape[-1]


def maps_of(stream: PackedStream, fixed: bool) -> tuple[Tensor | None, ...]:
    """What the kernel calls STEP and ZERO, which are `fixed`, then SCALE and SHIFT of the stream."""
    found = stream.map or ChannelMap()
    return (*(stream.fixed if fixed and stream.fixed else (None, None)), found.scale, found.zero)


@lru_cache
def pieces_of(channels: int, block: int, wanted: int) -> int:
    """Into how many pieces values' channels are cut where programs of `block` query rows join runs: so many as are `wanted` to fill
    the device, if pieces are not too narrow then, and enough for two runs at once."""
    whole, pieces = next_power_of_2(channels), 1
    while whole // (2 * pieces) >= LEAST_PIECE and (2 * pieces <= wanted or 2 * block * whole > JOINED * pieces):
        pieces *= 2
    return pieces


def columns_of(keys: PackedStream, values: PackedStream, mixes_keys: bool) -> tuple[int, ...]:
    """Columns of a mixture: channels, the sum of weights times sizes, coefficients; with `mixes_keys` keys' codes and their sum."""
    sized = 0 if values.sizes is None else 1
    return values.channels, sized, rank_of(values), keys.channels + 1 if mixes_keys else 0


@lru_cache
def merge_constants(columns: tuple[int, ...], channels: int = 0) -> dict[str, int]:
    """Of the kernel that joins the parts of all runs, which have `columns_of`: parts read together, 64 numbers of a lane at most.
    Where codes of components become `channels`, as many of these at once as half so many numbers of the axes."""
    wide = sum(columns)
    padded = next_power_of_2(wide)
    found = {"D": wide, "DP": padded, "AT_ONCE": max(1, MERGED // padded), "COMPONENTS": columns[0]}
    return found | {
        "KEYS": wide - columns[3], "CHANNELS": channels, "CHANNELS_AT_ONCE": max(16, MERGED // 2 // padded),
    }  # fmt: skip


def merge_warps(folds: bool) -> int:
    """Warps of that kernel: more where a program turns components into channels, which has numbers of two kinds at once."""
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
    """Of the kernel that meets exact tokens of type `kind`: channels, query rows of a program, and tokens of a turn, fewer where
    they take more registers. With `pieces`, so many of values' channels, parts have runs, of which some are read together."""
    wide = max(16, next_power_of_2(value_dim) // max(1, pieces))
    padded = {"DKP": max(16, next_power_of_2(key_dim)), "DVP": wide}
    padded["RUNS"] = max(2, JOINED // (block * wide)) if pieces else 1
    numbers = max(key_dim, value_dim) * (2 if kind == torch.float32 else 1) * block
    turn = {"M": block, "BN": 2 * LEAST if numbers <= WIDE * MOST_OF_FEW else LEAST}
    return {"DK": key_dim, "DV": value_dim} | padded | turn | {"SOFTCAP": softcap, "INTERPRET": interpreted}


@lru_cache
def exact_launch(block: int, value_dim: int, kind: torch.dtype, pieces: int = 0) -> dict[str, int]:
    """Warps of that kernel, and turns whose loads are under way. One warp waits for no other while it joins runs, so it is faster
    where it has the registers for a piece."""
    piece = block * max(16, next_power_of_2(value_dim) // max(1, pieces))
    alone = pieces > 0 and piece <= ONE_WARP and kind != torch.float32
    return {"num_warps": 1 if alone else 4, "num_stages": 2}
