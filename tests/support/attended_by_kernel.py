"""Queries and page spans for the attention kernel, and the comparison of its output with float64 attention."""

import torch
from paged_attention import Pages, assert_attended, attention
from tolerances import ATTENTION, FLOAT32_ATTENTION, ROUNDED_SCORES, SPLIT_SCORES

from calib.kernels.attend import operation, triton
from calib.kernels.attend.operation import PageSpan


def asked(keys: Pages, rows: int = 1, query_rows: int = 2, size: float = 2.0) -> torch.Tensor:
    """Random queries `[rows, heads, query_rows, D]` whose scores are of order `size` for keys of order 1."""
    _, heads, _, channels = keys.tokens.shape
    draw = torch.Generator().manual_seed(3)
    return torch.randn(rows, heads, query_rows, channels, generator=draw) * (size / channels**0.5)


def whole(pages: Pages, *tables: list[int], used: list[int] | None = None, **masks) -> PageSpan:
    """A span with one row for each table of page numbers, over all slots of its pages or the first `used` ones."""
    table = torch.tensor(tables, dtype=torch.int32)
    used = used or [table.shape[1] * pages.tokens.shape[2]] * len(table)
    return PageSpan(table, torch.tensor(used, dtype=torch.int32), **masks)


def assert_same(query, keys, values, span, *, constant=None, softcap=None, scored=False, precise=False):
    """Assert that the kernel's attention equals float64 attention, to the rounding of its kinds of tokens; return its result.

    Scores may differ by ROUNDED_SCORES, by SPLIT_SCORES if `precise`; for exact keys by SPLIT_SCORES (16 bits) or
    FLOAT32_ATTENTION. Outputs may differ by ATTENTION of the values' dtype (of float16 for codes), FLOAT32_ATTENTION if `precise`.
    """
    assert triton.supports(query.shape[2], keys.stream, values.stream)
    found = operation.attend_pages(query, keys.stream, values.stream, span, constant, softcap, scored, precise)
    assert (found.scores is not None) == scored
    scores, output = (
        SPLIT_SCORES if precise else ROUNDED_SCORES,
        FLOAT32_ATTENTION if precise else ATTENTION[torch.float16],
    )
    if keys.stream.bits == operation.EXACT:
        scores = FLOAT32_ATTENTION if keys.stream.pages.dtype == torch.float32 else SPLIT_SCORES
    if values.stream.bits == operation.EXACT:
        output = ATTENTION[values.stream.pages.dtype]
    assert_attended(found, attention(query, keys, values, span, constant, softcap), values.tokens, scores, output)
    return found
