"""An interval for a mean of independent rows, by drawing the rows again (Efron 1979, the percentile interval)."""

import numpy as np

DRAWS = 2000
TAIL = 2.5  # per cent on either side


def mean_interval(values: np.ndarray, seed: int) -> tuple[float, float]:
    """The 95 % interval of the mean of `values` [rows] float64 over rows drawn with replacement.

    The same seed gives the same interval; a single row gives its value twice.
    """
    drawn = np.random.default_rng(seed).integers(len(values), size=(DRAWS, len(values)))
    low, high = np.percentile(values[drawn].mean(1), (TAIL, 100 - TAIL))
    return float(low), float(high)
