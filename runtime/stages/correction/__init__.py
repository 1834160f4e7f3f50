"""Corrections of a codec's error: x^ = D + L + S (GEAR, arXiv:2403.05527, eq. 3)."""

from calib.runtime.stages.correction.low_rank import LowRank
from calib.runtime.stages.correction.outliers import Outliers

__all__ = ["LowRank", "Outliers"]
