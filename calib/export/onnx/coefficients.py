"""Storage of a sparse representation's coefficients: the counterpart of `runtime/stages/codec/coefficients.py`."""

import numpy as np
import torch

from calib.export.onnx.graph import Value
from calib.export.onnx.halves import kept_dtype, stored
from calib.export.onnx.packing import pack_bytes, unpack_bytes
from calib.kernels.pack.reference import bytes_per_token
from calib.runtime.stages.codec import Sparse


def kept(codec: Sparse, fp32_params: bool) -> dict[str, tuple[type, int]]:
    """Returns dtype and width of each field of a token's coefficients."""
    form, half = codec.coefficients.form, kept_dtype(fp32_params)
    if isinstance(form, int):
        return {"coefficients": (np.uint8, bytes_per_token(codec.pairs, form)), "scale": (half, 1)}
    return {"coefficients": (half if form == "fp16" else np.uint8, codec.pairs)}


def encoded(coefficients: Value, codec: Sparse, fp32_params: bool) -> dict[str, Value]:
    """Returns the fields of coefficients, float32 `[..., pairs]`."""
    form, where = codec.coefficients.form, coefficients.graph.where
    if form == "fp16":
        return {"coefficients": stored(coefficients, fp32_params)}
    if form == "fp8":
        return {"coefficients": _float8(coefficients)}
    assert isinstance(form, int)
    most = 2.0 ** (form - 1) - 1
    scale = stored(coefficients.abs().max(3) / most, fp32_params)
    step = scale.cast(np.float32)
    codes = where(step > 0.0, coefficients / step, 0.0).op("Round").clamp(-most, most) + most
    return {"coefficients": pack_bytes(codes.cast(np.int32), form, codec.pairs), "scale": scale}


def decoded(block: dict[str, Value], codec: Sparse) -> Value:
    """Returns the coefficients of the fields, float32 `[..., pairs]`."""
    form, numbers = codec.coefficients.form, block["coefficients"]
    if form == "fp16":
        return numbers.cast(np.float32)
    if form == "fp8":
        return numbers.graph.constant(_float8_numbers(256)).take(numbers.cast(np.int32))
    assert isinstance(form, int)
    codes = unpack_bytes(numbers, form, codec.pairs) - (2 ** (form - 1) - 1)
    return codes.cast(np.float32) * block["scale"].cast(np.float32)


def _float8(x: Value) -> Value:
    """Returns the e4m3 codes of x: the code of |x| is the number of midpoints between neighbouring e4m3 numbers below it."""
    numbers = _float8_numbers(127)  # 0 ... 448, in the order of their codes
    borders = ((numbers[1:].astype(np.float64) + numbers[:-1]) / 2).astype(np.float32)
    # Ties go to the even code: if that is the upper one, its midpoint is lowered so that |x| equal to it counts as above.
    borders[1::2] = np.nextafter(borders[1::2], np.float32(0))
    count = (x.abs().reshape(0, 0, 0, -1, 1) > borders).cast(np.int32).sum(4, keep=False)
    return (count + (x < 0.0).cast(np.int32) * 128).cast(np.uint8)


def _float8_numbers(count: int) -> np.ndarray:
    """Returns the e4m3 numbers of the first `count` codes, float32."""
    return torch.arange(count, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
