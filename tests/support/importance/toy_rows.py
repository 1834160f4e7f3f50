"""Queries, keys and values for the oracle of the importance methods, and walks through them."""

import numpy as np

HEADS, KV_HEADS, DIM = 4, 2, 8


def drawn(tokens: int, heads: int = HEADS, kv_heads: int = KV_HEADS, seed: int = 0) -> list[np.ndarray]:
    """Queries, keys and values `[heads, tokens, DIM]`."""
    draw = np.random.default_rng(seed)
    return [draw.standard_normal((h, tokens, DIM)) for h in (heads, kv_heads, kv_heads)]


def walk(method, parts: list[np.ndarray], *cuts: int) -> np.ndarray:
    """Outputs of forwards that end after `cuts` tokens."""
    pieces = [[part[:, start:stop] for part in parts] for start, stop in zip((0, *cuts), cuts, strict=False)]
    return np.concatenate([method.forward(*piece) for piece in pieces], 1)


def row_of(weights: list[float]) -> list[np.ndarray]:
    """Queries, keys, values of one head and channel: attention to token i is `weights[i]` over the sum of the weights seen."""
    keys = np.log(np.array(weights))[None, :, None]
    return [np.ones_like(keys), keys, np.arange(len(weights), dtype=np.float64)[None, :, None]]
