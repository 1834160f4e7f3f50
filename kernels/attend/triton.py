"""Launches the kernels of `decode_kernel.py`: what they serve, in how many programs, and how they are compiled."""

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from math import gcd, inf

import torch
import triton
from torch import Tensor

from calib.kernels.ahead_of_time import Specialisation
from calib.kernels.attend.decode_kernel import attend, merge
from calib.kernels.attend.operation import EXACT, MOST_RANK, STRIDE, Attended, PackedStream, Ranked, Stretch, Turning
from calib.kernels.attend.unpack import assembly, constraints
from calib.kernels.pack.heads import first_words
from calib.kernels.pack.reference import WORD_BITS, Widths, pattern, words_per_token

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

NONE, TOKEN, CHANNEL = 0, 1, 2

# Query rows of a KV head in one program, and the most that are served: more are a prompt's, not a step's.
BLOCK_ROWS, MOST_ROWS = (8, 16, 64), 256

# Words of one load at most: 16 bytes of a lane.
LOAD = 8

# Tokens of one turn of the loop at most, by how parameters lie: where channels have them, those of a turn lie in registers too.
TURNS = {NONE: 128, TOKEN: 128, CHANNEL: 64}

# Programs on every multiprocessor: enough to hide latencies, few enough that their parts are quickly merged.
PROGRAMS = 8


def serves(query_rows: int, keys: PackedStream, values: PackedStream, turning: bool = False) -> bool:
    """Whether the kernel reads these streams: codes of any widths, or exact; float16 parameters whose groups are whole planes of
    channels, or 16 and more tokens; none where heads lie side by side. Keys that it is to turn are codes without parameters."""
    if turning and (keys.bits == EXACT or keys.parameters is not None):
        return False
    return query_rows <= MOST_ROWS and _read(keys) and _read(values) and _turn(keys, values) >= 16


def attend_pages(
    query: Tensor,
    keys: PackedStream,
    values: PackedStream,
    stretch: Stretch,
    constant: Tensor | None,
    softcap: float | None,
    scored: bool,
    precise: bool,
    turning: Turning | None = None,
    shared: Tensor | None = None,
) -> Attended:
    """See `operation.attend_pages`; `shared [rows, kv_heads, R, r]`: the query's products with the keys' vectors. Behind the
    channels of what is mixed comes the mixture of the values' coefficients."""
    (rows, heads, asked, _), page = query.shape, keys.pages.shape[2]
    block = next((size for size in BLOCK_ROWS if asked <= size), BLOCK_ROWS[-1])
    turn = _turn(keys, values, _most(block, turning))
    turns = stretch.table.shape[1] * (page // turn)
    blocks = triton.cdiv(asked, block)
    splits = max(1, min(turns, _programs(query.device) // (rows * heads * blocks)))
    run = triton.cdiv(turns, splits)
    splits = triton.cdiv(turns, run)
    slots = stretch.table.shape[1] * page
    wide = values.channels + _rank(values)
    top, mass = (room((rows, heads, splits, asked), query) for _ in range(2))
    mixed = room((rows, heads, splits, asked, wide), query)
    scores = room((rows, heads, asked, slots), query) if scored else None
    attend[(splits, rows * heads, blocks)](
        query.contiguous(), keys.pages, _numbers(keys), _first(keys), values.pages, _numbers(values), _first(values),
        stretch.table, stretch.used.contiguous(),
        constant if constant is None else constant.contiguous(),
        stretch.bias if stretch.bias is None else stretch.bias.contiguous(),
        None if stretch.hidden is None else stretch.hidden.view(torch.uint8), stretch.places,
        None if stretch.back is None else stretch.back.contiguous(),
        *_tables(turning),
        _coefficients(keys), shared if shared is None else shared.contiguous(), _coefficients(values),
        top, mass, mixed, scores,
        heads, asked, 1 if stretch.back is None else stretch.back.shape[1], stretch.table.stride(0), run, slots,
        *_strides(keys.pages), *_strides(keys.parameters), *_strides(values.pages), *_strides(values.parameters),
        *_strides(stretch.hidden), *_strides(stretch.places), *_strides(_coefficients(keys)), *_strides(_coefficients(values)),
        **_constants(keys, values, block, turn, softcap), **_pairs(turning),
        HAS_CONSTANT=constant is not None, HAS_BIAS=stretch.bias is not None, HAS_HIDDEN=stretch.hidden is not None,
        HAS_PLACES=stretch.places is not None, HAS_BACK=stretch.back is not None, HAS_SCORES=scored,
        PRECISE=precise,
        num_warps=_warps(block, turning), num_stages=_stages(keys, values, turning),
    )  # fmt: skip
    if splits > 1:
        parts, (top, mass) = (top, mass, mixed), (room((rows, heads, 1, asked), query) for _ in range(2))
        mixed = room((rows, heads, 1, asked, wide), query)
        merge[(rows * heads, asked)](*parts, top, mass, mixed, splits, asked, D=wide, DP=triton.next_power_of_2(wide))
    return Attended(top[:, :, 0, :, None], mass[:, :, 0, :, None], mixed[:, :, 0], scores)


def room(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Where a kernel writes float32."""
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def _read(stream: PackedStream) -> bool:
    if _rank(stream) > MOST_RANK:
        return False
    if stream.bits == EXACT:
        return stream.pages.dtype in (torch.float16, torch.bfloat16, torch.float32) and stream.parameters is None
    if stream.parameters is None:
        return stream.channels > 0
    if stream.counts is not None or stream.parameters.dtype != torch.float16:
        return False
    count, groups = len(_widths(stream)), _groups(stream)
    return groups == 1 or (count % groups == 0 and count * _wide(stream) == stream.channels)


def _most(block: int, turning: Turning | None) -> int:
    """Tokens of one turn of the loop at most; where keys are put together, their channels and the query's lie in registers."""
    if turning is None:
        return TURNS[NONE]
    return STRIDE if block < BLOCK_ROWS[-1] and turning.axes.shape[-1] <= 128 else STRIDE // 2


def _turn(keys: PackedStream, values: PackedStream, most: int = TURNS[NONE]) -> int:
    """Tokens of one turn of the loop: a power of two that divides a page and every group of tokens that share parameters."""
    turn = min(most, *(TURNS[_mode(stream)] for stream in (keys, values)))
    return gcd(turn, keys.pages.shape[2], *(s.group_tokens for s in (keys, values) if _mode(s) == CHANNEL))


def _widths(stream: PackedStream) -> Widths:
    """Of the fields of a word; a token that is no code is one field."""
    return (WORD_BITS,) if stream.bits == EXACT else pattern(stream.bits)


def _wide(stream: PackedStream) -> int:
    """Words that a head has of a token, at most."""
    return stream.channels if stream.bits == EXACT else words_per_token(stream.channels, stream.bits)


def _mode(stream: PackedStream) -> int:
    if stream.parameters is None:
        return NONE
    return TOKEN if stream.group_tokens == 1 else CHANNEL


def _groups(stream: PackedStream) -> int:
    """Groups of channels of a head whose parameters a token has."""
    return 1 if stream.parameters is None or stream.group_tokens > 1 else stream.parameters.shape[-1] // 2


def _coefficients(stream: PackedStream) -> Tensor | None:
    return None if stream.ranked is None else stream.ranked.coefficients


def _rank(stream: PackedStream) -> int:
    return 0 if stream.ranked is None else stream.ranked.coefficients.shape[-1]


def _numbers(stream: PackedStream) -> Tensor:
    return stream.pages if stream.parameters is None else stream.parameters


def _first(stream: PackedStream) -> Tensor | None:
    return None if stream.counts is None else first_words(stream.counts, stream.pages.device)


def _tables(turning: Turning | None) -> tuple[Tensor | None, ...]:
    if turning is None:
        return (None,) * 5
    return turning.axes, turning.mean, turning.size, turning.coarse, turning.fine


def _pairs(turning: Turning | None) -> dict[str, int]:
    """Channel pairs of a key that is turned, and how many of them are."""
    half = 0 if turning is None else turning.axes.shape[-1] // 2
    pairs = 0 if turning is None else turning.fine.shape[-1]
    return {"HALF": half, "HALFP": max(16, triton.next_power_of_2(half)), "PAIRS": pairs, "STRIDE": STRIDE}


def _strides(part: Tensor | None) -> tuple[int, int]:
    """Of pages or rows and of heads; what all heads share has none of the latter."""
    if part is None:
        return 0, 0
    return part.stride(0), 0 if part.shape[1] == 1 else part.stride(1)


def _constants(
    keys: PackedStream,
    values: PackedStream,
    block: int,
    turn: int,
    softcap: float | None,
    interpreted: bool = INTERPRETED,
) -> dict[str, object]:
    found: dict[str, object] = {"M": block, "BN": turn, "PAGE": keys.pages.shape[2], "SOFTCAP": softcap}
    for role, letter, stream in (("KEY", "K", keys), ("VALUE", "V", values)):
        widths, wide, counts = _widths(stream), _wide(stream), stream.counts or (_wide(stream),)
        room_of = max(16, triton.next_power_of_2(wide))
        plain = stream.bits == EXACT or interpreted
        found |= {
            f"{role}_WIDTHS": widths,
            f"{role}_MODE": _mode(stream),
            f"{role}_GROUPS": _groups(stream),
            f"{role}_TOKENS": stream.group_tokens,
            f"{role}_RANK": _rank(stream),
            f"{role}_ROW": sum(counts),
            f"{role}_PIECE": gcd(LOAD, *counts),
            f"{role}_FULL": min(counts) == room_of,
            f"D{letter}": stream.channels,
            f"W{letter}": wide,
            f"W{letter}P": room_of,
            f"{role}_ASM": None if plain else assembly(widths),
            f"{role}_ARGUMENTS": None if plain else constraints(widths),
        }
    return found | {"INTERPRET": interpreted}


def _warps(block: int, turning: Turning | None) -> int:
    if turning is not None:
        return 4 if turning.axes.shape[-1] <= 128 else 8
    return 1 if block < BLOCK_ROWS[-1] else 4


def _stages(keys: PackedStream, values: PackedStream, turning: Turning | None) -> int:
    """Turns whose loads are under way: one beside the turn that is computed, or two where registers are left for them; none where
    what keys are put together from fills shared memory."""
    if turning is not None and turning.axes.shape[-1] > 128:
        return 1
    return 2 if CHANNEL in (_mode(keys), _mode(values)) else 3


@lru_cache
def _programs(device: torch.device) -> int:
    """Programs that fill the device; the interpreter runs them one by one, and a few show that they are joined."""
    if device.type != "cuda":
        return 8
    return PROGRAMS * torch.cuda.get_device_properties(device).multi_processor_count


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
    beside: Mapping[str, str] = {},
    turning: Turning | None = None,
) -> Specialisation:
    """The kernel for a step over such pages."""
    turn = _turn(keys, values, _most(BLOCK_ROWS[0], turning))
    absent = ("BIAS", "HIDDEN", "PLACES", "BACK", "SCORES")
    constants = _constants(keys, values, BLOCK_ROWS[0], turn, None, interpreted=False)
    constants |= {f"HAS_{name}": False for name in absent} | dict.fromkeys(absent, None)
    constants |= {"HAS_CONSTANT": turning is None, "PRECISE": False, **_pairs(turning)}
    tables = dict(zip(("AXES", "MEAN", "SIZE", "COARSE", "FINE"), _tables(turning), strict=True))
    constants |= {name: None for name, table in tables.items() if table is None}
    constants |= {"CONSTANT": None} if turning else {}
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
    codes, words = turn * (keys.channels + values.channels), turn * (_wide(keys) + _wide(values))
    types = {name: kind for name, kind in types.items() if name not in constants}
    warps, stages = _warps(BLOCK_ROWS[0], turning), _stages(keys, values, turning)
    return Specialisation(attend, types, constants, warps, stages, codes, most, words, matrix, beside)


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
    "2 bits, groups of 32, rank 4": specialisation(_RANKED, _RANKED),
    # Keys are put together and turned: 80 x 128 products for 160 codes, and some 500 operations on 128 channels.
    "6 4 3 2 1 bits, 16 words, turned": specialisation(_PATTERNED, _PATTERNED, 10.5, 6, turning=turning_of(80, 128)),
}
