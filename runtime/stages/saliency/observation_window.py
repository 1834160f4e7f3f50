"""Saliency from a prompt's last queries, max pooled along positions, as in SnapKV (arXiv:2404.14469, sections 4.1, 4.2)."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from calib.runtime.stages.selection import Saliency


@dataclass(frozen=True)
class ObservationWindow(Saliency):
    """p_i = max of c_j over |i - j| <= pool // 2, with votes c_j = sum_k A[k, j] over the newest `window` queries k.

    Args:
        window: queries that vote, the observation window.
        pool: positions under the kernel of the max pooling, an odd number; 1 pools nothing.
    """

    window: int
    pool: int

    by_neighbours = True

    @property
    def newest(self) -> int:
        """The window."""
        return self.window

    def scores(self, mass: Tensor, seen: Tensor) -> Tensor:
        """`mass [..., tokens]` in the order of positions, max pooled along them; positions beyond either end do not count."""
        # A kernel wider than all tokens together would cover no others.
        reach = min(self.pool // 2, mass.shape[-1] - 1)
        rows = mass.flatten(0, -2)
        return F.max_pool1d(rows, 2 * reach + 1, stride=1, padding=reach).view_as(mass)
