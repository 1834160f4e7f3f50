"""Numbers kept in 16 bits: the twin of `runtime/stages/halves.py`."""

import numpy as np

from calib.export.onnx.graph import Value
from calib.runtime.stages.halves import HALF_MAX


def stored(x: Value, wide: bool) -> Value:
    """float32 `x` as it is kept: float16, or float32 (`wide`) that is rounded to float16 where that can hold it."""
    if wide:
        return x.graph.where(x.abs() <= HALF_MAX, x.cast(np.float16).cast(np.float32), x)
    return x.clamp(-HALF_MAX, HALF_MAX).cast(np.float16)


def kept_dtype(wide: bool) -> type:
    """The dtype of what `stored` gives."""
    return np.float32 if wide else np.float16
