"""Per-channel statistics of a prompt on a GPU, in two launches: extremes of parts of the tokens, then the statistics of these.

Results equal the reference's bit by bit: extremes are exact in any order, and every root and quotient is rounded to nearest.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from calib.kernels.ahead_of_time import Specialisation
from calib.kernels.launch import launch

DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
TILE = 4096  # numbers that a program reads at once, 32 a lane
PROGRAMS = 512  # few enough to run at the same time, and enough to use the whole memory bandwidth
PARTS = 64  # most parts of the tokens of a KV head, which one program combines
WIDEST = 256  # most channels: so many parts of them fit the registers of 8 warps
HALF_MAX = tl.constexpr(65504.0)
NARROW = tl.constexpr(2.0**-24)  # least positive float16
TINY = tl.constexpr(2.0**-126)  # least normal float32
ALL = tl.constexpr(tl.PropagateNan.ALL)


@triton.jit
def least(x):
    """Smallest value of each channel of `x [n, D]`; NaN if it holds a NaN, which a plain reduction would ignore."""
    unknown = tl.max((x != x).to(tl.int32), 0) > 0
    return tl.where(unknown, float("nan"), tl.min(tl.where(x != x, float("inf"), x), 0))


@triton.jit
def token_at(ORDER, start, last, TOKENS: tl.constexpr):
    """Numbers of TOKENS tokens from `start` on, through ORDER; behind `last` it is repeated, which changes no extreme."""
    token = tl.minimum(start + tl.arange(0, TOKENS), last).to(tl.int64)
    if ORDER is not None:
        token = tl.load(ORDER + token)
    return token


@triton.jit(do_not_specialize=["total", "turns"])
def channel_extremes(
    x, ORDER, EXTREMES, total, turns, s_row, s_head, s_token, o_row, o_head,
    D: tl.constexpr, D_UP: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Stores smallest and largest values to `EXTREMES [rows, heads, parts, 2, D]`; a program handles a part of the tokens of a row
    and head."""
    part, head, row = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    x += row * s_row + head * s_head
    EXTREMES += ((row * tl.num_programs(1) + head) * tl.num_programs(0) + part) * 2 * D
    if ORDER is not None:
        ORDER += row * o_row + head * o_head
    first = part * turns * TOKENS
    last = tl.minimum(first + turns * TOKENS, total) - 1
    channel = tl.arange(0, D_UP)[None, :]
    low = tl.full([TOKENS, D_UP], float("inf"), tl.float32)
    high = tl.full([TOKENS, D_UP], float("-inf"), tl.float32)
    token = token_at(ORDER, first, last, TOKENS)
    ahead = token_at(ORDER, first + TOKENS, last, TOKENS)
    tile = tl.load(x + token[:, None] * s_token + channel, mask=channel < D, other=0.0)
    for turn in range(turns):  # values are loaded one iteration ahead, token numbers two
        later = tl.load(x + ahead[:, None] * s_token + channel, mask=channel < D, other=0.0)
        ahead = token_at(ORDER, first + (turn + 2) * TOKENS, last, TOKENS)
        low = tl.minimum(low, tile.to(tl.float32), propagate_nan=ALL)
        high = tl.maximum(high, tile.to(tl.float32), propagate_nan=ALL)
        tile = later
    channel = tl.arange(0, D_UP)
    tl.store(EXTREMES + channel, least(low), mask=channel < D)
    tl.store(EXTREMES + D + channel, -least(-high), mask=channel < D)


@triton.jit
def together(EXTREMES, parts, D: tl.constexpr, D_UP: tl.constexpr, PARTS: tl.constexpr):
    """Smallest and largest value of each channel over all parts."""
    part, channel = tl.arange(0, PARTS)[:, None], tl.arange(0, D_UP)[None, :]
    own = EXTREMES + tl.minimum(part, parts - 1) * 2 * D + channel
    low = least(tl.load(own, mask=channel < D, other=0.0))
    high = -least(-tl.load(own + D, mask=channel < D, other=0.0))
    return low, high


@triton.jit
def magnitude(EXTREMES, parts, D: tl.constexpr, D_UP: tl.constexpr, PARTS: tl.constexpr):
    """Largest magnitude of each channel over all parts."""
    low, high = together(EXTREMES, parts, D, D_UP, PARTS)
    return tl.maximum(tl.abs(low), tl.abs(high), propagate_nan=ALL)


@triton.jit
def stored(value, FP32: tl.constexpr):
    """`value` rounded as `to_half.stored` does, in float32."""
    kept = tl.clamp(value, -HALF_MAX, HALF_MAX, propagate_nan=ALL).to(tl.float16).to(tl.float32)
    if FP32:
        kept = tl.where(tl.abs(value) <= HALF_MAX, kept, value)
    return kept


@triton.jit(do_not_specialize=["parts", "asked"])
def channel_numbers(
    EXTREMES, ASKED, CENTER, NUMBERS, parts, asked,
    KIND: tl.constexpr, FP32: tl.constexpr, D: tl.constexpr, D_UP: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Stores the statistics of KIND to `NUMBERS [rows, kv_heads, 1, D]`, for "range" also `CENTER`, from the EXTREMES of `parts`
    parts; for "balance" also from those of queries, ASKED in `asked` parts. A program handles a row and KV head."""
    pair = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    EXTREMES += pair * parts * 2 * D
    channel = tl.arange(0, D_UP)
    there = channel < D
    if KIND == "range":
        low, high = together(EXTREMES, parts, D, D_UP, PARTS)
        # Halved before they are added or subtracted, so that values near the end of the range do not overflow.
        center = stored(high * 0.5 + low * 0.5, FP32)
        tl.store(CENTER + pair * D + channel, center.to(CENTER.dtype.element_ty), mask=there)
        numbers = tl.maximum(stored(high * 0.5 - low * 0.5, FP32), NARROW, propagate_nan=ALL)
    elif KIND == "balance":
        keys = magnitude(EXTREMES, parts, D, D_UP, PARTS)
        queries = magnitude(ASKED + pair * asked * 2 * D, asked, D, D_UP, PARTS)
        root = tl.sqrt_rn(tl.div_rn(queries, tl.maximum(keys, TINY)))
        numbers = stored(root, False)
        # A root of 65520 or more would be infinite in float16.
        usable = (queries > 0.0) & (keys > 0.0) & (numbers > 0.0) & (root < 65520.0)
        numbers = tl.where(usable, numbers, 1.0)
    else:
        numbers = stored(tl.sqrt_rn(magnitude(EXTREMES, parts, D, D_UP, PARTS)), FP32)
        if KIND == "positive root":
            others = tl.min(tl.where(there & (numbers > 0.0), numbers, float("inf")), 0)
            numbers = tl.where(numbers > 0.0, numbers, tl.where(others == float("inf"), 1.0, others))
    tl.store(NUMBERS + pair * D + channel, numbers.to(NUMBERS.dtype.element_ty), mask=there)


def supports(tokens: Tensor, order: Tensor | None, query: Tensor | None, into: Sequence[Tensor] | None) -> bool:
    """Whether the kernels support these: contiguous channels and order, at most `WIDEST` channels, at most `PARTS` query heads per
    KV head."""
    for x in (tokens,) if query is None else (tokens, query):
        if x.dtype not in DTYPES or x.stride(3) != 1 or not x.shape[2] or x.shape[3] > WIDEST:
            return False
    if order is not None and (order.dtype != torch.int64 or order.stride(2) != 1 or not order.shape[2]):
        return False
    if query is not None and query.shape[1] > PARTS * tokens.shape[1]:
        return False
    return into is None or all(own.is_contiguous() and own.device == tokens.device for own in into)


def measured(
    kind: str,
    tokens: Tensor,
    dtype: torch.dtype,
    order: Tensor | None = None,
    query: Tensor | None = None,
    into: Sequence[Tensor] | None = None,
    extremes: Tensor | None = None,
) -> list[Tensor]:
    """As `operation.measured`."""
    rows, heads, _, width = tokens.shape
    if into is None:
        into = [
            torch.empty(rows, heads, 1, width, dtype=dtype, device=tokens.device) for _ in range(1 + (kind == "range"))
        ]
    if tokens.numel():
        with torch.cuda.device_of(tokens):
            extremes = extremes_of(tokens, heads, order) if extremes is None else extremes
            asked = None if kind != "balance" or query is None else extremes_of(query, heads)
            launch(
                channel_numbers, (heads, rows),
                extremes, asked, into[0] if kind == "range" else None, into[-1],
                extremes.shape[2], 0 if asked is None else asked.shape[2],
                KIND=kind, FP32=dtype == torch.float32, D=width, D_UP=triton.next_power_of_2(width), PARTS=PARTS, num_warps=8,
            )  # fmt: skip
    return list(into)


def extremes_of(x: Tensor, kv_heads: int, order: Tensor | None = None) -> Tensor:
    """As `operation.extremes_of`, where x may have several heads per KV head, whose parts are listed together."""
    rows, heads, total, width = x.shape
    total = total if order is None else order.shape[2]
    known = _constants(width)
    tiles = triton.cdiv(total, known["TOKENS"])
    turns = triton.cdiv(tiles, max(1, min(PROGRAMS // (rows * heads), PARTS * kv_heads // heads)))
    parts = triton.cdiv(tiles, turns)
    found = torch.empty(rows, heads, parts, 2, width, dtype=torch.float32, device=x.device)
    of_order = (0, 0) if order is None else order.stride()[:2]
    launch(channel_extremes, (parts, heads, rows), x, order, found, total, turns, *x.stride()[:3], *of_order, **known)
    return found.view(rows, kv_heads, -1, 2, width)


def _constants(width: int) -> dict[str, int]:
    up = triton.next_power_of_2(width)
    return {"D": width, "D_UP": up, "TOKENS": TILE // up}


def _of_extremes(dtype: torch.dtype, width: int, ordered: bool) -> Specialisation:
    types = {"x": f"*{DTYPES[dtype]}", "EXTREMES": "*fp32", "total": "i32", "turns": "i32"}
    types |= dict.fromkeys(("s_row", "s_head", "s_token"), "i32:16") | dict.fromkeys(("o_row", "o_head"), "i32")
    order = {"ORDER": "*i64"} if ordered else {}
    return Specialisation(channel_extremes, types | order, _constants(width) | ({} if ordered else {"ORDER": None}))


def _of_numbers(kind: str, width: int, dtype: torch.dtype = torch.float16) -> Specialisation:
    types = {"EXTREMES": "*fp32", "NUMBERS": f"*{DTYPES[dtype]}", "parts": "i32", "asked": "i32"}
    optional = {"CENTER": (f"*{DTYPES[dtype]}", "range"), "ASKED": ("*fp32", "balance")}
    types |= {name: own for name, (own, of) in optional.items() if of == kind}
    absent = {name: None for name, (_, of) in optional.items() if of != kind}
    known = {
        "KIND": kind,
        "FP32": dtype == torch.float32,
        "D": width,
        "D_UP": triton.next_power_of_2(width),
        "PARTS": PARTS,
    }
    return Specialisation(channel_numbers, types, known | absent, warps=8)


SPECIALISATIONS = {
    "extremes of all tokens": _of_extremes(torch.bfloat16, 128, False),
    "extremes of a tier": _of_extremes(torch.float16, 96, True),
    "range": _of_numbers("range", 128),
    "range, wide": _of_numbers("range", 256, torch.float32),
    "root": _of_numbers("root", 96),
    "positive root": _of_numbers("positive root", 128),
    "balance": _of_numbers("balance", 128),
}
