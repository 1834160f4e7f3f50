"""What the kernel of attention is compiled for without a GPU, and held to (README.md)."""

from collections.abc import Mapping
from dataclasses import replace
from math import inf

import torch

from calib.kernels.ahead_of_time import Specialisation
from calib.kernels.attend.decode_kernel import attend
from calib.kernels.attend.operation import STRIDE, PackedStream, Ranked, Turning
from calib.kernels.attend.options import (
    BLOCK_ROWS,
    CHANNEL,
    NONE,
    TOKEN,
    constants_of,
    most_tokens,
    stages_of,
    turn_of,
    warps_of,
    wide_of,
)
from calib.kernels.pack.reference import Widths, words_per_token


def stream_of(
    bits: int | Widths,
    mode: int = NONE,
    size: int = 1,
    channels: int = 128,
    page: int = 64,
    counts: tuple[int, ...] | None = None,
) -> PackedStream:
    """A stream of no data, to compile for; parameters for `size` groups of a token's channels, or for channels of `size` tokens."""
    wide = words_per_token(channels, bits) if counts is None else sum(counts)
    codes = torch.empty(1, 1, page, wide, dtype=torch.int16, device="meta")
    if mode == NONE:
        return PackedStream(bits, codes, channels, counts=counts)
    rows, columns, tokens = (page // size, 2 * channels, size) if mode == CHANNEL else (page, 2 * size, 1)
    return PackedStream(
        bits, codes, channels, torch.empty(1, 1, rows, columns, dtype=torch.float16, device="meta"), tokens
    )


def specialisation(
    keys: PackedStream,
    values: PackedStream,
    most: float = inf,
    matrix: float = 1.0,
    spilled: int = 0,
    beside: Mapping[str, str] = {},
    turning: Turning | None = None,
) -> Specialisation:
    """The kernel for a step over such pages."""
    turn = turn_of(keys, values, most_tokens(BLOCK_ROWS[0], turning))
    absent = ("BIAS", "HIDDEN", "PLACES", "BACK", "SCORES")
    constants = constants_of(keys, values, BLOCK_ROWS[0], turn, None, turning, interpreted=False)
    constants |= {f"HAS_{name}": False for name in absent} | dict.fromkeys(absent, None)
    constants |= {"HAS_CONSTANT": turning is None, "PRECISE": False}
    constants |= {"CONSTANT": None} if turning else dict.fromkeys(("AXES", "MEAN", "SIZE", "COARSE", "FINE"))
    constants |= {
        f"{role}_COEFFICIENTS": None for role, own in (("KEY", keys), ("VALUE", values)) if own.ranked is None
    }
    constants |= {"SHARED": None} if keys.ranked is None else {}
    constants |= {f"{role}_FIRST": None for role, own in (("KEY", keys), ("VALUE", values)) if own.counts is None}
    types = {
        name: "i32:16" if name.endswith(("_page", "_head")) else "i32"
        for name in attend.arg_names
        if name not in constants
    }
    types |= dict.fromkeys(("QUERY", "CONSTANT", "TOP", "MASS", "MIXED", "MEAN", "SIZE", "COARSE", "FINE"), "*fp32")
    types |= {"AXES": "*fp16", "SHARED": "*fp32", "KEY_COEFFICIENTS": "*fp16", "VALUE_COEFFICIENTS": "*fp16"}
    types |= {"KEYS": "*i16", "VALUES": "*i16", "TABLE": "*i32", "USED": "*i32"}
    types |= {f"{role}_FIRST": "*i32" for role in ("KEY", "VALUE")}
    for role, own in (("KEY", keys), ("VALUE", values)):
        types[f"{role}_NUMBERS"] = "*i16" if own.parameters is None else "*fp16"
    codes, words = turn * (keys.channels + values.channels), turn * (wide_of(keys) + wide_of(values))
    types = {name: kind for name, kind in types.items() if name not in constants}
    warps, stages = warps_of(BLOCK_ROWS[0], turning), stages_of(keys, values, turning)
    return Specialisation(attend, types, constants, warps, stages, codes, most, words, matrix, spilled, beside)


def _calibrated(
    bits: int | Widths, channels: int, counts: tuple[int, ...] | None = None, beside: Mapping[str, str] = {}
) -> Specialisation:
    """Keys and values without parameters."""
    stream = stream_of(bits, channels=channels, counts=counts)
    return specialisation(stream, stream, beside=beside)


def turning_of(components: int, channels: int) -> Turning:
    """Tables of no data, to compile for."""
    sizes = ((1, components, channels), (1, 1, 1), (1, 1, channels), (1, 2, channels // 2), (STRIDE, 2, channels // 2))
    axes, *others = (torch.empty(size, device="meta") for size in sizes)
    return Turning(axes.half(), *others)


# What widths that differ are held to: for a word, tokens of as many bits; for a code, words of as many codes.
_OF_2_BITS = {"word": "2 bits, both calibrated", "code": "3 bits, both calibrated"}
_OF_4_BITS = {"word": "4 bits, both calibrated", "code": "5 bits, both calibrated"}
_RANKED = replace(
    stream_of(2, TOKEN, 4), ranked=Ranked(torch.empty(1, 1, 64, 4, device="meta").half(), torch.empty(1, 1, 4, 128))
)
_PATTERNED = stream_of((6, 4, 3, 2, 1), channels=80, counts=(16, 16))

SPECIALISATIONS = {
    "4 bits, calibrated keys": specialisation(stream_of(4), stream_of(4, TOKEN), 2.6),
    "2 bits, calibrated keys": specialisation(stream_of(2), stream_of(2, TOKEN), 1.8),
    "4 bits, keys per channel of 128": specialisation(
        stream_of(4, CHANNEL, 128, page=128), stream_of(4, TOKEN, page=128), 2.6
    ),
    "2 bits, keys per channel of 128": specialisation(
        stream_of(2, CHANNEL, 128, page=128), stream_of(2, TOKEN, page=128)
    ),
    "4 bits, keys per channel of 32": specialisation(
        stream_of(4, CHANNEL, 32, page=128), stream_of(4, TOKEN, 4, page=128)
    ),
    "2 bits, keys per channel of 32": specialisation(
        stream_of(2, CHANNEL, 32, page=128), stream_of(2, TOKEN, 4, page=128)
    ),
    "2 bits, both calibrated": _calibrated(2, 128),
    "3 bits, both calibrated": _calibrated(3, 80),
    "4 bits, both calibrated": _calibrated(4, 128),
    "5 bits, both calibrated": _calibrated(5, 96),
    "6 4 3 2 1 bits, 16 words": _calibrated((6, 4, 3, 2, 1), 80, (16, 16), _OF_2_BITS),
    "7 5 4 bits, 24 to 32 words": _calibrated((7, 5, 4), 96, (32, 24), _OF_4_BITS),
    # These two fill the registers: what the compiler of one release keeps in them, that of another spills.
    "2 bits, groups of 32, rank 4": specialisation(_RANKED, _RANKED, 4, spilled=8),
    # Keys are put together and turned: 80 x 128 products for 160 codes, and some 500 operations on 128 channels.
    "6 4 3 2 1 bits, 16 words, turned": specialisation(_PATTERNED, _PATTERNED, 10.5, 6, 8, turning=turning_of(80, 128)),
}
