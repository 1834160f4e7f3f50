"""Specialisations of the attention kernels that are compiled without a GPU, with the limits of their inner loops (README.md)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from calib.kernels.ahead_of_time import Specialisation
from calib.kernels.attend.options import BLOCK_ROWS, CHANNEL, TOKEN
from calib.kernels.attend.packed_pages import ChannelMap, LowRankTerm
from calib.kernels.attend.signatures import (
    exact_specialisation,
    exact_stream,
    merge_specialisation,
    rope_tables_of,
    specialisation,
    stream_of,
)
from calib.kernels.pack.reference import Widths


def _calibrated(
    bits: int | Widths, channels: int, counts: tuple[int, ...] | None = None, beside: Mapping[str, str] = {}
) -> Specialisation:
    """Calibrated keys and values: codes without parameters."""
    stream = stream_of(bits, channels=channels, counts=counts)
    return specialisation(stream, stream, beside=beside)


def _block(bits: int, page: int, most: float, spilled: int = 0) -> Specialisation:
    """ZipCache, a block per page: keys with parameters per channel, values with parameters per token and channel scales."""
    values = stream_of(bits, TOKEN, page=page)
    scales = torch.empty(1, 1, 1, values.channels, dtype=torch.float16, device="meta")
    keys = stream_of(bits, CHANNEL, page, page=page)
    return specialisation(keys, replace(values, scales=scales), most, spilled=spilled)


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
    "exact tokens joined": exact_specialisation(128, 5.7, 1.5),
    "exact tokens joined, some scored": exact_specialisation(128, 7.0, 1.5, scored=True),
    "exact tokens joined, 16 rows": exact_specialisation(128, 9.3, 3, 16),
    "exact tokens joined, 256 channels": exact_specialisation(256, 4.1, 1.5),
    "exact tokens joined, 256, 16 rows": exact_specialisation(256, 8.5, 5, 16),
    "exact tokens joined, float32": exact_specialisation(128, 15, 0, kind=torch.float32),
    "exact tokens joined, float32, 16": exact_specialisation(128, 26, 0, 16, torch.float32, spilled=8),
    "exact tokens joined, float32, 256": exact_specialisation(256, 14, 0, kind=torch.float32),
    # Parts with several runs, and pieces of value channels: a turn of the loop has fewer values for the same keys.
    "exact tokens and runs joined": exact_specialisation(128, 6.1, 1.5, pieces=1),
    "exact tokens and runs, 4 pieces": exact_specialisation(128, 7.8, 2, pieces=4),
    "exact tokens and runs, some scored": exact_specialisation(128, 9.2, 1.7, scored=True, pieces=2),
    "exact tokens and runs, 16 rows": exact_specialisation(128, 11.3, 3.4, 16, pieces=2),
    "exact tokens and runs, 256 channels": exact_specialisation(256, 5.4, 1.7, pieces=2),
    "exact tokens and runs, 256, 16 rows": exact_specialisation(256, 10.6, 6, 16, pieces=2),
    "exact tokens and runs, float32": exact_specialisation(128, 17.6, 0, kind=torch.float32, pieces=4),
    "exact tokens and runs, told": exact_specialisation(128, 9, 1.7, pieces=2, told=True),
    "exact tokens told, 16 rows": exact_specialisation(128, 10, 3, 16, told=True),
    "merge": merge_specialisation([128, 0, 0, 0]),
    "merge, 256 channels and rank 4": merge_specialisation([256, 0, 4, 0]),
    "merge, components to channels": merge_specialisation([80, 1, 0, 0], 128),
    "merge, components to 256 channels": merge_specialisation([160, 1, 0, 0], 256),
    "merge, and what keys predict": merge_specialisation([80, 1, 0, 81], 128),
    "merge, and what keys predict, 256": merge_specialisation([160, 1, 0, 161], 256),
}
