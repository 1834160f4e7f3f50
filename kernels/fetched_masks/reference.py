"""Masks for attention with fetched tokens in plain torch: hide the packed and exact copies of fetched tokens, and empty entries."""

import torch
from torch import Tensor

EMPTY = -1


def fetched_masks(
    positions: Tensor, slots: range, exact: Tensor, hidden: Tensor | None = None, back: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As `operation.fetched_masks`, which documents the arguments."""
    at = positions.long()
    among = torch.where((at >= slots.start) & (at < slots.stop), at - slots.start + 1, 0)
    replaced = torch.zeros(*at.shape[:2], len(slots) + 1, dtype=torch.bool, device=at.device)
    replaced.scatter_(-1, among, True)
    twins = (exact[..., None] == at[:, :, None]).any(-1)[:, :, None]
    twins = twins if hidden is None else twins | hidden
    unseen = at[:, :, None] == EMPTY
    unseen = unseen if back is None else unseen | (at[:, :, None] <= back)
    return replaced[..., 1:], torch.cat([twins, unseen.expand(-1, -1, twins.shape[2], -1)], -1)
