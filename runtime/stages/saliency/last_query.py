"""Saliency from the newest query alone, by which TOVA evicts (arXiv:2401.06104, section 3.2)."""

from dataclasses import dataclass

from calib.kernels.heavy_hitters.operation import MassRule
from calib.runtime.stages.selection import Saliency


@dataclass(frozen=True)
class LastQuery(Saliency):
    """p_i = A[n, i], the attention weight in the last query n; weights in earlier queries do not count."""

    newest = 1
    rule = MassRule(adds_up=False)
