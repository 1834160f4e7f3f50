"""The positions of the k largest scores, and of the others, by whichever form of the operation the device runs."""

from collections.abc import Sequence

from torch import Tensor

from calib.kernels.dispatch import prefers_triton
from calib.kernels.top_k import reference


def top_k(scores: Tensor, k: int, ends: Tensor | None = None) -> Tensor:
    """Where the largest scores stand; the same on every device, and without waiting for it.

    Args:
        scores: float32 `[rows, heads, T]`, without NaN; -inf is never chosen.
        k: at most T; else ValueError.
        ends: int32 `[rows, 2]`: of a row only scores from the first position on and before the second are there, the others may
            be anything. None: all.

    Returns:
        int64 `[rows, heads, k]`: rising, -1 at the end where fewer than k are more than -inf. Of equal scores those with
        lower positions are chosen.
    """
    if not 0 <= k <= scores.shape[-1]:
        raise ValueError(f"k must lie between 0 and the {scores.shape[-1]} scores of a row, got {k}")
    if prefers_triton(scores.device):
        from calib.kernels.top_k import triton

        if triton.supports(scores):
            return triton.top_k(scores, k, ends)
    return reference.top_k(scores, k, ends)


def divided(scores: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """Where the `counts[0]` largest scores stand, where the next `counts[1]` stand, and so on.

    Args:
        scores: float32 `[rows, heads, T]`, without NaN.
        counts: at most T together; else ValueError. Scores beyond them stand in no part.

    Returns:
        For each count int64 `[rows, heads, count]`: rising. Of equal scores those with lower positions count as larger.
    """
    if min(counts, default=0) < 0 or sum(counts) > scores.shape[-1]:
        raise ValueError(f"counts must be at least 0 and at most {scores.shape[-1]} together, got {list(counts)}")
    if prefers_triton(scores.device):
        from calib.kernels.top_k import triton

        if triton.supports(scores):
            return triton.divided(scores, counts)
    return reference.divided(scores, counts)
