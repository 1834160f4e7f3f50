"""Masks for attention with fetched tokens, by the implementation for the device."""

from torch import Tensor

from calib.kernels.dispatch import prefers_triton
from calib.kernels.fetched_masks import reference


def fetched_masks(
    positions: Tensor, slots: range, exact: Tensor, hidden: Tensor | None = None, back: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Masks the packed and exact copies of tokens that are attended as fetched tokens, and invalid fetched entries.

    Arguments and results as in `reference.fetched_masks`.
    """
    if prefers_triton(positions.device):
        from calib.kernels.fetched_masks import triton

        if triton.supports(positions, exact):
            return triton.fetched_masks(positions, slots, exact, hidden, back)
    return reference.fetched_masks(positions, slots, exact, hidden, back)
