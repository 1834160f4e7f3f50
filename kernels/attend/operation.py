"""Fused attention of a few query rows over the packed pages of a tier, and over exact (uncompressed) tokens: Triton on a GPU,
compiled C on a CPU.

Where `supported` is False callers attend the pages tile by tile in plain torch (`reference.py`). Both give parts of one running
softmax.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from calib.kernels.attend import exact_cpu, pages_cpu
from calib.kernels.attend.packed_pages import (
    EXACT,
    MOST_RANK,
    SIZE_BITS,
    SIZE_OF_ONE,
    STRIDE,
    Attended,
    ChannelMap,
    CodeFold,
    ExactAttention,
    ExactGroup,
    ExactTokens,
    LowRankTerm,
    PackedStream,
    PageSpan,
    PredictedValues,
    RopeTables,
)
from calib.kernels.attend.reference import folded, scaled
from calib.kernels.current_device import launching_on
from calib.kernels.dispatch import prefers_triton
from calib.kernels.outliers.page_terms import PageTerms

__all__ = [
    "EXACT",
    "MOST_RANK",
    "SIZE_BITS",
    "SIZE_OF_ONE",
    "STRIDE",
    "Attended",
    "ChannelMap",
    "CodeFold",
    "ExactAttention",
    "ExactGroup",
    "ExactTokens",
    "LowRankTerm",
    "PackedStream",
    "PageSpan",
    "PredictedValues",
    "RopeTables",
    "attend_exact",
    "attend_pages",
    "exact_supported",
    "supported",
]


def supported(
    query_rows: int,
    keys: PackedStream | None,
    values: PackedStream | None,
    rope_tables: bool = False,
    first_slots: bool = False,
) -> bool:
    """Whether `attend_pages` supports these streams with `query_rows` query rows per KV head.

    `rope_tables`: keys are stored before RoPE and rotated in the kernel. `first_slots`: the span is a row's first slots, without a
    mask, positions, bias or returned scores; the CPU kernel supports no other spans.
    """
    if keys is None or values is None:
        return False
    if not prefers_triton(keys.pages.device):
        return first_slots and pages_cpu.supports(query_rows, keys, values, rope_tables)
    return _triton().supports(query_rows, keys, values, rope_tables)


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
    fold: CodeFold | None = None,
    ahead: int = 0,
    scale: float = 1.0,
    runs: bool = False,
    terms: PageTerms | None = None,
) -> Attended:
    """Attends to the packed tokens of a tier whose streams are `supported`; returns one part of a softmax (or one per run).

    Args:
        query: `[rows, kv_heads, R, D]`, float32 or the model's dtype. The R query rows of a KV head are group-major, the columns
            of `span.back` (new tokens) change fastest.
        constant: `[rows, kv_heads, R, 1]`, added to every score before the soft cap; or None.
        scored: return the scores, `[rows, kv_heads, R, slots]`.
        precise: on a GPU, use 22 bits of queries and weights in products with codes; else they are rounded to float16.
        rope_tables: keys are rebuilt from codes before RoPE and rotated; `fixed` of keys is not used then.
        fold: maps mixtures of component codes to channels, and adds values predicted from keys; `fixed` of values is not used then.
        ahead: return the scores of so many keys behind the used slots, as far as the table has them. Not for keys with
            `rope_tables` or low-rank coefficients.
        scale: factor of the query (softmax scale).
        runs: the parts of several runs may be returned unmerged, for `attend_exact`.
        terms: outliers and low-rank parts of values that are added to the mixture (`kernels/outliers`); on a GPU only.
    """
    if fold is not None:
        values = values.without_fixed
    # Runs are merged first where their mixtures still have to be mapped to channels.
    whole = values.ranked is None or terms is not None
    runs = runs and fold is None and whole and values.sizes is None
    if not prefers_triton(query.device):
        return pages_cpu.attend_pages(
            scaled(query, scale), keys, values, span, constant, softcap, rope_tables, fold, ahead
        )
    triton, mixes_keys = _triton(), fold is not None and fold.predicted is not None
    folds = fold is not None and values.ranked is None
    with launching_on(query):
        found = triton.attend_pages(
            query, keys, values, span, constant, softcap, scored, precise, rope_tables, mixes_keys, ahead, scale,
            fold if folds else None, runs, terms,
        )  # fmt: skip
    if folds or (fold is None and found.mixed.shape[-1] == values.channels):  # no columns behind the channels
        return found
    columns = triton.columns_of(keys, values, mixes_keys)
    if found.runs > 1:
        return replace(found, mixed=found.mixed[..., : columns[0]])
    mixed, sized_mass, coefficients, mixed_keys = found.mixed.split(columns, -1)
    if values.fixed is not None and values.sizes is not None:
        step, zero = values.fixed
        mixed = mixed * step + sized_mass * zero
    if values.ranked is not None and terms is None:
        mixed = mixed + coefficients @ values.ranked.basis.float()
    if fold is not None:
        mixed = folded(fold, mixed, found.mass, sized_mass, mixed_keys)
    return replace(found, mixed=mixed)


def exact_supported(query: Tensor, tokens: ExactTokens) -> bool:
    """Whether `attend_exact` supports this query and these tokens."""
    if not prefers_triton(query.device):
        return exact_cpu.supports(query, tokens)
    return _exact_triton().supports(query, tokens)


def attend_exact(
    query: Tensor,
    tokens: ExactTokens,
    parts: Sequence[Attended],
    softcap: float | None = None,
    scale: float = 1.0,
    told: bool = False,
    dtype: torch.dtype | None = None,
) -> ExactAttention:
    """Attends to exact `tokens` (`exact_supported`), merges the result with `parts` of the softmax, 16 at most, and normalises.

    `query [rows, kv_heads, R, D]`, float32 or the model's dtype, is multiplied by `scale`; on a CPU there is one new token. Every
    query row must see at least one token. The output has the query's dtype, or `dtype`. `told`: return the log-sum-exp and the
    scores as well, from which probabilities follow."""
    if not prefers_triton(query.device):
        found = exact_cpu.attend_exact(scaled(query, scale), tokens, parts, softcap, told)
        return found._replace(output=found.output.to(dtype or query.dtype))
    with launching_on(query):
        return _exact_triton().attend_exact(query, tokens, parts, softcap, scale, told, dtype)


@cache
def _triton() -> ModuleType:
    from calib.kernels.attend import triton

    return triton


@cache
def _exact_triton() -> ModuleType:
    from calib.kernels.attend import exact_triton

    return exact_triton
