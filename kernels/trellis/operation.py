"""Trellis-coded quantisation of components of tokens, and decoding, by the implementation for the device."""

import torch
from torch import Tensor

from calib.kernels.dispatch import prefers_triton
from calib.kernels.pack.reference import Widths
from calib.kernels.trellis import cpu, reference


def trellis_words(y: Tensor, widths: Widths, counts: tuple[int, ...], weights: Tensor) -> Tensor:
    """Encodes components: words of the trellis path with the least weighted squared error; the same bits on every device.

    Args:
        y: components in units of their ranges, [-1, 1], in plane form (`kernels/pack/heads.py`), float32 `[batch, kv_heads, tokens,
            components]`. NaN is treated as below all levels.
        widths: bits b of a word's fields, one per component of a word.
        counts: words of each KV head.
        weights: weight of a squared error in steps of 2^-b, float32 `[kv_heads, components]`; 0 for components beyond a head's own
            words.

    Returns:
        int16 `[batch, 1, tokens, sum(counts)]`, the words of all heads in one row.
    """
    if y.is_meta:  # no data
        return y.new_empty(y.shape[0], 1, y.shape[2], sum(counts), dtype=torch.int16)
    if prefers_triton(y.device):
        from calib.kernels.trellis import triton

        return triton.trellis_words(y, widths, counts, weights)
    if cpu.serves(y, weights):
        return cpu.trellis_words(y, widths, counts, weights)
    return reference.trellis_words(y, widths, counts, weights)


def trellis_levels(words: Tensor, widths: Widths, counts: tuple[int, ...]) -> Tensor:
    """Decodes a tile's words `[..., 1, sum(counts), T]` to the numbers i of levels y^ = 2^-b (i + 1/2) - 1: int16 `[..., kv_heads,
    components, T]`, in plane form. Components beyond a head's own words get any number of that many bits."""
    if cpu.reads(words):
        return cpu.trellis_levels(words, widths, counts)
    return reference.trellis_levels(words, widths, counts)
