"""The stored forms of CSR's coefficients in float64: float16, float8 e4m3, or whole numbers with one scale for a token and head."""

from collections.abc import Iterator
from itertools import islice, product

import numpy as np

HALF_MAX, EIGHT_MAX = 65504.0, 448.0
COMBINATIONS = 2000


def eight(c: np.ndarray) -> np.ndarray:
    """Round to float8_e4m3fn: 4 bits of exponent, normal from 2^-6, 3 bits of mantissa, ties to even; clamped to +-448."""
    exponent = np.floor(np.log2(np.maximum(abs(c), 2.0**-6)))
    quantum = 2.0 ** (exponent - 3)
    return np.clip(np.round(c / quantum) * quantum, -EIGHT_MAX, EIGHT_MAX)


def half(c: np.ndarray, wide: bool) -> np.ndarray:
    """Round to float16; numbers beyond its range are rounded to float32 if the layer's parameters are `wide`, else clamped."""
    near = np.clip(c, -HALF_MAX, HALF_MAX).astype(np.float16).astype(np.float64)
    return np.where(abs(c) > HALF_MAX, c.astype(np.float32), near) if wide else near


def stored(c: np.ndarray, form: str | int, wide: bool = False) -> np.ndarray:
    """Coefficients `[..., pairs]` after storing and decoding in this form."""
    if form == "fp16":
        return half(c, wide)
    if form == "fp8":
        return eight(c)
    scale = half(abs(c).max(-1, keepdims=True) / levels(form), wide)
    return whole(c, scale, form)


def levels(bits: int | str) -> int:
    """The largest whole number of a signed code, 2^(bits - 1) - 1."""
    return 2 ** (int(bits) - 1) - 1


def whole(c: np.ndarray, scale: np.ndarray, bits: int | str, error: float = 0.0) -> np.ndarray:
    """round((c + error) / scale) scale, with clamped codes; 0 if the scale is 0."""
    safe = np.where(scale > 0, scale, 1)
    return np.clip(np.round((c + error) / safe), -levels(bits), levels(bits)) * scale


def choices(
    c: np.ndarray, error: np.ndarray, form: str | int, wide: bool = False, least: float = 0.0
) -> Iterator[np.ndarray]:
    """All decoded coefficients that float32 may give for `c [pairs]` of one token and head with errors up to `error [pairs]`.

    The exact ones come first. Alternatives no more than `least` from the exact value are left out.
    """
    if form in ("fp16", "fp8"):
        rounded = [stored(c + sign * error, form, wide) for sign in (0, -1, 1)]
        yield from combined(rounded, least)
        return
    largest, at = abs(c).max(), error[abs(c).argmax()]
    top, doubt = largest / levels(form), at / levels(form)
    scales = [float(half(np.array(top + sign * doubt), wide)) for sign in (0, -1, 1)]
    for scale in dict.fromkeys(scales):
        # Codes are computed with the stored scale, and the quotient has a rounding error of float32.
        slack = error + 2.0**-22 * abs(c)
        yield from combined([whole(c, np.array(scale), form, sign * slack) for sign in (0, -1, 1)], least)


def combined(ways: list[np.ndarray], least: float) -> Iterator[np.ndarray]:
    """All combinations that take each entry from one of `ways`, up to COMBINATIONS; the first is `ways[0]`."""
    entries = []
    for near, *others in zip(*ways, strict=True):
        entries.append([near, *{float(other) for other in others if abs(other - near) > least}])
    yield from (np.array(found) for found in islice(product(*entries), COMBINATIONS))
