"""Numbers kept in 16 bits: the twin of `kernels/to_half.py`."""

import numpy as np

from calib.export.onnx.graph import Value
from calib.kernels.to_half import HALF_MAX


def stored(x: Value, fp32_params: bool) -> Value:
    """float32 `x` as it is kept: float16, or float32 (`fp32_params`) that is rounded to float16 where that can hold it."""
    if fp32_params:
        return x.graph.where(x.abs() <= HALF_MAX, x.cast(np.float16).cast(np.float32), x)
    return x.clamp(-HALF_MAX, HALF_MAX).cast(np.float16)


def kept_dtype(fp32_params: bool) -> type:
    """The dtype of what `stored` gives."""
    return np.float32 if fp32_params else np.float16
