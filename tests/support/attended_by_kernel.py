"""Queries and spans of pages for the kernel of attention, and its answer held to float64."""

import torch
from paged_attention import Pages, assert_attended, attention
from tolerances import ATTENTION, FLOAT32_ATTENTION, ROUNDED_SCORES, SPLIT_SCORES

from calib.kernels.attend import operation, triton
from calib.kernels.attend.operation import PageSpan


def asked(keys: Pages, rows: int = 1, query_rows: int = 2, size: float = 2.0) -> torch.Tensor:
    """Queries whose scores are of order `size`, where keys are of order 1."""
    _, heads, _, channels = keys.tokens.shape
    draw = torch.Generator().manual_seed(3)
    return torch.randn(rows, heads, query_rows, channels, generator=draw) * (size / channels**0.5)


def whole(pages: Pages, *tables: list[int], used: list[int] | None = None, **masks) -> PageSpan:
    """The stretch of rows with these pages, all of their slots or `used` ones."""
    table = torch.tensor(tables, dtype=torch.int32)
    used = used or [table.shape[1] * pages.tokens.shape[2]] * len(table)
    return PageSpan(table, torch.tensor(used, dtype=torch.int32), **masks)


def assert_same(query, keys, values, span, *, constant=None, softcap=None, scored=False, precise=False):
    """The kernel's attention is that of float64, to what its kinds of tokens are rounded to."""
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
