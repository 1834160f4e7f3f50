"""Argument types, constants and launch options of the attention kernels for given streams, to compile them without a GPU."""

import re
from collections.abc import Mapping
from math import inf

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
from calib.kernels.attend.packed_pages import EXACT, STRIDE, PackedStream, RopeTables
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
        fixed = (torch.empty(1, 1, 1, dtype=torch.float32, device="meta"),) * 2
        return PackedStream(bits, codes, channels, fixed=fixed, counts=counts)
    rows, columns, tokens = (page // size, 2 * channels, size) if mode == CHANNEL else (page, 2 * size, 1)
    return PackedStream(
        bits, codes, channels, torch.empty(1, 1, rows, columns, dtype=torch.float16, device="meta"), tokens
    )


def exact_stream(channels: int) -> PackedStream:
    """A stream of exact bfloat16 tokens on the meta device to compile for."""
    return PackedStream(EXACT, torch.empty(1, 1, 64, channels, dtype=torch.bfloat16, device="meta"), channels)


def rope_tables_of(components: int, channels: int) -> RopeTables:
    """RoPE tables on the meta device to compile for."""
    sizes = ((1, components, channels), (1, 1, 1), (1, 1, channels), (1, 2, channels // 2), (STRIDE, 2, channels // 2))
    axes, *others = (torch.empty(size, dtype=torch.float32, device="meta") for size in sizes)
    return RopeTables(axes.half(), *others)


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


def merge_specialisation(columns: list[int], channels: int = 0) -> Specialisation:
    """The kernel that merges the parts of all runs. `channels`: it maps components (of tokens with sizes) to so many channels;
    `columns[3]` > 0: it adds the prediction from key codes."""
    constants: dict[str, object] = dict(merge_constants(tuple(columns), channels))
    constants |= {} if channels else dict.fromkeys(("AXES", "SIZE", "ORIGIN", "MEAN"))
    constants |= {} if columns[3] else dict.fromkeys(("TABLE", "UNIT", "LARGEST"))
    types = {name: "i32" if name.islower() else "*fp32" for name in merge.arg_names if name not in constants}
    types |= {name: kind for name, kind in (("AXES", "*fp16"), ("TABLE", "*i16")) if name in types}
    return Specialisation(merge, types, constants, merge_warps(channels > 0))


def exact_specialisation(
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
