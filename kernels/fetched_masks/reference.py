"""Which tokens are hidden where exact pairs were fetched: packed and exact ones that are attended as fetched, and empty entries."""

import torch
from torch import Tensor

EMPTY = -1


def fetched_masks(
    positions: Tensor, slots: range, exact: Tensor, hidden: Tensor | None = None, back: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Masks of what is attended beside fetched tokens, and of these.

    Args:
        positions: int32 `[rows, kv_heads, n]`, the position of each fetched token in its row, or -1; none twice.
        slots: the positions of packed tokens.
        exact: int64 `[rows, 1, m]`, positions of exact tokens, at least 0.
        hidden: bool `[rows or 1, 1, columns, m]`, the exact tokens that a column does not see anyway. None: one column sees all.
        back: int64 `[rows, 1, columns, 1]`: a token at this position or before is behind the column's sliding window.

    Returns:
        Bool `[rows, kv_heads, slots]`: positions that are fetched. And bool `[rows, kv_heads, columns, m + n]`: exact tokens that
        are fetched or hidden anyway, then entries that are empty or behind.
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
