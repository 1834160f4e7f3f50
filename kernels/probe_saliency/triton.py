"""Attention that tokens receive from probes on a GPU, in two passes, without atomics and without an attention matrix (README.md).

A *probe* is a query row at its position among the keys. Logits are kept in the units of the products; scale and log2(e) are one
factor inside the exponential.
"""

import os
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from calib.kernels.ahead_of_time import Specialisation
from calib.kernels.dispatch import AMPERE, HOPPER, capability_of
from calib.kernels.launch import launch
from calib.kernels.probe_saliency.probe_rows import rows_of_probes, side_by_side, width_of
from calib.kernels.upload import upload

LOG2_E = 1.4426950408889634
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@dataclass(frozen=True)
class Tiles:
    """Vectors that a program keeps (`owned`: probes in the first pass, keys in the second), and vectors that it reads per
    iteration."""

    owned: int
    streamed: int
    warps: int
    stages: int


def tiles_of(channels: int, dtype: torch.dtype, capability: tuple[int, int]) -> Tiles:
    """Tiles that need less than 100 KB of shared memory, which every GPU from capability 8.0 on has."""
    if dtype == torch.float32:  # float32 products do not use the matrix units and hold both tiles in registers
        return Tiles(32, 32, 8, 2)
    if channels > 128:
        return Tiles(64, 64, 4, 2)
    # Before Hopper, operands are loaded to registers; the more rows a warp has, the fewer loads it needs per product.
    return Tiles(128, 64, 8, 3) if capability >= HOPPER else Tiles(256, 64, 8, 2)


@triton.jit
def vectors(base, stride, start, stop, D: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr):
    """Loads COUNT vectors of D channels from number `start` on, `[COUNT, WIDTH]`; zeros from number `stop` and channel D on."""
    numbers = tl.arange(0, COUNT)
    channels = tl.arange(0, WIDTH)
    inside = (numbers < stop - start)[:, None]
    if WIDTH != D:
        inside = inside & (channels < D)[None, :]
    # The offset of the start may exceed 2^31 elements, offsets within a tile cannot.
    pointers = base + tl.cast(start, tl.int64) * stride + numbers[:, None] * stride + channels[None, :]
    found = tl.load(pointers, mask=inside, other=0.0)
    return found.to(tl.float32) if WIDE else found


@triton.jit
def capped(products, cap, CAPPED: tl.constexpr):
    """tanh(products * cap / (2 log2 e)) if CAPPED, else the products."""
    return 1.0 - 2.0 / (tl.exp2(products * cap) + 1.0) if CAPPED else products


# Lengths, and the offset of the spans behind the positions, differ from prompt to prompt and must not cause a recompilation.
@triton.jit(do_not_specialize=["probes", "tokens", "sliding"])
def row_normalisers(
    query, keys, positions, normalisers,
    query_row, query_head, query_token, key_row, key_head, key_token,
    probes, tokens, heads, group, sliding, factor, cap,
    D: tl.constexpr, WIDTH: tl.constexpr, OWNED: tl.constexpr, STREAMED: tl.constexpr, PRECISION: tl.constexpr,
    CAPPED: tl.constexpr, SLIDING: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """First pass: store log2 of the sum of 2^logit of every probe row, float32 `[rows, heads, whole tiles of probes]`; infinity
    behind the last probe, so that probabilities are 0 there. A program handles a tile of probes.
    """
    tiles = tl.cdiv(probes, OWNED)
    pair = tl.program_id(0) // tiles
    start = (tiles - 1 - tl.program_id(0) % tiles) * OWNED  # tiles with the most keys first
    row, head = tl.cast(pair // heads, tl.int64), tl.cast(pair % heads, tl.int64)
    own_query = query + row * query_row + head * query_head
    own_keys = keys + row * key_row + (head // group) * key_head

    own = start + tl.arange(0, OWNED)
    position = tl.load(positions + own, mask=own < probes, other=-1)
    first = tl.load(positions + start)
    last = tl.load(positions + tl.minimum(start + OWNED, probes) - 1)
    asked = vectors(own_query, query_token, start, probes, D, OWNED, WIDTH, WIDE)
    stop = tl.minimum(last + 1, tokens)
    begin = 0
    seen_by_all = tl.minimum(first + 1, tokens) // STREAMED * STREAMED
    if SLIDING:
        begin = tl.maximum(first - sliding + 1, 0) // STREAMED * STREAMED
        seen_by_all = begin

    highest = tl.full([OWNED], -float("inf"), tl.float32)
    total = tl.zeros([OWNED], tl.float32)
    for at in range(begin, seen_by_all, STREAMED):
        tile = vectors(own_keys, key_token, at, seen_by_all, D, STREAMED, WIDTH, WIDE)
        logits = capped(tl.dot(asked, tl.trans(tile), input_precision=PRECISION), cap, CAPPED)
        higher = tl.maximum(highest, tl.max(logits, 1))
        total *= tl.exp2((highest - higher) * factor)
        total += tl.sum(tl.exp2(logits * factor - (higher * factor)[:, None]), 1)
        highest = higher
    for at in range(seen_by_all, stop, STREAMED):
        tile = vectors(own_keys, key_token, at, stop, D, STREAMED, WIDTH, WIDE)
        logits = capped(tl.dot(asked, tl.trans(tile), input_precision=PRECISION), cap, CAPPED)
        columns = (at + tl.arange(0, STREAMED))[None, :]
        visible = (columns <= position[:, None]) & (columns < stop)
        if SLIDING:
            visible = visible & (columns > position[:, None] - sliding)
        logits = tl.where(visible, logits, -float("inf"))
        higher = tl.maximum(highest, tl.max(logits, 1))
        reference = tl.where(higher == -float("inf"), 0.0, higher)  # avoids inf - inf while no key is visible
        total *= tl.exp2((highest - reference) * factor)
        total += tl.sum(tl.exp2(logits * factor - (reference * factor)[:, None]), 1)
        highest = higher
    there = own < probes
    result = tl.where(there, highest * factor + tl.log2(tl.where(there, total, 1.0)), float("inf"))
    tl.store(normalisers + tl.cast(pair, tl.int64) * tiles * OWNED + own, result)


@triton.jit(do_not_specialize=["probes", "tokens", "nearest", "farthest"], do_not_specialize_on_alignment=["spans"])
def column_sums(
    query, keys, positions, spans, normalisers, mass,
    query_row, query_head, query_token, key_row, key_head, key_token, normalisers_head,
    probes, tokens, kv_heads, group, nearest, farthest, factor, cap,
    D: tl.constexpr, WIDTH: tl.constexpr, OWNED: tl.constexpr, STREAMED: tl.constexpr, PRECISION: tl.constexpr,
    CAPPED: tl.constexpr, LIMITED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Second pass: store to `mass`, float32 `[rows, kv_heads, tokens]`, the sums of the probabilities that tokens receive from
    probes at least `nearest` and (if LIMITED) at most `farthest` positions behind them. A program handles a tile of keys, all
    probes and all heads of the group.

    `spans`: for each tile of keys, and for one behind the last, the first probe that may count for a key of it; then for each tile
    the end of the probes that may count.
    """
    tiles = tl.cdiv(tokens, OWNED)
    pair = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    start = tile * OWNED
    row, kv_head = tl.cast(pair // kv_heads, tl.int64), tl.cast(pair % kv_heads, tl.int64)
    own_keys = vectors(keys + row * key_row + kv_head * key_head, key_token, start, tokens, D, OWNED, WIDTH, WIDE)
    columns = start + tl.arange(0, OWNED)
    # Whole tiles of probes. Before `met_by_all`, probes that do not count for a key are masked; those behind the last probe give 0.
    begin = tl.load(spans + tile) // STREAMED * STREAMED
    stop = tl.load(spans + tiles + 1 + tile)
    met_by_all = stop if LIMITED else tl.cdiv(tl.load(spans + tile + 1), STREAMED) * STREAMED

    total = tl.zeros([OWNED], tl.float32)
    for member in range(group):
        head = kv_head * group + member
        own_query = query + row * query_row + head * query_head
        own_normalisers = normalisers + (row * kv_heads * group + head) * normalisers_head
        for at in tl.range(begin, met_by_all, STREAMED, num_stages=None if LIMITED else 1):
            own = at + tl.arange(0, STREAMED)
            below = tl.load(own_normalisers + own)
            apart = tl.load(positions + own, mask=own < probes, other=0)[None, :] - columns[:, None]
            asked = vectors(own_query, query_token, at, probes, D, STREAMED, WIDTH, WIDE)
            logits = capped(tl.dot(own_keys, tl.trans(asked), input_precision=PRECISION), cap, CAPPED)
            counted = apart >= nearest
            if LIMITED:
                counted = counted & (apart <= farthest)
            total += tl.sum(tl.where(counted, tl.exp2(logits * factor - below[None, :]), 0.0), 1)
        for at in range(met_by_all, stop, STREAMED):
            below = tl.load(own_normalisers + at + tl.arange(0, STREAMED))  # loaded while the products are computed
            asked = vectors(own_query, query_token, at, probes, D, STREAMED, WIDTH, WIDE)
            logits = capped(tl.dot(own_keys, tl.trans(asked), input_precision=PRECISION), cap, CAPPED)
            total += tl.sum(tl.exp2(logits * factor - below[None, :]), 1)
    tl.store(mass + tl.cast(pair, tl.int64) * tokens + columns, total, mask=columns < tokens)


def supports(query: Tensor, keys: Tensor, scale: float) -> bool:
    """Whether the kernels support these: one dtype (float16, bfloat16 or float32), at most 256 channels, and `scale` > 0."""
    return query.dtype == keys.dtype and keys.dtype in DTYPES and keys.shape[3] <= 256 and scale > 0


def attention_mass(
    query: Tensor,
    keys: Tensor,
    positions: Tensor,
    scale: float,
    softcap: float | None = None,
    sliding: int | None = None,
    behind: tuple[int, int] | None = None,
    normalisers: Tensor | None = None,
) -> Tensor:
    """As `operation.attention_mass`; it differs from the reference by float32 rounding."""
    (rows, kv_heads, tokens, channels), heads, probes = keys.shape, query.shape[1], len(positions)
    mass = torch.empty(rows, kv_heads, tokens, dtype=torch.float32, device=keys.device)
    if not (probes and mass.numel() and query.numel()):
        return mass.zero_()
    query, keys = (part if part.stride(3) == 1 else part.contiguous() for part in (query, keys))
    # Distances at which a probe counts for a token before it.
    nearest, farthest = 0, tokens if sliding is None else sliding - 1
    if behind is not None:
        nearest, farthest = max(nearest, behind[0]), min(farthest, behind[1])
    tiles = tiles_of(channels, keys.dtype, capability_of(keys.device))
    askers, owners = triton.cdiv(probes, tiles.owned), triton.cdiv(tokens, tiles.owned)
    of_rows = torch.empty(rows, heads, askers * tiles.owned, dtype=torch.float32, device=keys.device)
    numbers = _uploaded(positions, torch.arange(owners + 1) * tiles.owned, nearest, farthest, keys.device)
    factor, cap = scale * LOG2_E, 0.0
    if softcap is not None:
        factor, cap = softcap * LOG2_E, 2 * LOG2_E * scale / softcap
    group = heads // kv_heads
    known = _constants(channels, keys.dtype, tiles) | {"CAPPED": softcap is not None}
    known |= {"num_warps": tiles.warps, "num_stages": tiles.stages}
    with torch.cuda.device_of(keys):
        query = side_by_side(query, numbers, normalisers, of_rows, probes, tiles.owned, LOG2_E)
        strides = (*query.stride()[:3], *keys.stride()[:3])
        if normalisers is None:
            launch(
                row_normalisers, (askers * rows * heads,),
                query, keys, numbers, of_rows, *strides,
                probes, tokens, heads, group, sliding or 0, factor, cap, SLIDING=sliding is not None, **known,
            )  # fmt: skip
        launch(
            column_sums, (owners * rows * kv_heads,),
            query, keys, numbers, numbers[probes:], of_rows, mass, *strides, of_rows.stride(1),
            probes, tokens, kv_heads, group, nearest, farthest, factor, cap, LIMITED=farthest < tokens, **known,
        )  # fmt: skip
    return mass


def _uploaded(positions: Tensor, edges: Tensor, nearest: int, farthest: int, device: torch.device) -> Tensor:
    """Uploads the probes' positions, followed by the spans of the tiles of keys between `edges`, int32, asynchronously."""
    begin = torch.searchsorted(positions, edges + nearest)
    stop = torch.searchsorted(positions, edges[1:] - 1 + farthest, right=True)
    return upload(torch.cat([positions, begin, stop]), torch.int32, device)


def _constants(channels: int, dtype: torch.dtype, tiles: Tiles) -> dict[str, object]:
    return {
        "D": channels,
        "WIDTH": width_of(channels),
        "OWNED": tiles.owned,
        "STREAMED": tiles.streamed,
        "PRECISION": "ieee" if dtype == torch.float32 else None,
        "WIDE": INTERPRETED and dtype == torch.bfloat16,  # the interpreter cannot multiply bfloat16
    }


def _specialisation(
    kernel: Any, channels: int, dtype: torch.dtype, capability: tuple[int, int] = HOPPER, **constants: object
) -> Specialisation:
    """Specialisation of a kernel for vectors whose strides are multiples of 16 numbers."""
    name, tiles = (
        {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype],
        tiles_of(channels, dtype, capability),
    )
    types = dict.fromkeys(("query", "keys", "asked"), f"*{name}") | dict.fromkeys(
        ("sums", "normalisers", "mass"), "*fp32"
    )
    types |= dict.fromkeys(("positions", "spans"), "*i32") | dict.fromkeys(("factor", "cap", "unit"), "fp32")
    counts = (
        "probes",
        "tokens",
        "heads",
        "kv_heads",
        "group",
        "sliding",
        "nearest",
        "farthest",
        "sums_row",
        "sums_head",
    )
    strides = ("query_row", "query_head", "query_token", "key_row", "key_head", "key_token", "normalisers_head")
    types |= dict.fromkeys(counts, "i32") | dict.fromkeys(strides, "i32:16")
    known = _constants(channels, dtype, tiles) | {"CAPPED": False, "WIDE": False} | constants
    known = {own: known[own] for own in kernel.arg_names if own in known}
    return Specialisation(kernel, types, known, tiles.warps, tiles.stages)


SPECIALISATIONS = {
    "chosen rows, fp16, 128": _specialisation(rows_of_probes, 128, torch.float16, CHOSEN=True, SUMMED=True),
    "rows, fp16, 128": _specialisation(row_normalisers, 128, torch.float16, SLIDING=False),
    "columns, fp16, 128": _specialisation(column_sums, 128, torch.float16, LIMITED=False),
    "rows, fp16, 128, before Hopper": _specialisation(row_normalisers, 128, torch.float16, AMPERE, SLIDING=False),
    "columns, fp16, 128, before Hopper": _specialisation(column_sums, 128, torch.float16, AMPERE, LIMITED=False),
    "rows, bf16, 256, softcap, sliding": _specialisation(
        row_normalisers, 256, torch.bfloat16, SLIDING=True, CAPPED=True
    ),
    "columns, fp32, 80, behind": _specialisation(column_sums, 80, torch.float32, LIMITED=True),
}
