"""Trellis-coded levels in float64, from their definition: decodes words, and finds the least cost of all paths by trying each.

Component n is counted in the order of a token's words and of a word's fields; its code of b bits is u + 2 f:

    z0 = u[n-2]        z1 = u[n] ^ u[n-1] ^ u[n-3]        i = 4 f + 2 z1 + z0        y^ = (i + 1/2) 2^-b - 1
"""

from collections.abc import Sequence
from itertools import product

import numpy as np


def level(u: Sequence, n: int, f: np.ndarray | int, bits: int) -> np.ndarray | float:
    """y^ of component n of a path u; with arrays as entries of u and f, of many paths at once."""

    def before(back: int) -> np.ndarray | int:
        return u[n - back] if n >= back else 0

    index = 4 * f + 2 * (u[n] ^ before(1) ^ before(3)) + before(2)
    return (index + 0.5) * 2.0**-bits - 1


def trellis_components(words: np.ndarray, widths: tuple[int, ...], counts: tuple[int, ...]) -> np.ndarray:
    """Components, float64 `[..., kv_heads, T, P max(counts)]` plane by plane, from the words of all heads side by side
    `[..., 1, T, W]`; P planes, W words. Components that no word holds are NaN."""
    most, unsigned = max(counts), words[..., 0, :, :].view(np.uint16).astype(np.int64)
    found = np.full((*unsigned.shape[:-2], len(counts), unsigned.shape[-2], len(widths) * most), np.nan)
    for head, count in enumerate(counts):
        u: list[np.ndarray] = []
        for word in range(count):
            bits = unsigned[..., sum(counts[:head]) + word]
            for plane, width in enumerate(widths):
                code = bits >> sum(widths[:plane]) & 2**width - 1
                u.append(code & 1)
                found[..., head, :, plane * most + word] = level(u, len(u) - 1, code >> 1, width)
    return found


def least_cost(y: np.ndarray, widths: Sequence[int], weights: np.ndarray) -> float:
    """The least sum of squared, weighted errors over all paths; `y [n]` are the components in the order of the path."""
    return min(
        sum(
            min((weights[n] * (level(u, n, f, width) - y[n])) ** 2 for f in range(2 ** (width - 1)))
            for n, width in enumerate(widths)
        )
        for u in product((0, 1), repeat=len(y))
    )
