"""Saliency from attention mass: the plain sum of H2O and MiKV, and ZipCache's mean (arXiv:2405.14256, eq. 7 and 8)."""

from dataclasses import dataclass

from calib.kernels.heavy_hitters.operation import MassRule
from calib.runtime.stages.selection import Saliency


@dataclass(frozen=True)
class Accumulated(Saliency):
    """p_i = sum_k A[k, i] (eq. 7): favours early tokens, which more queries can see."""


@dataclass(frozen=True)
class Normalised(Saliency):
    """p_i = sum_k A[k, i] / nnz(A[:, i]) (eq. 8): the mean over the rows that can see the token; 0 where none can."""

    rule = MassRule(mean=True)
