"""Weighted sums of rows by atom in plain torch: the sparse term of a dictionary's gradient, and the sums of k-means."""

from torch import Tensor


def scattered(coefficient: Tensor, index: Tensor, rows: Tensor, count: int) -> Tensor:
    """Scatter-add: for each pair (i, c) of a row of `rows [B, d]`, add c times the row to row i of the result, `[count, d]`.

    `coefficient [B, s]` in the rows' dtype, `index` int64 `[B, s]` below `count`. The result is deterministic.
    """
    added = (coefficient[..., None] * rows[:, None]).flatten(0, 1)
    summed = rows.new_zeros(count, rows.shape[-1])
    if rows.is_cuda:  # on a GPU index_add_ adds in an undefined order, index_put_ in a fixed one
        return summed.index_put_((index.flatten(),), added, accumulate=True)
    return summed.index_add_(0, index.flatten(), added)
