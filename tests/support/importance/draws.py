"""Pseudo-random draws and counts of the importance methods, in Python integers."""

import math
from collections.abc import Callable

WORD = 2**32 - 1


def fmix32(x: int) -> int:
    """The finaliser of MurmurHash3 for 32 bits: every bit of x affects every bit of the result."""
    x ^= x >> 16
    x = x * 0x85EBCA6B & WORD
    x ^= x >> 13
    x = x * 0xC2B2AE35 & WORD
    return x ^ x >> 16


def counter_hash(seed: int, layer: int, head: int, position: int) -> int:
    """A 32-bit hash of (seed, layer, head, position): a draw that does not depend on the batch or the order of evaluation."""
    h = 0
    for number, word in enumerate((seed & WORD, seed >> 32 & WORD, layer, head, position)):
        if number:
            h = h * 5 + 0xE6546B64 & WORD
        h = fmix32(h ^ word)
    return h


def count(share: float, tokens: int) -> int:
    """The number of tokens in a share of `tokens`: rounded down, at least 1; 0 for a share of 0."""
    return max(1, math.floor(share * tokens + 1e-9)) if share > 0 else 0


def probe_rows(strategy: str, share: float, total: int, draw: Callable[[int], int]) -> set[int]:
    """Probe rows of a prompt of `total` tokens (ZipCache, section 4.3); `draw` is a row's hash."""
    whole, half = count(share, total), count(share / 2, total)

    def drawn(tokens: int, wanted: int) -> set[int]:
        return set(sorted(range(tokens), key=lambda token: (draw(token), token))[:wanted])

    return {
        "all": set(range(total)),
        "recent": set(range(total - whole, total)),
        "random": drawn(total, whole),
        "random+recent": set(range(total - half, total)) | drawn(total - half, half),
    }[strategy]
