"""Components of tokens as trellis-coded levels, and back, by whichever form of the operation the device runs."""

import torch
from torch import Tensor

from calib.kernels.dispatch import prefers_triton
from calib.kernels.pack.reference import Widths
from calib.kernels.trellis import cpu, reference


def trellis_words(y: Tensor, widths: Widths, counts: tuple[int, ...], weights: Tensor) -> Tensor:
    """The words of the paths with the least sums of weighted squared errors; the same bits in any form and on any device.

    Args:
        y: float32 `[batch, kv_heads, tokens, components]`: in units of the components' ranges, [-1, 1], in plane form
            (`kernels/pack/heads.py`). What is no number lies below all levels.
        widths: bits of a word's fields, b of each component.
        counts: words of each KV head.
        weights: float32 `[kv_heads, components]`: of an error of one step, 2^-b, squared; 0 for a component that its head has no
            word for.

    Returns:
        int16 `[batch, 1, tokens, sum(counts)]`: all heads' words side by side.
    """
    if y.is_meta:  # no numbers: any path
        return y.new_empty(y.shape[0], 1, y.shape[2], sum(counts), dtype=torch.int16)
    if prefers_triton(y.device):
        from calib.kernels.trellis import triton

        return triton.trellis_words(y, widths, counts, weights)
    if cpu.serves(y, weights):
        return cpu.trellis_words(y, widths, counts, weights)
    return reference.trellis_words(y, widths, counts, weights)


def trellis_levels(words: Tensor, widths: Widths, counts: tuple[int, ...]) -> Tensor:
    """The numbers i of levels y^ = 2^-b (i + 1/2) - 1: a tile's words `[..., 1, sum(counts), T]` -> int16
    `[..., kv_heads, components, T]`, in plane form. Of a component that its head has no word for, any number of that many bits."""
    if cpu.reads(words):
        return cpu.trellis_levels(words, widths, counts)
    return reference.trellis_levels(words, widths, counts)
