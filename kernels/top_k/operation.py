"""Positions of the k largest scores, and partitions of positions by score, by the implementation for the device."""

from collections.abc import Sequence

from torch import Tensor

from calib.kernels.dispatch import prefers_triton
from calib.kernels.top_k import reference


def top_k(scores: Tensor, k: int, ends: Tensor | None = None) -> Tensor:
    """Positions of the k largest scores; the same on every device, and without a synchronisation.

    Args:
        scores: float32 `[rows, heads, T]`, without NaN; -inf is never chosen.
        k: at most T. Else ValueError is raised.
        ends: int32 `[rows, 2]`: only the scores of a row from the first position on and before the second are considered; the
            others may be anything. None: all.

    Returns:
        int64 `[rows, heads, k]`, ascending, padded with -1 at the end if fewer than k scores are above -inf. Of equal scores those
        with lower positions are chosen.
    """
    if not 0 <= k <= scores.shape[-1]:
        raise ValueError(f"k must lie between 0 and the {scores.shape[-1]} scores of a row, got {k}")
    if prefers_triton(scores.device):
        from calib.kernels.top_k import triton

        if triton.supports(scores):
            return triton.top_k(scores, k, ends)
    return reference.top_k(scores, k, ends)


def divided(scores: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """Partition positions by score: those of the `counts[0]` largest scores, those of the next `counts[1]`, and so on.

    Args:
        scores: float32 `[rows, heads, T]`, without NaN.
        counts: sizes of the parts, at most T together, else ValueError is raised. The remaining positions are in no part.

    Returns:
        For each count int64 `[rows, heads, count]`, ascending. Of equal scores those with lower positions count as larger.
    """
    if min(counts, default=0) < 0 or sum(counts) > scores.shape[-1]:
        raise ValueError(f"counts must be at least 0 and at most {scores.shape[-1]} together, got {list(counts)}")
    if prefers_triton(scores.device):
        from calib.kernels.top_k import triton

        if triton.supports(scores):
            return triton.divided(scores, counts)
    return reference.divided(scores, counts)
