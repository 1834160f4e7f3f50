"""Uniform quantisation in float64 that returns all decoded values that float32 may give, if rounding is uncertain.

n is tokens, D channels.
"""

from collections.abc import Sequence

import numpy as np

# Relative errors of a value after one float32 operation, after a few, and of a code computed from such values.
ROUNDED, TOUCHED, CODED = 2**-23, 2**-21, 2**-20


def halves(y: np.ndarray, error: np.ndarray) -> list[np.ndarray]:
    """[y rounded to float16, the neighbour to which y -+ `error` is rounded]; the second is almost always the same."""
    near, low, high = (np.float16(value).astype(np.float64) for value in (y, y - error, y + error))
    return [near, np.where(low != near, low, high)]


def decodings(x: np.ndarray, parameters: Sequence[tuple[np.ndarray, np.ndarray]], bits: int) -> np.ndarray:
    """All decoded values of `x` that float32 may give, `[choices, *x.shape]`, those of exact arithmetic first.

    `parameters`: pairs of stored scale and zero point; the first is that of exact arithmetic, the others have its neighbours.
    """
    found = []
    for scale, zero in parameters:
        safe = np.where(scale > 0, scale, 1)
        position = np.where(scale > 0, (x - zero) / safe, 0) + 0.5
        doubt = CODED * ((abs(x) + abs(zero)) / safe + 2**bits)
        found += [np.clip(np.floor(position + sign * doubt), 0, 2**bits - 1) * scale + zero for sign in (0, -1, 1)]
    return np.stack(found)


def per_token(x: np.ndarray, bits: int, group: int, clip: float) -> np.ndarray:
    """Quantise `x [n, D]` in groups of `group` channels of a token, with float16 scales and zero points: `[choices, n, D]`."""
    parts = x.reshape(len(x), x.shape[1] // group, group)
    high, low, error = parts.max(-1), parts.min(-1), TOUCHED * abs(parts).max(-1)
    half, levels = clip * (high - low) / 2, 2**bits - 1
    scales = halves(2 * half / levels, 2 * error / levels)
    zeros = halves((high + low) / 2 - half, 2 * error)
    return decodings(x, [(s.repeat(group, -1), z.repeat(group, -1)) for s in scales for z in zeros], bits)


def per_channel(x: np.ndarray, bits: int, table: tuple[list[np.ndarray], list[np.ndarray]], clip: float) -> np.ndarray:
    """Quantise the channels of `x [n, D]` in given ranges, centre +- clip * half: `[choices, n, D]`."""
    centres, reaches = table
    ranges = [(centre, clip * half) for half in reaches for centre in centres]
    return decodings(x, [(2 * half / (2**bits - 1), centre - half) for centre, half in ranges], bits)


def channel_table(x: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Centre and half range of every channel of `x [n, D]` in float16, each as `halves` gives it."""
    high, low, error = x.max(0), x.min(0), TOUCHED * abs(x).max(0)
    return halves((high + low) / 2, error), halves((high - low) / 2, error)


def own_channels(x: np.ndarray, bits: int, clip: float) -> np.ndarray:
    """Quantise the channels of `x [n, D]` in their own ranges, with float16 scales and zero points: `[choices, n, D]`."""
    return per_token(x.T, bits, len(x), clip).swapaxes(1, 2)


def channel_scale(x: np.ndarray) -> list[np.ndarray]:
    """Channel scales c = sqrt(max_t |x|) of `x [n, D]` in float16 (ZipCache, eq. 6), as `halves` gives them."""
    scale = np.sqrt(abs(x).max(0))
    return halves(scale, ROUNDED * scale)


def never_zero(scale: np.ndarray) -> np.ndarray:
    """Channel scales for later tokens: a scale of 0 is replaced by the least positive one, or by 1 if all are 0."""
    least = scale[scale > 0].min() if scale.any() else 1.0
    return np.where(scale > 0, scale, least)
