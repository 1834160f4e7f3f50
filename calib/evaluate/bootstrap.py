"""Bootstrap interval of a mean over independent rows (Efron 1979, percentile interval)."""

import numpy as np

DRAWS = 2000
TAIL = 2.5  # per cent on either side


def mean_interval(values: np.ndarray, seed: int) -> tuple[float, float]:
    """Returns the 95 % interval of the mean of `values` [rows] float64, from rows drawn with replacement.

    The same seed gives the same interval; for a single row both ends are its value.
    """
    drawn = np.random.default_rng(seed).integers(len(values), size=(DRAWS, len(values)))
    low, high = np.percentile(values[drawn].mean(1), (TAIL, 100 - TAIL))
    return float(low), float(high)
