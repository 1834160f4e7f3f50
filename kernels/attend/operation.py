"""Attention of a few query rows over the pages of a tier in one pass, and over the exact tokens beside them, where a kernel serves
them: Triton on a GPU, C on a CPU.

For what is not `supported` callers meet the same pages tile by tile (`reference.py`): both give the parts of one running softmax.
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
    """Whether a kernel reads these streams for so many query rows of a KV head, and rotates the keys if it has to. `first_slots`: a
    row's first slots are read, and of their spans neither masks, positions, biases nor scores are asked, which only Triton knows.
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
    """`query [rows, kv_heads, R, D]`, float32 or as the model made it, times the `scale` of the scores against a tier that is
    `supported`.

    The rows R of a KV head are group-major, then the columns of `span.back`. `constant [rows, kv_heads, R, 1]` is added to every
    score, which is then capped. With `scored` the scores are returned, `[rows, kv_heads, R, slots]`. Queries and weights are
    rounded to float16 where they meet codes, as a model in 16 bits rounds them; `precise` leaves them 22 bits. With `rope_tables`
    the query is of D channels, and the `fixed` numbers of keys are those of their codes' middles. With `fold` codes of values,
    whatever is `fixed`, are brought to channels by it, and codes of keys where it says what these predict. Scores of the `ahead`
    next keys are told besides, of those that are in the table: of keys that are not turned and have no coefficients. With `runs`
    the parts of several runs may wait for `attend_exact`. With `terms`, which `kernels/outliers` supports and no C knows, what
    values are beside their codes is mixed with them.
    """
    if fold is not None:
        values = values.without_fixed
    # Whose mixtures are not of channels yet are joined first.
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
    if folds or (fold is None and found.mixed.shape[-1] == values.channels):  # nothing is mixed besides
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
    """Whether a kernel meets these tokens and joins other parts with them."""
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
    """Attention over `tokens` that are supported, and over what `parts` of the softmax, 16 at most, have found; its output in the
    query's dtype, or another. `query [rows, kv_heads, R, D]`, float32 or as the model made it, times the `scale` of the scores is
    of one column on a CPU, and meets a token at least. `told`: with the normaliser and the scores, from which probabilities
    follow."""
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
