"""What tokens in pages are beside their codes, met without a copy of a page, where a kernel takes it: on a GPU.

What lies among keys is a bias of scores. What lies among values is added to the parts that attention has left, by attention's own
launch function (`kernels/attend`). For what is not `supported` callers read tiles (`reference.py`)."""

import torch
from torch import Tensor

from calib.kernels.dispatch import prefers_triton
from calib.kernels.outliers.page_terms import PageTerms

__all__ = ["PageTerms", "scores_of", "supported"]


def supported(terms: PageTerms, channels: int, device: torch.device) -> bool:
    """Whether kernels take these terms, or none, of tokens of so many channels on `device`."""
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
    """What `terms` that are supported add to scores: float32 `[rows, kv_heads, R, slots]`, of slots that are not `used` anything.

    `query [rows, kv_heads, R, D]`, of any float dtype, times `scale` and, channel by channel, times `map_scale`, of any float dtype
    and `[rows or 1, kv_heads or 1, 1, D or 1]` or without the first axes. Slots lie in the pages, int32 `[rows, n]`, of `table`,
    `page` in each, `used` int32 `[rows]` of them. The same numbers at each call.
    """
    from calib.kernels.outliers import triton

    with torch.cuda.device_of(query):  # Triton launches on the current device
        return triton.scores_of(query, terms, table, used, page, scale, map_scale)
