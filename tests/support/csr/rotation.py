"""Half-split RoPE in float64."""

import numpy as np


def rotated(x: np.ndarray, positions: np.ndarray, frequencies: np.ndarray) -> np.ndarray:
    """Rotate `x [..., n, D]` by `positions [n]`: channels (i, i + r/2) of the first r by position x `frequencies[i]`."""
    half = len(frequencies)
    angle = np.asarray(positions, dtype=np.float64)[..., None] * frequencies
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], -1)


def spread(x: np.ndarray, half: int) -> np.ndarray:
    """For every channel of a rotated `x [..., D]`, the magnitude of the pair of channels from which it is computed."""
    pair = np.hypot(x[..., :half], x[..., half : 2 * half])
    return np.concatenate([pair, pair, abs(x[..., 2 * half :])], -1)
