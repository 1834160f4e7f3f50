"""Specialisations of the attention kernels that are compiled without a GPU, with the limits of their inner loops (README.md)."""

import re
from collections.abc import Mapping
from dataclasses import replace
from math import inf
from typing import Any

import torch
from torch import Tensor

from calib.kernels.ahead_of_time import Specialisation
from calib.kernels.attend.decode_kernel import attend
from calib.kernels.attend.exact_kernel import exact
from calib.kernels.attend.merge_kernel import merge
from calib.kernels.attend.options import (
    BLOCK_ROWS,
    CHANNEL,
    NONE,
    PROGRAMS,
    TOKEN,
    constants_of,
    exact_constants,
    exact_launch,
    is_wide,
    maps_of,
    merge_constants,
    merge_warps,
    stages_of,
    turn_of,
    warps_of,
    wide_of,
)
from calib.kernels.attend.packed_pages import EXACT, STRIDE, ChannelMap, LowRankTerm, PackedStream, RopeTables
from calib.kernels.dispatch import AMPERE, HOPPER
from calib.kernels.pack.reference import Widths, words_per_token

POINTERS = {
    torch.uint8: "*u8",
    torch.int16: "*i16",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
}


def stream_of(
    bits: int | Widths,
    mode: int = NONE,
    size: int = 1,
    channels: int = 128,
    page: int = 64,
    counts: tuple[int, ...] | None = None,
) -> PackedStream:
    """A stream on the meta device to compile for. `size`: groups of channels (TOKEN), or tokens of a group (CHANNEL)."""
    wide = words_per_token(channels, bits) if counts is None else sum(counts)
    codes = torch.empty(1, 1, page, wide, dtype=torch.int16, device="meta")
    if mode == NONE:
        fixed = (torch.empty(1, 1, 1, device="meta"),) * 2
        return PackedStream(bits, codes, channels, fixed=fixed, counts=counts)
    rows, columns, tokens = (page // size, 2 * channels, size) if mode == CHANNEL else (page, 2 * size, 1)
    return PackedStream(
        bits, codes, channels, torch.empty(1, 1, rows, columns, dtype=torch.float16, device="meta"), tokens
    )


def exact_stream(channels: int) -> PackedStream:
    """A stream of exact bfloat16 tokens on the meta device to compile for."""
    return PackedStream(EXACT, torch.empty(1, 1, 64, channels, dtype=torch.bfloat16, device="meta"), channels)


def specialisation(
    keys: PackedStream,
    values: PackedStream,
    most: float = inf,
    matrix: float = 1.0,
    spilled: int = 0,
    beside: Mapping[str, str] = {},
    rope_tables: RopeTables | None = None,
    block: int = BLOCK_ROWS[0],
    mixes_keys: bool = False,
    ahead: bool = False,
    scored: bool = False,
    beside_codes: bool = False,
    barriers: float = inf,
    waits: float = inf,
) -> Specialisation:
    """Specialisation of `attend` for `block` query rows per KV head over these streams. `ahead`: scores of keys behind the used
    slots are returned. `scored`: all scores are returned, and there is a mask. `beside_codes`: all scores are returned, and there
    is a bias. Of programs with one warp, `PROGRAMS` have to fit a multiprocessor, half as many for wide or exact tokens."""
    turn = turn_of(keys, values, block, rope_tables)
    told = scored or beside_codes
    given = {"BIAS": beside_codes, "POSITIONS": False, "BACK": False, "HIDDEN": scored, "SCORES": ahead or told}
    absent = [name for name, there in given.items() if not there]
    constants = constants_of(keys, values, block, turn, None, rope_tables, interpreted=False, mixes_keys=mixes_keys)
    constants |= {f"HAS_{name}": False for name in absent} | dict.fromkeys(absent, None)
    constants |= {"HAS_SCORES": told, "HAS_AHEAD": ahead, "EARLY": True}
    constants |= ({"HAS_HIDDEN": True} if scored else {}) | ({"HAS_BIAS": True} if beside_codes else {})
    has_constant = keys.parameters is None and rope_tables is None and keys.map is None
    constants |= {"HAS_CONSTANT": has_constant, "PRECISE": False} | ({} if has_constant else {"CONSTANT": None})
    constants |= {} if rope_tables else dict.fromkeys(("AXES", "MEAN", "SIZE", "COARSE", "FINE"))
    constants |= {
        f"{role}_COEFFICIENTS": None for role, own in (("KEY", keys), ("VALUE", values)) if own.ranked is None
    }
    constants |= {"KEY_VECTORS": None} if keys.ranked is None else {}
    constants |= {"VALUE_SCALES": None} if values.scales is None else {}
    constants |= {f"{role}_SIZES": None for role, own in (("KEY", keys), ("VALUE", values)) if own.sizes is None}
    constants |= {f"{role}_FIRST": None for role, own in (("KEY", keys), ("VALUE", values)) if own.counts is None}
    maps: dict[str, Tensor | None] = {}
    for role, own, fixed in (("KEY", keys, rope_tables is None), ("VALUE", values, values.sizes is None)):
        names = (f"{role}_STEP", f"{role}_ZERO", f"{role}_SCALE", f"{role}_SHIFT")
        maps |= zip(names, maps_of(own, fixed), strict=True)
    constants |= {name: None for name, part in maps.items() if part is None}
    types = {
        name: "i32:16" if name.endswith(("_page", "_head")) else "i32"
        for name in attend.arg_names
        if name not in constants
    }
    types |= {name: POINTERS[part.dtype] for name, part in maps.items() if part is not None}
    types |= {"QUERY": "*bf16", "query_scale": "fp32"}
    types |= dict.fromkeys(
        ("CONSTANT", "BIAS", "SCORES", "TOP", "MASS", "MIXED", "MEAN", "SIZE", "COARSE", "FINE"), "*fp32"
    )
    types |= {"AXES": "*fp16", "KEY_VECTORS": "*fp16", "KEY_COEFFICIENTS": "*fp16", "VALUE_COEFFICIENTS": "*fp16"}
    types |= {"VALUE_SCALES": "*fp16"}
    sizes = {"KEY_SIZES": keys.sizes, "VALUE_SIZES": values.sizes}
    types |= {name: POINTERS[part.dtype] for name, part in sizes.items() if part is not None}
    types |= {"TABLE": "*i32", "USED": "*i32", "HIDDEN": "*i8"}
    types |= {f"{role}_FIRST": "*i32" for role in ("KEY", "VALUE")}
    for role, own in (("KEY", keys), ("VALUE", values)):
        types[f"{role}S"] = POINTERS[own.pages.dtype]
        types[f"{role}_NUMBERS"] = types[f"{role}S"] if own.parameters is None else "*fp16"
    codes, words = turn * (keys.channels + values.channels), turn * (wide_of(keys) + wide_of(values))
    types = {name: kind for name, kind in types.items() if name not in constants}
    warps = warps_of(block, keys, values, rope_tables)
    stages, before = (stages_of(keys, values, rope_tables, block, capability) for capability in (HOPPER, AMPERE))
    takes_room = is_wide(keys, values) or EXACT in (keys.bits, values.bits)
    programs = 1 if warps > 1 else PROGRAMS // 2 if takes_room else PROGRAMS
    return Specialisation(
        attend, types, constants, warps, stages, codes, most, words, matrix, spilled, programs, barriers, waits, beside, before
    )  # fmt: skip


def _calibrated(
    bits: int | Widths, channels: int, counts: tuple[int, ...] | None = None, beside: Mapping[str, str] = {}
) -> Specialisation:
    """Calibrated keys and values: codes without parameters."""
    stream = stream_of(bits, channels=channels, counts=counts)
    return specialisation(stream, stream, beside=beside)


def _block(bits: int, page: int, most: float = inf, matrix: float = 1.0, spilled: int = 0) -> Specialisation:
    """ZipCache, a block per page: keys with parameters per channel, values with parameters per token and channel scales."""
    values = stream_of(bits, TOKEN, page=page)
    scales = torch.empty(1, 1, 1, values.channels, dtype=torch.float16, device="meta")
    keys = stream_of(bits, CHANNEL, page, page=page)
    return specialisation(keys, replace(values, scales=scales), most, matrix, spilled)


def _kivi(bits: int, group: int, most: float, **limits: Any) -> Specialisation:
    """KIVI: keys per channel in groups of tokens, values per token in groups of channels."""
    keys, values = stream_of(bits, CHANNEL, group, page=128), stream_of(bits, TOKEN, 128 // group, page=128)
    return specialisation(keys, values, most, **limits)


def _ranged(bits: int, most: float) -> Specialisation:
    """ZipCache, tokens of a prompt: keys with measured channel ranges, values with parameters per token and channel scales."""
    half = torch.empty(1, 1, 1, 128, dtype=torch.float16, device="meta")
    keys = replace(stream_of(bits), map=ChannelMap(half, half))
    return specialisation(keys, replace(stream_of(bits, TOKEN), map=ChannelMap(half)), most, barriers=3, waits=1)


def _gear(bits: int, most: float) -> Specialisation:
    """GEAR, tokens of a prompt: keys with channel ranges, values with parameters per token, low-rank factors of both."""
    half = torch.empty(1, 1, 1, 128, dtype=torch.float16, device="meta")
    keys = replace(stream_of(bits), fixed=(half, half), ranked=_FACTORS, map=ChannelMap())
    values = replace(stream_of(bits, TOKEN), ranked=_FACTORS, map=ChannelMap())
    return specialisation(keys, values, most, beside_codes=True)


def rope_tables_of(components: int, channels: int) -> RopeTables:
    """RoPE tables on the meta device to compile for."""
    sizes = ((1, components, channels), (1, 1, 1), (1, 1, channels), (1, 2, channels // 2), (STRIDE, 2, channels // 2))
    axes, *others = (torch.empty(size, device="meta") for size in sizes)
    return RopeTables(axes.half(), *others)


def _predicted(
    most: float,
    matrix: float,
    spilled: int = 0,
    block: int = BLOCK_ROWS[0],
    trellis: bool = False,
    sizes: torch.dtype = torch.int16,
) -> Specialisation:
    """`klt`: keys before RoPE and values, both with sizes, values predicted from keys."""
    own = replace(_SIZED, trellis=trellis, sizes=torch.empty(1, 1, 64, 1, dtype=sizes, device="meta"))
    tables = rope_tables_of(own.channels, 128)
    return specialisation(own, own, most, matrix, spilled, rope_tables=tables, block=block, mixes_keys=True)


def _full(bits: int, block: int, channels: int, most: float, matrix: float, spilled: int = 0) -> Specialisation:
    """KIVI with groups of 32 and more query rows or channels, which takes the most registers."""
    keys = stream_of(bits, CHANNEL, 32, channels, page=128)
    return specialisation(
        keys, stream_of(bits, TOKEN, channels // 32, channels, page=128), most, matrix, spilled, block=block
    )


def _merge(columns: list[int], channels: int = 0) -> Specialisation:
    """The kernel that merges the parts of all runs. `channels`: it maps components (of tokens with sizes) to so many channels;
    `columns[3]` > 0: it adds the prediction from key codes."""
    constants: dict[str, object] = dict(merge_constants(tuple(columns), channels))
    constants |= {} if channels else dict.fromkeys(("AXES", "SIZE", "ORIGIN", "MEAN"))
    constants |= {} if columns[3] else dict.fromkeys(("TABLE", "UNIT", "LARGEST"))
    types = {name: "i32" if name.islower() else "*fp32" for name in merge.arg_names if name not in constants}
    types |= {name: kind for name, kind in (("AXES", "*fp16"), ("TABLE", "*i16")) if name in types}
    return Specialisation(merge, types, constants, merge_warps(channels > 0))


def _exact(
    channels: int,
    most: float,
    matrix: float,
    block: int = BLOCK_ROWS[0],
    kind: torch.dtype = torch.bfloat16,
    spilled: int = 0,
    scored: bool = False,
    pieces: int = 0,
    told: bool = False,
) -> Specialisation:
    """The kernel of exact tokens: window slots and new tokens under a mask, merged with two parts of the softmax. `scored`: some
    slots have scores instead of keys. `pieces`: pieces of value channels, where parts have runs. `told`: it returns scores and
    normaliser."""
    constants = exact_constants(block, channels, channels, kind, None, pieces, interpreted=False) | {"EARLY": True}
    given = r"[A-Z]+_[23]|SCORES_1" if scored else r"[A-Z]+_[23]|SCORES_\d|INDEX"
    given += "" if told else "|TOLD|NORMALISER"
    constants |= dict.fromkeys(name for name in exact.arg_names if re.fullmatch(given, name))
    types = {name: "*fp32" if name.isupper() else "i32" for name in exact.arg_names if name not in constants}
    types |= {name: "i32:16" for name in types if re.match("(key|value|mixed)_", name)} | {"HIDDEN": "*i8"}
    types |= {"QUERY": POINTERS[kind], "OUT": POINTERS[kind], "query_scale": "fp32"}
    types |= {"INDEX": "*i32"} if scored else {}
    types |= {name: POINTERS[kind] for name in types if re.match("(KEYS|VALUES)_", name)}
    # Elements of keys and values in a turn. Those of 16 bits are multiplied by queries and weights in two parts.
    numbers, launch = (
        int(str(constants["BN"])) * (channels + channels // max(1, pieces)),
        exact_launch(block, channels, kind, pieces),
    )
    return Specialisation(
        exact,
        types,
        constants,
        launch["num_warps"],
        launch["num_stages"],
        codes=numbers,
        most=most,
        matrix=matrix,
        spilled=spilled,
    )


# Specialisations whose costs limit those of mixed widths: per word, a token of as many bits; per code, a word of as many codes.
_OF_2_BITS = {"word": "2 bits, both calibrated", "code": "3 bits, both calibrated"}
_OF_4_BITS = {"word": "4 bits, both calibrated", "code": "5 bits, both calibrated"}
_FACTORS = LowRankTerm(*(torch.empty(1, 1, *size, dtype=torch.float16, device="meta") for size in ((64, 4), (4, 128))))
_RANKED = replace(stream_of(2, TOKEN, 4), ranked=_FACTORS)
_PATTERNED = stream_of((6, 4, 3, 2, 1), channels=80, counts=(16, 16))
_TRELLIS = replace(_PATTERNED, trellis=True)
_SIZED = replace(_PATTERNED, sizes=torch.empty(1, 1, 64, 1, dtype=torch.int16, device="meta"))

SPECIALISATIONS = {
    "4 bits, calibrated keys": specialisation(stream_of(4), stream_of(4, TOKEN), 1.65, barriers=3, waits=4),
    "2 bits, calibrated keys": specialisation(stream_of(2), stream_of(2, TOKEN), 1.55, barriers=3, waits=4),
    "4 bits, keys per channel of 128": _kivi(4, 128, 1.95, barriers=10, waits=2),
    "2 bits, keys per channel of 128": _kivi(2, 128, 1.6, barriers=3, waits=2),
    "4 bits, keys per channel of 32": _kivi(4, 32, 3.5, barriers=8, waits=8),
    "2 bits, keys per channel of 32": _kivi(2, 32, 3.5, barriers=8, waits=8),
    # Launched by `kivi`, whose keys are packed earlier than their values, and by `rtn`.
    "4 bits, per channel of 128, ahead": _kivi(4, 128, 2.15, barriers=11, waits=2, ahead=True),
    "2 bits, per channel of 128, ahead": _kivi(2, 128, 1.8, barriers=3, waits=2, ahead=True),
    "2 bits, per channel, keys ahead": _kivi(2, 32, 3.8, barriers=9, waits=8, ahead=True),
    # Launched by `specache`: some tokens are hidden, and all scores are returned.
    "2 bits, per channel, scored, ahead": _kivi(2, 32, 4, ahead=True, scored=True),
    "4 bits, keys per token": specialisation(
        stream_of(4, TOKEN, page=128), stream_of(4, TOKEN, page=128), 1.6, barriers=5, waits=9
    ),
    "4 bits, blocks of 60": _block(4, 60, 2.15, spilled=8),
    "2 bits, blocks of 40": _block(2, 40, 2.2),
    "4 bits, ranges of channels": _ranged(4, 1.65),
    "2 bits, ranges of channels": _ranged(2, 1.55),
    # Launched by `gear`: low-rank factors, a bias from the outliers of keys, and returned scores for the outliers of values.
    "4 bits, ranges of channels, rank 4": _gear(4, 2.85),
    "2 bits, both calibrated": _calibrated(2, 128),
    "3 bits, both calibrated": _calibrated(3, 80),
    "4 bits, both calibrated": _calibrated(4, 128),
    "5 bits, both calibrated": _calibrated(5, 96),
    "6 4 3 2 1 bits, 16 words": _calibrated((6, 4, 3, 2, 1), 80, (16, 16), _OF_2_BITS),
    "7 5 4 bits, 24 to 32 words": _calibrated((7, 5, 4), 96, (32, 24), _OF_4_BITS),
    # This one fills the registers: how much is spilled depends on the compiler's release.
    "2 bits, groups of 32, rank 4": specialisation(_RANKED, _RANKED, 3.5, spilled=48),
    # Keys are rebuilt and rotated: 80 x 128 products for 160 codes, and some 500 operations on 128 channels.
    "6 4 3 2 1 bits, 16 words, turned": specialisation(
        _PATTERNED, _PATTERNED, 10.1, 6, 8, rope_tables=rope_tables_of(80, 128)
    ),
    # With sizes, and with a mixture of the key codes for values that are predicted from them. Registers are full here too.
    "6 4 3 2 1 bits, turned, sized": specialisation(_SIZED, _SIZED, 10.5, 6, 48, rope_tables=rope_tables_of(80, 128)),
    "6 4 3 2 1 bits, turned, mixed": _predicted(11.6, 6, 32),
    "6 4 3 2 1 bits, turned, mixed, 16": _predicted(13.5, 8, 144, block=16),
    # The same with trellis-coded levels: 1.35 to 1.41 times as many instructions.
    "6 4 3 2 1 bits, trellis": specialisation(_TRELLIS, _TRELLIS, 5.6),
    "6 4 3 2 1 bits, turned, trellis": specialisation(
        _TRELLIS, _TRELLIS, 13.7, 6, 16, rope_tables=rope_tables_of(80, 128)
    ),
    "6 4 3 2 1 bits, mixed, trellis": _predicted(16.2, 6, 56, trellis=True),
    "6 4 3 2 1 bits, mixed, trellis, 16": _predicted(18, 8, 176, block=16, trellis=True),
    # Sizes of one or two heads, in bytes. On capability 8.0 they are not prefetched, and are shuffled to the lanes that multiply:
    # 13.5 and 17.7 instructions, where 16-bit words take 10.8 and 15.0. On 9.0 they take as many as words.
    "6 4 3 2 1 bits, mixed, bytes": _predicted(13.9, 6, 32, sizes=torch.uint8),
    "6 4 3 2 1 bits, trellis, bytes": _predicted(18.1, 6, 56, trellis=True, sizes=torch.uint8),
    # More query rows of a KV head, and wider heads: a turn has fewer tokens, so that registers are not spilled.
    "4 bits, calibrated keys, 16 rows": specialisation(stream_of(4), stream_of(4, TOKEN), 2.2, 1.1, block=16),
    "4 bits, calibrated keys, 64 rows": specialisation(stream_of(4), stream_of(4, TOKEN), 10.1, 4.3, block=64),
    "2 bits, groups of 32, 16 rows": _full(2, 16, 128, 4.6, 1.3),
    "2 bits, groups of 32, 64 rows": _full(2, 64, 128, 18.8, 5.1),
    "2 bits, groups of 32, 256 channels": _full(2, 8, 256, 3, 0.7, spilled=48),
    # Here each of the eight planes of values has its own zero points, for 16 rows; fewer tokens or more warps spill as much.
    "2 bits, groups of 32, 256, 16 rows": _full(2, 16, 256, 5.2, 1.6, spilled=176),
    "2 bits, groups of 32, 256, 64 rows": _full(2, 64, 256, 24.5, 5.1),
    "4 bits, calibrated, 256 channels": specialisation(
        stream_of(4, channels=256, page=128), stream_of(4, TOKEN, channels=256, page=128), 1.3, 0.6
    ),
    "exact": specialisation(exact_stream(128), exact_stream(128), 1, 2.1),
    "exact, 256 channels": specialisation(exact_stream(256), exact_stream(256), 1.1, 2.1),
    # These limits are for capability 8.0; on 9.0 nothing is spilled, and 4 matrix instructions are enough.
    "exact, 256 channels, 64 rows": specialisation(exact_stream(256), exact_stream(256), 18, 18.5, 152, block=64),
    # A window has some hundred tokens, so instructions matter little; launches and register spills do.
    "exact tokens joined": _exact(128, 5.7, 1.5),
    "exact tokens joined, some scored": _exact(128, 7.0, 1.5, scored=True),
    "exact tokens joined, 16 rows": _exact(128, 9.3, 3, 16),
    "exact tokens joined, 256 channels": _exact(256, 4.1, 1.5),
    "exact tokens joined, 256, 16 rows": _exact(256, 8.5, 5, 16),
    "exact tokens joined, float32": _exact(128, 15, 0, kind=torch.float32),
    "exact tokens joined, float32, 16": _exact(128, 26, 0, 16, torch.float32, spilled=8),
    "exact tokens joined, float32, 256": _exact(256, 14, 0, kind=torch.float32),
    # Parts with several runs, and pieces of value channels: a turn of the loop has fewer values for the same keys.
    "exact tokens and runs joined": _exact(128, 6.1, 1.5, pieces=1),
    "exact tokens and runs, 4 pieces": _exact(128, 7.8, 2, pieces=4),
    "exact tokens and runs, some scored": _exact(128, 9.2, 1.7, scored=True, pieces=2),
    "exact tokens and runs, 16 rows": _exact(128, 11.3, 3.4, 16, pieces=2),
    "exact tokens and runs, 256 channels": _exact(256, 5.4, 1.7, pieces=2),
    "exact tokens and runs, 256, 16 rows": _exact(256, 10.6, 6, 16, pieces=2),
    "exact tokens and runs, float32": _exact(128, 17.6, 0, kind=torch.float32, pieces=4),
    "exact tokens and runs, told": _exact(128, 9, 1.7, pieces=2, told=True),
    "exact tokens told, 16 rows": _exact(128, 10, 3, 16, told=True),
    "merge": _merge([128, 0, 0, 0]),
    "merge, 256 channels and rank 4": _merge([256, 0, 4, 0]),
    "merge, components to channels": _merge([80, 1, 0, 0], 128),
    "merge, components to 256 channels": _merge([160, 1, 0, 0], 256),
    "merge, and what keys predict": _merge([80, 1, 0, 81], 128),
    "merge, and what keys predict, 256": _merge([160, 1, 0, 161], 256),
}
