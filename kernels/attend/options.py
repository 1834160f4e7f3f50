"""How the kernel of `decode_kernel.py` is compiled: its constants, warps and stages, by what is read and how much at once."""

import os
from math import gcd

import triton

from calib.kernels.attend.operation import EXACT, STRIDE, PackedStream, Turning
from calib.kernels.attend.unpack import assembly, constraints
from calib.kernels.pack.reference import WORD_BITS, Widths, pattern, words_per_token

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

# How parameters lie.
NONE, TOKEN, CHANNEL = 0, 1, 2

# Query rows of a KV head in one program.
BLOCK_ROWS = (8, 16, 64)

# Words of one load at most: 16 bytes of a lane.
LOAD = 8

# Tokens of one turn of the loop at most, by how parameters lie: where channels have them, those of a turn lie in registers too.
TURNS = {NONE: 128, TOKEN: 128, CHANNEL: 64}


def block_of(query_rows: int) -> int:
    """Query rows of a program, padding included."""
    return next((size for size in BLOCK_ROWS if query_rows <= size), BLOCK_ROWS[-1])


def most_tokens(block: int, turning: Turning | None) -> int:
    """Tokens of one turn of the loop at most; where keys are put together, their channels and the query's lie in registers."""
    if turning is None:
        return TURNS[NONE]
    return STRIDE if block < BLOCK_ROWS[-1] and turning.axes.shape[-1] <= 128 else STRIDE // 2


def turn_of(keys: PackedStream, values: PackedStream, most: int = TURNS[NONE]) -> int:
    """Tokens of one turn of the loop: a power of two that divides a page and every group of tokens that share parameters."""
    turn = min(most, *(TURNS[mode_of(stream)] for stream in (keys, values)))
    return gcd(turn, keys.pages.shape[2], *(s.group_tokens for s in (keys, values) if mode_of(s) == CHANNEL))


def widths_of(stream: PackedStream) -> Widths:
    """Of the fields of a word; a token that is no code is one field."""
    return (WORD_BITS,) if stream.bits == EXACT else pattern(stream.bits)


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
    turning: Turning | None,
    interpreted: bool = INTERPRETED,
) -> dict[str, object]:
    """All that follows from how streams lie; `block` query rows and `turn` tokens at once."""
    found: dict[str, object] = {"M": block, "BN": turn, "PAGE": keys.pages.shape[2], "SOFTCAP": softcap}
    for role, letter, stream in (("KEY", "K", keys), ("VALUE", "V", values)):
        widths, wide, counts = widths_of(stream), wide_of(stream), stream.counts or (wide_of(stream),)
        room_of = max(16, triton.next_power_of_2(wide))
        plain = stream.bits == EXACT or interpreted
        found |= {
            f"{role}_WIDTHS": widths,
            f"{role}_MODE": mode_of(stream),
            f"{role}_GROUPS": groups_of(stream),
            f"{role}_TOKENS": stream.group_tokens,
            f"{role}_RANK": rank_of(stream),
            f"{role}_ROW": sum(counts),
            f"{role}_PIECE": gcd(LOAD, *counts),
            f"{role}_FULL": min(counts) == room_of,
            f"D{letter}": stream.channels,
            f"W{letter}": wide,
            f"W{letter}P": room_of,
            f"{role}_ASM": None if plain else assembly(widths),
            f"{role}_ARGUMENTS": None if plain else constraints(widths),
        }
    half = 0 if turning is None else turning.axes.shape[-1] // 2  # channel pairs, and how many of them are turned
    found |= {"HALF": half, "HALFP": max(16, triton.next_power_of_2(half)), "STRIDE": STRIDE}
    return found | {"PAIRS": 0 if turning is None else turning.fine.shape[-1], "INTERPRET": interpreted}


def warps_of(block: int, turning: Turning | None) -> int:
    """Warps of a program."""
    if turning is not None:
        return 4 if turning.axes.shape[-1] <= 128 else 8
    return 1 if block < BLOCK_ROWS[-1] else 4


def stages_of(keys: PackedStream, values: PackedStream, turning: Turning | None) -> int:
    """Turns whose loads are under way: one beside the turn that is computed, or two where registers are left for them; none where
    what keys are put together from fills shared memory."""
    if turning is not None and turning.axes.shape[-1] > 128:
        return 1
    return 2 if CHANNEL in (mode_of(keys), mode_of(values)) else 3


def rank_of(stream: PackedStream) -> int:
    """Coefficients of a token, 0 without."""
    return 0 if stream.ranked is None else stream.ranked.coefficients.shape[-1]
