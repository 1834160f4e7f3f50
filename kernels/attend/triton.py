"""Launches the kernels of `decode_kernel.py`: what they serve, in how many programs, and how they are compiled."""

import os
from functools import lru_cache
from math import gcd, inf

import torch
import triton
from torch import Tensor

from calib.kernels.ahead_of_time import Specialisation
from calib.kernels.attend.decode_kernel import attend, merge
from calib.kernels.attend.operation import EXACT, Attended, PackedStream, Stretch
from calib.kernels.attend.unpack import WIDTHS, assembly, constraints
from calib.kernels.pack.reference import planes, words_per_token

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

NONE, TOKEN, CHANNEL = 0, 1, 2

# Query rows of a KV head in one program, and the most that are served: more are a prompt's, not a step's.
BLOCK_ROWS, MOST_ROWS = (8, 16, 64), 256

# Tokens of one turn of the loop at most, by how parameters lie: where channels have them, those of a turn lie in registers too.
TURNS = {NONE: 128, TOKEN: 128, CHANNEL: 64}

# Programs on every multiprocessor: enough to hide latencies, few enough that their parts are quickly merged.
PROGRAMS = 8


def serves(query_rows: int, keys: PackedStream, values: PackedStream) -> bool:
    """Whether the kernel reads these streams: 1 ... 8 bits but 5, 6 and 7, or exact; float16 parameters whose groups are
    whole planes of channels, or 16 and more tokens."""
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
) -> Attended:
    """See `operation.attend_pages`."""
    (rows, heads, asked, _), page = query.shape, keys.pages.shape[2]
    turn = _turn(keys, values)
    turns = stretch.table.shape[1] * (page // turn)
    block = next((size for size in BLOCK_ROWS if asked <= size), BLOCK_ROWS[-1])
    blocks = triton.cdiv(asked, block)
    splits = max(1, min(turns, _programs(query.device) // (rows * heads * blocks)))
    run = triton.cdiv(turns, splits)
    splits = triton.cdiv(turns, run)
    slots = stretch.table.shape[1] * page
    wide = values.channels
    top, mass = (room((rows, heads, splits, asked), query) for _ in range(2))
    mixed = room((rows, heads, splits, asked, wide), query)
    scores = room((rows, heads, asked, slots), query) if scored else None
    attend[(splits, rows * heads, blocks)](
        query.contiguous(), keys.pages, _numbers(keys), values.pages, _numbers(values), stretch.table, stretch.used.contiguous(),
        constant if constant is None else constant.contiguous(),
        stretch.bias if stretch.bias is None else stretch.bias.contiguous(),
        None if stretch.hidden is None else stretch.hidden.view(torch.uint8), stretch.places,
        None if stretch.back is None else stretch.back.contiguous(),
        top, mass, mixed, scores,
        heads, asked, 1 if stretch.back is None else stretch.back.shape[1], stretch.table.stride(0), run, slots,
        *_strides(keys.pages), *_strides(keys.parameters), *_strides(values.pages), *_strides(values.parameters),
        *_strides(stretch.hidden), *_strides(stretch.places),
        **_constants(keys, values, block, turn, softcap),
        HAS_CONSTANT=constant is not None, HAS_BIAS=stretch.bias is not None, HAS_HIDDEN=stretch.hidden is not None,
        HAS_PLACES=stretch.places is not None, HAS_BACK=stretch.back is not None, HAS_SCORES=scored,
        PRECISE=precise,
        num_warps=_warps(block), num_stages=_stages(keys, values),
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
    if stream.bits == EXACT:
        return stream.pages.dtype in (torch.float16, torch.bfloat16, torch.float32) and stream.parameters is None
    if stream.bits not in WIDTHS or (stream.parameters is not None and stream.parameters.dtype != torch.float16):
        return False
    if _mode(stream) == CHANNEL:
        return True
    groups = _groups(stream)
    count, width = planes(stream.bits), words_per_token(stream.channels, stream.bits)
    return groups == 1 or (count % groups == 0 and count * width == stream.channels)


def _turn(keys: PackedStream, values: PackedStream) -> int:
    """Tokens of one turn of the loop: a power of two that divides a page and every group of tokens that share parameters."""
    turn = min(TURNS[_mode(stream)] for stream in (keys, values))
    return gcd(turn, keys.pages.shape[2], *(s.group_tokens for s in (keys, values) if _mode(s) == CHANNEL))


def _mode(stream: PackedStream) -> int:
    if stream.parameters is None:
        return NONE
    return TOKEN if stream.group_tokens == 1 else CHANNEL


def _groups(stream: PackedStream) -> int:
    """Groups of channels of a head whose parameters a token has."""
    return 1 if stream.parameters is None or stream.group_tokens > 1 else stream.parameters.shape[-1] // 2


def _numbers(stream: PackedStream) -> Tensor:
    return stream.pages if stream.parameters is None else stream.parameters


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
        exact = stream.bits == EXACT
        width = stream.channels if exact else words_per_token(stream.channels, stream.bits)
        plain = exact or interpreted
        found |= {
            f"{role}_BITS": stream.bits,
            f"{role}_MODE": _mode(stream),
            f"{role}_GROUPS": _groups(stream),
            f"{role}_TOKENS": stream.group_tokens,
            f"D{letter}": stream.channels,
            f"W{letter}": width,
            f"W{letter}P": max(16, triton.next_power_of_2(width)),
            f"{role}_ASM": None if plain else assembly(stream.bits),
            f"{role}_ARGUMENTS": None if plain else constraints(stream.bits),
        }
    return found | {"INTERPRET": interpreted}


def _warps(block: int) -> int:
    return 1 if block < BLOCK_ROWS[-1] else 4


def _stages(keys: PackedStream, values: PackedStream) -> int:
    """Turns whose loads are under way: one beside the turn that is computed, or two where registers are left for them."""
    return 2 if CHANNEL in (_mode(keys), _mode(values)) else 3


@lru_cache
def _programs(device: torch.device) -> int:
    """Programs that fill the device; the interpreter runs them one by one, and a few show that they are joined."""
    if device.type != "cuda":
        return 8
    return PROGRAMS * torch.cuda.get_device_properties(device).multi_processor_count


def specialisation(
    bits: int, key_mode: int, group: int = 1, channels: int = 128, most: float = inf, page: int = 64, shared: int = 32
) -> Specialisation:
    """The kernel for a step over `bits`-bit pages: keys in `key_mode`, per channel for `shared` tokens; values with parameters per
    token and `group` channel groups."""
    codes = torch.empty(1, 1, page, words_per_token(channels, bits), dtype=torch.int16, device="meta")

    def parameters(mode: int) -> Tensor | None:
        width = 2 * channels if mode == CHANNEL else 2 * group
        return None if mode == NONE else torch.empty(1, 1, page // shared, width, dtype=torch.float16, device="meta")

    keys = PackedStream(bits, codes, channels, parameters(key_mode), shared if key_mode == CHANNEL else 1)
    values = PackedStream(bits, codes, channels, parameters(TOKEN))
    turn = _turn(keys, values)
    absent = ("BIAS", "HIDDEN", "PLACES", "BACK", "SCORES")
    constants = _constants(keys, values, BLOCK_ROWS[0], turn, None, interpreted=False)
    constants |= {f"HAS_{name}": False for name in absent} | dict.fromkeys(absent, None)
    constants |= {"HAS_CONSTANT": True, "PRECISE": False}
    types = {
        name: "i32:16" if name.endswith(("_page", "_head")) else "i32"
        for name in attend.arg_names
        if name not in constants
    }
    types |= dict.fromkeys(("QUERY", "CONSTANT", "TOP", "MASS", "MIXED"), "*fp32")
    types |= {"KEYS": "*i16", "VALUES": "*i16", "TABLE": "*i32", "USED": "*i32"}
    types |= {"KEY_NUMBERS": "*i16" if key_mode == NONE else "*fp16", "VALUE_NUMBERS": "*fp16"}
    return Specialisation(
        attend, types, constants, _warps(BLOCK_ROWS[0]), _stages(keys, values), 2 * turn * channels, most
    )


SPECIALISATIONS = {
    "4 bits, calibrated keys": specialisation(4, NONE, most=2.6),
    "2 bits, calibrated keys": specialisation(2, NONE, most=1.8),
    "4 bits, keys per channel of 128": specialisation(4, CHANNEL, most=2.6, page=128, shared=128),
    "2 bits, keys per channel of 128": specialisation(2, CHANNEL, page=128, shared=128),
    "4 bits, keys per channel of 32": specialisation(4, CHANNEL, page=128, group=4),
    "2 bits, keys per channel of 32": specialisation(2, CHANNEL, page=128, group=4),
}
