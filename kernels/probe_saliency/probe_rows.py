"""The rows of probes on a GPU as the passes over the keys read them: side by side, with what is known of their softmax."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from calib.kernels.launch import launch
from calib.kernels.powers import cdiv, next_power_of_2


@triton.jit(do_not_specialize=["probes", "sums_row", "sums_head"])
def rows_of_probes(
    query, positions, sums, asked, normalisers,
    query_row, query_head, query_token, sums_row, sums_head, normalisers_head,
    probes, heads, unit,
    D: tl.constexpr, WIDTH: tl.constexpr, OWNED: tl.constexpr, CHOSEN: tl.constexpr, SUMMED: tl.constexpr,
):  # fmt: skip
    """The probes' rows as the passes read them; a program for a tile of probes of a head.

    CHOSEN: `query` and `sums` have a row for every token; `asked [rows, heads, probes, D]` gets those of the probes.
    SUMMED: `normalisers` get what `row_normalisers` would give, from `sums`, the logarithms of sums of exponentials.
    """
    tiles = tl.cdiv(probes, OWNED)
    pair = tl.cast(tl.program_id(0) // tiles, tl.int64)
    own = tl.program_id(0) % tiles * OWNED + tl.arange(0, OWNED)
    row, head, there = pair // heads, pair % heads, own < probes
    source = tl.cast(own, tl.int64)
    if CHOSEN:
        source = tl.load(positions + own, mask=there, other=0).to(tl.int64)
        channels = tl.arange(0, WIDTH)
        inside = there[:, None] & (channels < D)[None, :]
        pointers = query + row * query_row + head * query_head + source[:, None] * query_token + channels[None, :]
        to = asked + (pair * probes + own[:, None]) * D + channels[None, :]
        tl.store(to, tl.load(pointers, mask=inside), mask=inside)
    if SUMMED:
        summed = tl.load(sums + row * sums_row + head * sums_head + source, mask=there, other=float("inf"))
        tl.store(normalisers + pair * normalisers_head + own, summed * unit)


def side_by_side(
    query: Tensor, positions: Tensor, sums: Tensor | None, normalisers: Tensor, probes: int, owned: int, unit: float
) -> Tensor:
    """The probes' rows of `query`, which has them alone or a row for every token; `normalisers` are written where `sums` of the
    same rows are known: `unit` times these.

    Args:
        query: `[rows, heads, probes or tokens, D]`, channels side by side.
        positions: int32 `[probes or more]`, of the probes among the tokens.
        sums: float32 `[rows, heads, probes or tokens]`, the logarithm of each row's sum of exponentials.
        normalisers: float32 `[rows, heads, whole tiles of probes]`.
        owned: probes of a tile.
    """
    (rows, heads, _, channels), chosen = query.shape, query.shape[2] != probes
    if not chosen and sums is None:
        return query
    asked = torch.empty(rows, heads, probes, channels, dtype=query.dtype, device=query.device) if chosen else query
    known = normalisers if sums is None else sums if sums.stride(2) == 1 else sums.contiguous()
    launch(
        rows_of_probes, (cdiv(probes, owned) * rows * heads,),
        query, positions, known, asked, normalisers, *query.stride()[:3], *known.stride()[:2], normalisers.stride(1),
        probes, heads, unit, D=channels, WIDTH=width_of(channels), OWNED=owned, CHOSEN=chosen, SUMMED=sums is not None,
        num_warps=8,
    )  # fmt: skip
    return asked


def width_of(channels: int) -> int:
    """Channels that a tile has room for."""
    return max(16, next_power_of_2(channels))
