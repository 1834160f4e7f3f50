"""Masks for attention with fetched tokens in plain torch: hide the packed and exact copies of fetched tokens, and empty entries."""

import torch
from torch import Tensor

EMPTY = -1


def fetched_masks(
    positions: Tensor, slots: range, exact: Tensor, hidden: Tensor | None = None, back: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Masks the packed and exact copies of tokens that are attended as fetched tokens, and invalid fetched entries.

    Args:
        positions: position of each fetched token in its row, int32 `[rows, kv_heads, n]`, -1 for an empty entry; no token twice.
        slots: positions of the packed tokens.
        exact: positions of the exact tokens, int64 `[rows, 1, m]`, at least 0.
        hidden: bool `[rows or 1, 1, columns, m]`, True for exact tokens that are masked for a query column anyway. None: there is
            one column, which sees all.
        back: int64 `[rows, 1, columns, 1]`: tokens at this position or before are outside the column's sliding window.

    Returns:
        Bool `[rows, kv_heads, slots]`, True for positions that are fetched; and bool `[rows, kv_heads, columns, m + n]`, True for
        exact tokens that are fetched or in `hidden`, then for fetched entries that are empty or outside the window.
    """
    at = positions.long()
    among = torch.where((at >= slots.start) & (at < slots.stop), at - slots.start + 1, 0)
    replaced = torch.zeros(*at.shape[:2], len(slots) + 1, dtype=torch.bool, device=at.device)
    replaced.scatter_(-1, among, True)
    twins = (exact[..., None] == at[:, :, None]).any(-1)[:, :, None]
    twins = twins if hidden is None else twins | hidden
    unseen = at[:, :, None] == EMPTY
    unseen = unseen if back is None else unseen | (at[:, :, None] <= back)
    return replaced[..., 1:], torch.cat([twins, unseen.expand(-1, -1, twins.shape[2], -1)], -1)
