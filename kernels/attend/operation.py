"""Attention of a few query rows over the pages of a tier in one pass, where a kernel serves them.

On a CPU, and for what is not `supported`, callers meet the same pages tile by tile (`reference.py`): both give the parts of one
running softmax.
"""

from dataclasses import replace

import torch
from torch import Tensor

from calib.kernels.attend.packed_pages import (
    EXACT,
    MOST_RANK,
    SIZE_BITS,
    SIZE_OF_ONE,
    STRIDE,
    Attended,
    LowRankTerm,
    PackedStream,
    PageSpan,
    RopeTables,
)
from calib.kernels.dispatch import prefers_triton

__all__ = [
    "EXACT",
    "MOST_RANK",
    "SIZE_BITS",
    "SIZE_OF_ONE",
    "STRIDE",
    "Attended",
    "LowRankTerm",
    "PackedStream",
    "PageSpan",
    "RopeTables",
    "attend_pages",
    "supported",
]


def supported(
    query_rows: int, keys: PackedStream | None, values: PackedStream | None, rope_tables: bool = False
) -> bool:
    """Whether a kernel reads these streams for so many query rows of a KV head, and rotates the keys if it has to."""
    if keys is None or values is None or not prefers_triton(keys.pages.device):
        return False
    from calib.kernels.attend import triton

    return triton.supports(query_rows, keys, values, rope_tables)


def attend_pages(
    query: Tensor,
    keys: PackedStream,
    values: PackedStream,
    span: PageSpan,
    constant: Tensor | None = None,
    softcap: float | None = None,
    scored: bool = False,
    precise: bool = False,
    rope_tables: RopeTables | None = None,
    mixes_keys: bool = False,
) -> Attended:
    """`query [rows, kv_heads, R, D]` float32, times the scale of the scores, against a tier that is `supported`.

    The rows R of a KV head are group-major, then the columns of `span.back`. `constant [rows, kv_heads, R, 1]` is added to
    every score, which is then capped. With `scored` the scores are returned, `[rows, kv_heads, R, slots]`. Queries and weights are
    rounded to float16 where they meet codes, as a model in 16 bits rounds them; `precise` leaves them 22 bits. With
    `rope_tables` the query is of D channels, and the `fixed` numbers of keys are those of their codes' middles. With `mixes_keys`
    the codes of keys that have sizes are mixed as well.
    """
    from calib.kernels.attend import triton

    shared = None if keys.ranked is None else query @ keys.ranked.basis.mT
    if keys.fixed is not None and rope_tables is None:
        scale, zero = keys.fixed
        added = (query * zero).sum(-1, keepdim=True)
        query, constant = query * scale, added if constant is None else constant + added
    with torch.cuda.device_of(query):  # Triton launches on the current device
        found = triton.attend_pages(
            query, keys, values, span, constant, softcap, scored, precise, rope_tables, shared, mixes_keys
        )
    columns = triton.columns_of(keys, values, mixes_keys)
    mixed, sized_mass, coefficients, mixed_keys = found.mixed.split(columns, -1)
    if values.fixed is not None:
        scale, zero = values.fixed
        mixed = mixed * scale + (found.mass if values.sizes is None else sized_mass) * zero
    if values.ranked is not None:
        mixed = mixed + coefficients @ values.ranked.basis
    return replace(found, mixed=mixed, mixed_keys=mixed_keys if mixes_keys else None)
