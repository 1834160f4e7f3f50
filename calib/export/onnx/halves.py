"""Numbers stored in 16 bits: the counterpart of `kernels/to_half.py`."""

import numpy as np

from calib.export.onnx.graph import Value
from calib.kernels.to_half import HALF_MAX


def stored(x: Value, fp32_params: bool) -> Value:
    """Returns float32 `x` as it is stored: clamped and rounded to float16, or with `fp32_params` in float32.

    In float32, numbers within float16's range are still rounded to float16.
    """
    if fp32_params:
        return x.graph.where(x.abs() <= HALF_MAX, x.cast(np.float16).cast(np.float32), x)
    return x.clamp(-HALF_MAX, HALF_MAX).cast(np.float16)


def kept_dtype(fp32_params: bool) -> type:
    """Returns the dtype of the result of `stored`."""
    return np.float32 if fp32_params else np.float16
