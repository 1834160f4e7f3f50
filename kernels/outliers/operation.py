"""Attention terms of outliers and per-page low-rank factors (GEAR) that pages store besides codes; Triton kernels on a GPU only.

Those of keys give a bias of the scores. Those of values are added to the parts of the softmax, by attention's launch function
(`kernels/attend`). Where `supported` is False callers compute the terms tile by tile (`reference.py`)."""

import torch
from torch import Tensor

from calib.kernels.dispatch import prefers_triton
from calib.kernels.outliers.page_terms import PageTerms

__all__ = ["PageTerms", "scores_of", "supported"]


def supported(terms: PageTerms, channels: int, device: torch.device) -> bool:
    """Whether the kernels support these terms for tokens of `channels` channels on `device`."""
    if not prefers_triton(device):
        return False
    from calib.kernels.outliers import triton

    return triton.supports(terms, channels)


def scores_of(
    query: Tensor,
    terms: PageTerms,
    table: Tensor,
    used: Tensor,
    page: int,
    scale: float = 1.0,
    map_scale: Tensor | None = None,
) -> Tensor:
    """Bias that the keys' `terms` (`supported`) add to scores: float32 `[rows, kv_heads, R, slots]`, undefined for unused slots.

    `query [rows, kv_heads, R, D]`, any float dtype, is multiplied by `scale`, and each channel by `map_scale`, any float dtype,
    `[rows or 1, kv_heads or 1, 1, D or 1]` or without leading axes. `table`, int32 `[rows, n]`, has the pages of each row, `page`
    slots each, of which the first `used`, int32 `[rows]`, are in use. The result is deterministic.
    """
    from calib.kernels.outliers import triton

    with torch.cuda.device_of(query):  # Triton launches on the current device
        return triton.scores_of(query, terms, table, used, page, scale, map_scale)
