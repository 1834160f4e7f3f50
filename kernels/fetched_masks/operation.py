"""Masks for attention with fetched tokens, by the implementation for the device."""

from torch import Tensor

from calib.kernels.dispatch import prefers_triton
from calib.kernels.fetched_masks import reference


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
    if prefers_triton(positions.device):
        from calib.kernels.fetched_masks import triton

        if triton.supports(positions, exact):
            return triton.fetched_masks(positions, slots, exact, hidden, back)
    return reference.fetched_masks(positions, slots, exact, hidden, back)
