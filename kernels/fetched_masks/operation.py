"""Which tokens fetched ones hide, by whichever form of the operation the device runs."""

from torch import Tensor

from calib.kernels.dispatch import prefers_triton
from calib.kernels.fetched_masks import reference


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
    if prefers_triton(positions.device):
        from calib.kernels.fetched_masks import triton

        if triton.supports(positions, exact):
            return triton.fetched_masks(positions, slots, exact, hidden, back)
    return reference.fetched_masks(positions, slots, exact, hidden, back)
