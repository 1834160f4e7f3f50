"""Gathers the query rows of probes on a GPU into one tensor for the passes over the keys, and converts known log-sum-exps."""

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
    """Gathers rows and converts log-sum-exps; a program handles a tile of probes of a head.

    CHOSEN: `query` and `sums` have a row for every token; those of the probes are copied to `asked [rows, heads, probes, D]`.
    SUMMED: `normalisers` receive what `row_normalisers` would compute, from the log-sum-exps `sums`.
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
    """Returns the probes' rows of `query`, which has a row for each probe or for each token; if `sums` are given, also write `unit`
    times those of the probes to `normalisers`.

    Args:
        query: `[rows, heads, probes or tokens, D]`, contiguous channels.
        positions: positions of the probes among the tokens, int32 `[probes or more]`.
        sums: log-sum-exp of each row of `query`, float32 `[rows, heads, probes or tokens]`, or None.
        normalisers: float32 `[rows, heads, whole tiles of probes]`.
        owned: probes per tile.
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
    """Channels of a tile, with padding."""
    return max(16, next_power_of_2(channels))
